"""Two trainer processes on the weights of two real servers: one policy, one version, no second copy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_trainer.metrics.types import reduce
from grpo_trainer.trainer import Trainer
from tests.integration.paired import BATCH, DIED, STEPS, settings
from tests.integration.serving import START_LIMIT_S, Serving, serving
from tests.processes import ROOT, answers, free_port, running, tail, wait_for
from tests.runs import arguments, finished, of_mode, rows
from tests.unit.factories import batch

pytestmark = pytest.mark.timeout(600)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers that start at the same time, each with its own model folder of the same weights."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            folder = tmp_path_factory.mktemp(name)
            flags = ("--shared-weights", "--bridge-config-path", str(folder / "bridge.json"))
            made.append(stack.enter_context(serving(folder, *flags, wait=False)))
        for server in made:
            wait_for(
                "a healthy server", lambda at=server.url: answers(f"{at}/health"), server.log, START_LIMIT_S
            )  # fmt: skip
        yield made


def trained(
    servers: Sequence[Serving], folder: Path, *options: str, statuses: tuple[int, int] = (0, 0)
) -> list[dict[str, Any]]:
    """What each rank saw; nothing of one that died."""
    folder.mkdir(exist_ok=True)
    ports = ",".join(server.url.rpartition(":")[2] for server in servers)
    meeting = str(free_port())
    words = [sys.executable, "-m", "tests.integration.paired"]
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(folder), str(servers[0].model_folder), meeting, ports, *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert tuple(process.returncode for process in processes) == statuses, "\n".join(text[-3000:] for text in said)
    paths = [folder / f"rank{rank}.pt" for rank in range(2)]
    return [torch.load(path) for path in paths if path.exists()]


def alone(server: Serving, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process on the same batches."""
    config = settings(server.model_folder, folder, ["1"])
    model = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32).train()
    trainer = Trainer(model, config)
    losses = [reduce(trainer.step(batch(*BATCH), step).metrics)["train/loss"] for step in range(STEPS)]
    return losses, dict(model.named_parameters())


def test_two_pairs_train_as_one_process_and_a_torn_pair_is_healed(servers: list[Serving], tmp_path: Path) -> None:
    first, second = trained(servers, tmp_path)
    assert "error" not in first, first["error"]
    losses, weights = alone(servers[0], tmp_path / "alone")
    assert first["losses"] == pytest.approx(losses, abs=1e-6)
    for name, weight in weights.items():
        assert torch.allclose(first["weights"][name], weight, atol=1e-6, rtol=0), name
    assert first["noise"] < TOLERANCE and max(first["gaps"]) < TOLERANCE
    assert first["versions"] == list(range(STEPS + 1))
    assert first["answered"] == [version for version in range(1, STEPS + 1) for _ in servers]
    assert first["boot"] != second["boot"], "each rank is in the memory of its own server"
    for seen in (first, second):
        assert seen["mapped"] == seen["size"], "every parameter lies in a file that the server maps"
        assert seen["states"] <= 1.05 * seen["size"], "8 bytes for half of the weights, which have 4"
        assert seen["others"] < 0.2 * seen["size"], "a second copy"
    # A rank dies within the fence: the other reports it, the own server's timeout detects it.
    (left,) = trained(servers, tmp_path / "torn", "fault=dies within the fence", statuses=(0, DIED))
    assert left["error"][0] == "PeerGoneError"
    for server in servers:
        wait_for("the server refuses", lambda at=server: at.get("/health").status_code == 503, server.log, 30)
    refused, _ = trained(servers, tmp_path / "refused")
    assert refused["error"][0] == "CommonBridgeError" and all(server.url in refused["error"][1] for server in servers)
    healed, _ = trained(servers, tmp_path, "resume=auto")
    assert "error" not in healed, healed["error"]
    assert healed["versions"][0] > STEPS and max(healed["gaps"]) < TOLERANCE
    assert all(server.get("/health").status_code == 200 for server in servers)


def test_servers_with_weights_of_different_versions_are_refused(servers: list[Serving], tmp_path: Path) -> None:
    """The second server gets a step more, by another trainer: the pairs then hold different versions."""
    ports = [server.url.rpartition(":")[2] for server in servers]
    words = [sys.executable, "-m", "tests.integration.paired", "0", str(tmp_path), str(servers[1].model_folder)]
    subprocess.run([*words, str(free_port()), ports[1]], cwd=ROOT, check=True, timeout=240)
    assert "error" not in torch.load(tmp_path / "rank0.pt")
    first, _ = trained(servers, tmp_path / "pairs")
    assert first["error"][0] == "CommonBridgeError" and "version" in first["error"][1]


# ---------------------------------------------------------------- whole runs


def test_a_run_of_two_pairs_resumes_with_one(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = of_mode("shared_vllm")
    with running(*arguments(demo_model, run_dir, **options, trainer_gpus=2), log=log) as process:
        assert finished(process, log, 300) == 0, tail(log)
    with running(*arguments(demo_model, run_dir, **options, training_steps=5, resume="auto"), log=log) as process:
        assert finished(process, log, 300) == 0, tail(log)
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3, 4, 5]
    assert_fresh(done)
    said = (run_dir / "logs" / "trainer-1.log").read_text()
    assert "Single-copy mode active" in said and "bridge proved" in said


def test_two_adapters_over_the_bases_of_two_servers(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = of_mode("lora_only", **{"share-base": True, "trainer-gpus": 2})
    with running(*arguments(demo_model, run_dir, **options), log=log) as process:
        assert finished(process, log, 300) == 0, tail(log)
    assert_fresh(rows(run_dir))
    assert (run_dir / "checkpoints" / "adapter_final" / "adapter_model.safetensors").exists()
    for name in ("trainer", "trainer-1"):
        assert "Single-copy mode active" in (run_dir / "logs" / f"{name}.log").read_text()


def assert_fresh(done: list[dict[str, Any]]) -> None:
    """Samples of both servers are those of the trainer's policy."""
    fresh = [row for row in done if row.get("rollout/staleness_max") == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)
