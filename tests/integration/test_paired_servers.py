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

from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.trainer import Trainer
from tests.integration.paired import STEPS
from tests.integration.serving import START_LIMIT_S, Serving, serving
from tests.processes import ROOT, answers, free_port, running, tail, wait_for
from tests.runs import arguments, finished, of_mode, rows
from tests.shared_contract import BATCH, MOMENTS, PROMISES, TOLERANCE, SharedContract, settings

pytestmark = pytest.mark.timeout(600)

WIDE = 1 << 15
"""Columns of the MLP. The weights take 50 MB, so that a copy shows in a process's memory."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers that start at the same time, each with its own model folder of the same weights."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            folder = tmp_path_factory.mktemp(name)
            flags = ("--shared-weights", "--bridge-config-path", str(folder / "bridge.json"))
            made.append(stack.enter_context(serving(folder, *flags, wait=False, intermediate_size=WIDE)))
        for server in made:
            wait_for(
                "a healthy server", lambda at=server.url: answers(f"{at}/health"), server.log, START_LIMIT_S
            )  # fmt: skip
        yield made


def trained(servers: Sequence[Serving], folder: Path, *options: str) -> list[dict[str, Any]]:
    """What each rank saw."""
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
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in said)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def alone(server: Serving, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process on the same batches."""
    config = settings(server.model_folder, folder, ["1"])
    model = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32).train()
    trainer = Trainer(model, config)
    losses = [reduce(trainer.step(BATCH, step).metrics)["train/loss"] for step in range(STEPS)]
    return losses, dict(model.named_parameters())


def test_two_pairs_train_as_one_process_on_one_copy_each(servers: list[Serving], tmp_path: Path) -> None:
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
        assert seen["states"] <= 1.05 * seen["size"], "8 bytes for half of the weights, which have 4"
        assert_one_copy(seen)


def assert_one_copy(seen: dict[str, Any]) -> None:
    """A rank's weights are the server's memory, and it never takes memory in which a copy of them would fit."""
    size = seen["size"]
    assert seen["mapped"] == size, "every parameter lies in a file that the server maps"
    assert seen["files"] == 1, "and in the file of one worker"
    assert seen["others"] < 0.3 * size, "tensors besides weights and states"
    first, *later = (taken["anonymous"] for taken in seen["taken"]["begins"])
    writes = [taken["anonymous"] for taken in seen["taken"]["writes"]]
    assert first < 0.8 * size, "attached and proved; clients of servers take 14 MB"
    assert max(later) - first < seen["states"] + 0.5 * size
    assert max(writes) - first < seen["states"] + size + 0.5 * size, "the new weights are in the gradients' memory"
    assert all(taken["shared"] < 1.25 * size for taken in seen["taken"]["writes"]), "each page is mapped once"


@pytest.mark.parametrize("promise", PROMISES)
def test_two_pairs_keep(servers: list[Serving], tmp_path: Path, promise: str) -> None:
    getattr(SharedContract(servers, tmp_path), promise)()


def test_two_pairs_write_while_requests_run(servers: list[Serving], tmp_path: Path) -> None:
    SharedContract(servers, tmp_path).writes_while_requests_run("keep", optimizer="adamw_8bit")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_dies(servers: list[Serving], tmp_path: Path, moment: str) -> None:
    SharedContract(servers, tmp_path).survives_a_rank_that_dies(moment)


def test_ranks_that_differ(servers: list[Serving], tmp_path: Path) -> None:
    SharedContract(servers, tmp_path).finds_ranks_that_differ()


def test_two_ranks_in_the_memory_of_one_server_are_refused(servers: list[Serving], tmp_path: Path) -> None:
    pairs = SharedContract(servers, tmp_path)
    with pairs.attached("another's server") as made, pytest.raises(BridgeError) as refused:
        made.bridge.connect(0)
    assert refused.value.field == "boot_id"


def test_servers_with_weights_of_different_versions_are_refused(servers: list[Serving], tmp_path: Path) -> None:
    """The second server gets a step more, by another trainer: the pairs then hold different versions."""
    with SharedContract(servers[1:], tmp_path).attached() as made:
        made.bridge.connect(0)
        assert made.step()
    with SharedContract(servers, tmp_path).attached() as made, pytest.raises(BridgeError) as refused:
        made.bridge.connect(0)
    assert refused.value.field == "version"


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
