"""Two trainer processes on the weights of two real servers, or on the shards of one server's two workers.

One policy, one version, no second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.policy import build_policy
from grpo_trainer.trainer import Trainer
from tests.integration.paired import EXCHANGED, STEPS, exchanged_shards
from tests.integration.serving import (
    START_LIMIT_S,
    Serving,
    assert_ends_at_one_of_many_stop_ids,
    serving,
)
from tests.processes import answers, free_port, modules, said_by, wait_for
from tests.runs import assert_fresh, of_mode
from tests.runs import trained as run
from tests.shared_contract import BATCH, TOLERANCE, WRITES, SharedContract, settings

pytestmark = pytest.mark.timeout(600)

WIDE = 1 << 14
"""Columns of the MLP for each worker. Its weights take 25 MB, so that a copy shows in a process's memory."""
OF_PAIRS = pytest.mark.parametrize("servers", ["pairs"], indirect=True)
OF_SHARDS = pytest.mark.parametrize("servers", ["shards"], indirect=True)


@pytest.fixture(scope="module", params=["pairs", "shards"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers that start at the same time, each with its own folder of the same weights; or one of two workers."""
    count = 2 if request.param == "pairs" else 1
    with ExitStack() as stack:
        made = []
        for number in range(count):
            folder = tmp_path_factory.mktemp(f"server-{number}")
            flags = ["--shared-weights", "--bridge-config-path", str(folder / "bridge.json")]
            flags += ["--tensor-parallel-size", str(2 // count)]
            starting = serving(folder, *flags, wait=False, key_value_heads=2, intermediate_size=WIDE * 2 // count)
            made.append(stack.enter_context(starting))
        for server in made:
            wait_for("a healthy server", lambda at=server: answers(f"{at.url}/health"), server.log, START_LIMIT_S)
        yield made


@pytest.fixture
def two(servers: list[Serving], tmp_path: Path) -> SharedContract:
    """The contract with two trainer processes."""
    return SharedContract(servers, tmp_path, workers=2 // len(servers))


def trained(servers: Sequence[Serving], folder: Path, *options: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What both ranks saw with each optimizer."""
    ports = ",".join(server.url.rpartition(":")[2] for server in servers)
    words = [folder, servers[0].model_folder, free_port(), ports, *options]
    said_by(modules("tests.integration.paired", *([rank, *words] for rank in range(2))), [0, 0])
    return list(zip(*(torch.load(folder / f"rank{rank}.pt") for rank in range(2)), strict=True))


def alone(server: Serving, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process on the same batches."""
    config = settings(server.model_folder, folder, ["1"])
    model = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32).train()
    trainer = Trainer(model, config)
    losses = [reduce(trainer.step(BATCH, step).metrics)["train/loss"] for step in range(STEPS)]
    return losses, dict(model.named_parameters())


def test_two_processes_train_as_one_on_one_copy_each(two: SharedContract) -> None:
    ((first, second),) = trained(two.servers, two.folder, f"tensor_parallel_size={two.workers}")
    assert "error" not in first, first["error"]
    losses, weights = alone(two.servers[0], two.folder / "alone")
    assert first["losses"] == pytest.approx(losses, abs=1e-6)
    for name, weight in weights.items():
        assert torch.allclose(first["weights"][name], weight, atol=1e-6, rtol=0), name
    assert first["noise"] < TOLERANCE and max(first["gaps"]) < TOLERANCE
    assert first["versions"] == list(range(STEPS + 1))
    assert first["answered"] == [version for version in range(1, STEPS + 1) for _ in two.servers]
    assert (first["boot"] == second["boot"]) == (two.workers == 2), "two ranks of pairs have two servers"
    whole = sum(weight.nbytes for weight in weights.values())
    for seen in (first, second):
        assert two.workers == 1 or seen["size"] < 0.6 * whole
        states = 1.05 if two.workers == 1 else 2.1  # 8 bytes for half of the weights, or for each of the shard's
        assert seen["states"] <= states * seen["size"]
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


def test_two_processes_follow_each_step_hand_over_and_heal(two: SharedContract) -> None:
    two.follows_each_step_hands_over_and_heals()


def test_two_processes_write_while_requests_run(two: SharedContract) -> None:
    two.writes_while_requests_run(**WRITES[two.workers - 1])


def test_two_processes_that_died_writing(two: SharedContract) -> None:
    two.heals_after_a_trainer_that_died_writing()


def test_ranks_that_die(two: SharedContract) -> None:
    two.survives_ranks_that_die("before", "after")


def test_ranks_that_differ(two: SharedContract) -> None:
    two.finds_ranks_that_differ()


@OF_PAIRS
def test_two_ranks_in_the_memory_of_one_server_are_refused(two: SharedContract) -> None:
    with two.attached("another's server") as made, pytest.raises(BridgeError) as refused:
        made.bridge.connect(0)
    assert refused.value.field == "boot_id"


@OF_PAIRS
def test_servers_with_weights_of_different_versions_are_refused(two: SharedContract) -> None:
    """The second server gets a step more, by another trainer: the pairs then hold different versions."""
    with SharedContract(two.servers[1:], two.folder).attached() as made:
        made.bridge.connect(0)
        assert made.step()
    with two.attached() as made, pytest.raises(BridgeError) as refused:
        made.bridge.connect(0)
    assert refused.value.field == "version"


@OF_SHARDS
def test_a_completion_ends_at_any_of_many_stop_ids(servers: list[Serving]) -> None:
    """The workers are processes of their own, to which requests are sent."""
    assert_ends_at_one_of_many_stop_ids(servers[0])


@OF_SHARDS
@pytest.mark.parametrize("fault", [EXCHANGED, "another worker's matrix"])
def test_shard_in_the_wrong_place(two: SharedContract, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    (server,) = two.servers
    before = server.get("/bridge/info").json()
    monkeypatch.setenv("BRIDGE_FILE", before["bridge_config_path"])
    with exchanged_shards() if fault == EXCHANGED else nullcontext(), two.attached(fault) as made:
        made.bridge.connect(0)
        with pytest.raises(BridgeError) as refused:
            made.bridge.prove()
    assert FAILED in refused.value.field
    assert server.get("/bridge/info").json()["policy_version"] == before["policy_version"]


@OF_SHARDS
def test_a_trainer_that_does_not_know_of_the_shards_is_refused(servers: list[Serving], tmp_path: Path) -> None:
    (server,) = servers
    config = settings(server.model_folder, tmp_path, [server.url.rpartition(":")[2]])
    with pytest.raises(BridgeError) as refused:
        build_policy(config)
    assert "tp_degree" in refused.value.field and "--server.tensor-parallel-size 2" in refused.value.fix


# ---------------------------------------------------------------- whole runs


def test_two_adapters_over_the_bases_of_two_servers(demo_model: Path, tmp_path: Path) -> None:
    run_dir, share = tmp_path / "run", {"share-base": True, "trainer-gpus": 2, "training-steps": 2}
    assert_fresh(run(demo_model, run_dir, **of_mode("lora_only", **share)))
    assert (run_dir / "checkpoints" / "adapter_final" / "adapter_model.safetensors").exists()
    for name in ("trainer", "trainer-1"):
        assert "Single-copy mode active" in (run_dir / "logs" / f"{name}.log").read_text()
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()


@pytest.fixture(scope="module")
def two_headed(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its only head of keys and values twice, which computes the same."""
    folder = tmp_path_factory.mktemp("two") / "demo-model"
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    config = model.config
    config.num_key_value_heads = 2
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    twice = ("k_proj", "v_proj")
    wide.load_state_dict(
        {
            name: torch.cat([value, value]) if any(part in name for part in twice) else value
            for name, value in model.state_dict().items()
        }
    )
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model).save_pretrained(folder)
    return folder


def test_a_run_goes_on_from_pairs_to_shards_to_one_process(two_headed: Path, tmp_path: Path) -> None:
    run_dir, options = tmp_path / "run", of_mode("shared_vllm")
    pairs = {**options, "trainer-gpus": 2}
    shards = {**pairs, "server.tensor-parallel-size": 2}
    run(two_headed, run_dir, **pairs, training_steps=2)
    run(two_headed, run_dir, **shards, training_steps=4, resume="auto")
    done = run(two_headed, run_dir, **options, training_steps=5, resume="auto")
    assert [row["step"] for row in done] == [1, 2, 3, 4, 5]
    assert_fresh(done)
    said = (run_dir / "logs" / "trainer-1.log").read_text()
    assert said.count("Single-copy mode active") == said.count("bridge proved") == 2
