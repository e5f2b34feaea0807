"""Several trainer processes do what one does: the same weights, the same figures, an end for all of them."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3Config

from grpo_trainer import follower
from grpo_trainer.batch.batching import deal, ready
from grpo_trainer.config.options import build
from grpo_trainer.config.train import DistributedConfig, TrainConfig
from grpo_trainer.errors import (
    CommonDriftError,
    CommonError,
    CommonTrainingError,
    ConfigError,
    DriftError,
    GrpoError,
    PeerGoneError,
    TrainingError,
)
from grpo_trainer.follower import run_worker, servers_there
from grpo_trainer.metrics.types import Max, Mean, Sum
from grpo_trainer.optim.eight_bits import recoded
from grpo_trainer.parallel import shard_states
from grpo_trainer.parallel.shard_states import STATES_FOLDER
from grpo_trainer.parallel.world import Command, End, Step, World, buckets, join
from grpo_trainer.rollouts.groups import Sample
from grpo_trainer.saving.manifest import DamagedError, check_files, read_state
from grpo_trainer.trainer import Trainer
from tests.integration.serving import save_tiny_model
from tests.processes import ROOT, free_port
from tests.unit import two_trainers
from tests.unit.factories import batch, sample
from tests.unit.tiny_lora import tiny_lora

pytestmark = pytest.mark.usefixtures("warm_trainers")


def sequence(tokens: int) -> Sample:
    import numpy as np

    return Sample(np.zeros(tokens, np.int64), np.array([1]))


@given(st.lists(st.integers(2, 500), max_size=40), st.integers(1, 8))
def test_sequences_are_dealt_once_and_evenly(lengths: list[int], processes: int) -> None:
    sequences = [sequence(length) for length in lengths]
    shares = deal(sequences, processes)
    assert len(shares) == processes
    assert sorted(map(id, sequences)) == sorted(id(one) for share in shares for one in share)
    loads = [sum(len(one.tokens_T) for one in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_buckets_hold_one_dtype_each_and_no_more_than_fits() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(100), torch.zeros(1)]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors, limit=32)]
    assert sizes == [[4, 3], [100], [1], [2]]
    assert buckets([]) == []


def test_metrics_travel_as_numbers() -> None:
    metrics = (Mean(torch.tensor(3.0), torch.tensor(2)), Sum(torch.tensor(1.5)), Max(torch.tensor(2.0)))
    assert [metric.numbers() for metric in metrics] == [Mean(3.0, 2.0), Sum(1.5), Max(2.0)]


def test_one_process_is_alone_and_each_of_several_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = join(DistributedConfig(), on_gpu=False)
    assert world.alone and world.leads
    assert world.gather("x") == ["x"]
    parameter = torch.nn.Parameter(torch.zeros(2))
    world.sum_gradients([parameter])
    world.check_agreement([parameter])
    assert parameter.grad is None
    with pytest.raises(ConfigError) as crowded:
        join(DistributedConfig(trainer_rank=999, world_size=1000, init_method="tcp://127.0.0.1:1"), on_gpu=True)
    assert crowded.value.field == "rank 999 of 1000" and "GPU" in crowded.value.wanted


class Meeting(World):
    """One of two processes; the other arrives at once."""

    met = 0

    def gather(self, value: Any) -> list[Any]:
        self.met += 1
        return [value] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["lora_only", "broadcast"])
def test_all_processes_wait_until_the_first_has_found_the_servers(
    monkeypatch: pytest.MonkeyPatch, mode: str, rank: int
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(follower, "wait_for_servers", lambda config, _: asked.append(config))
    config, world = build(TrainConfig, {"model": "m", "weight_bridge_mode": mode}), Meeting(rank, 2)
    servers_there(config, world)()
    assert (len(asked), world.met) == (1 - rank, 1)


@pytest.mark.parametrize("mode", ["none", "lora_restart", "shared_vllm"])
def test_there_is_no_server_to_wait_for_before_the_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(follower, "wait_for_servers", lambda *_: pytest.fail("it waits"))
    world = Meeting(0, 2)
    servers_there(build(TrainConfig, {"model": "m", "weight_bridge_mode": mode}), world)()
    assert not world.met


def test_a_world_of_one_gives_no_orders() -> None:
    with World() as world:
        world.give([])


class Recording(World):
    """One of two processes, whose other does not exist: its commands come from `orders`."""

    def __init__(self, rank: int, *orders: Command) -> None:
        super().__init__(rank, 2)
        self.orders = list(orders)
        self.given: list[Command] = []

    def give(self, orders: Sequence[Command]) -> None:
        self.given += orders

    def receive(self) -> Command:
        return self.orders.pop(0)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize("error", [CommonTrainingError("all"), CommonDriftError("all")])
def test_what_all_have_met_is_passed_over_by_those_who_follow(
    monkeypatch: pytest.MonkeyPatch, error: CommonError
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    trainer = trainer_that_raises(error)
    world = Recording(1, Step(trainer.ready(batch(*two_trainers.ONE)), 0), End())
    run_worker(world, trainer)
    assert ended and not world.orders


def test_who_ends_well_waits_for_the_threads_of_what_was_said(tmp_path: Path) -> None:
    """They are the group's, which goes with the last reference to it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    world = Recording(1, End())
    world.control = dist.new_group(backend="gloo")  # type: ignore[assignment]
    group = weakref.ref(world.control)
    run_worker(world, mock.Mock())
    assert group() is None and not dist.is_initialized()


@pytest.mark.parametrize("error", [TrainingError("this one"), DriftError("this one"), PeerGoneError("the other")])
def test_what_one_has_met_alone_ends_it(error: GrpoError) -> None:
    trainer = trainer_that_raises(error)
    world = Recording(1, Step(trainer.ready(batch(*two_trainers.ONE)), 0), End())
    with pytest.raises(type(error)) as met:
        run_worker(world, trainer)
    assert met.value is error
    assert len(world.orders) == 1
    leader = Recording(0)
    with pytest.raises(type(error)), leader, leader.working():
        raise error
    assert not leader.given  # it leaves without a word, which nobody would hear


def trainer_that_raises(error: GrpoError) -> Trainer:
    trainer = Trainer(tiny_lora(), build(TrainConfig, {"model": "x"}))
    trainer.step = mock.Mock(side_effect=error)
    return trainer


@pytest.mark.parametrize("has_head", [True, False])
def test_a_teachers_unknown_token_is_found_before_anybody_has_a_share(has_head: bool) -> None:
    """Of a model, too, whose configuration has the size of the vocabulary in that of its text."""
    world = Recording(0)
    trainer = Trainer(tiny_lora(), build(TrainConfig, {"model": "x", "distill_coef": 1.0}), world=world)
    assert trainer.forward.head is not None
    base = trainer.model.get_base_model()  # type: ignore[operator]
    base.config = Gemma3Config(text_config={"vocab_size": 64})
    assert not hasattr(base.config, "vocab_size")
    if not has_head:
        trainer.forward.head = None
    unknown = sample([5], [6], 1.0, teacher=[{64: -0.1}]), sample([5], [7], 0.0)
    with pytest.raises(TrainingError) as refused:
        trainer.step(batch(unknown), 0)
    assert (refused.value.field, refused.value.got) == ("distill_token_ids", "64")
    assert not world.given


# ---------------------------------------------------------------- real processes

UNEVEN = ("batch_size=1", "entropy_coef=0.1")  # so that one process has more passes than the other
SHARDED = ("weight_bridge_mode=none", "loss=gspo", "updates_per_batch=2", "lr=1e-4", "sharding=full", *UNEVEN)


def start(size: int, folder: Path, *options: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    words = [sys.executable, "-m", "tests.unit.two_trainers"]
    return [
        subprocess.Popen(
            [*words, str(rank), str(size), str(port), str(folder), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def run(size: int, folder: Path, *options: str) -> dict[str, Any]:
    """Return the weights of a trainer of `size` processes; a single one runs in this process."""
    if size == 1:
        threads = torch.get_num_threads()
        two_trainers.main(0, 1, 0, folder, dict(option.split("=", 1) for option in options))
        torch.set_num_threads(threads)
    else:
        processes = start(size, folder, *options)
        said = [process.communicate(timeout=200)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * size, "\n".join(text[-2000:] for text in said)
    return torch.load(folder / f"led_by_{size}.pt")


def assert_alike(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert one["weights"].keys() == several["weights"].keys()
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, several["weights"][name], atol=5e-6, rtol=1e-4), name
    assert torch.allclose(one["probe"], several["probe"], atol=1e-4)
    for value in several["scores"].tolist():  # of rank 0's share
        assert any(value == pytest.approx(known, abs=1e-4) for known in one["scores"].tolist())
    rows = [json.loads(found["metrics"]) for found in (one, several)]
    for alone, together in zip(*rows, strict=True):
        assert alone.keys() == together.keys()
        for key in alone.keys() - {key for key in alone if key.endswith("time")}:
            slack = 0.05 if key == "train/changed_fraction" else 2e-5  # by updates near the spacing of float32
            assert alone[key] == pytest.approx(together[key], rel=2e-3, abs=slack), key


@pytest.mark.parametrize(
    "options",
    [
        ("weight_bridge_mode=lora_only", "lora_r=8", "loss=dapo", "kl_beta=0.1"),
        ("weight_bridge_mode=none", "loss=gspo", "updates_per_batch=2", "lr=1e-4", "sharding=none"),
        SHARDED,
    ],
    ids=["adapter", "all weights", "a part of all weights"],
)
def test_two_processes_train_as_one_does(tmp_path: Path, options: tuple[str, ...]) -> None:
    save_tiny_model(tmp_path / "model")
    alone, together = run(1, tmp_path, *options), run(2, tmp_path, *options)
    assert_alike(alone, together)
    if "sharding=full" in options:
        for size in (1, 2):  # a checkpoint is an ordinary one
            config = json.loads((tmp_path / f"checkpoints{size}" / "step_3" / "config.json").read_text())
            assert config["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.complete
def test_any_number_of_processes_resumes_what_any_number_wrote(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    alone, together = run(1, tmp_path, *SHARDED), run(2, tmp_path, *SHARDED)
    check_resumed(tmp_path, SHARDED, alone, together)


@pytest.mark.complete
def test_states_in_8_bits_are_cut_anew_for_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "model")
    eight = ("weight_bridge_mode=none", "optimizer=adamw_8bit", "lr=1e-4", "sharding=full")
    saved = {size: run(size, tmp_path, *eight) for size in (1, 2)}
    ends = (tmp_path / str(number) for number in itertools.count())

    def off(size: int, writers: int) -> float:
        """How far from where the writers themselves came to."""
        resumed = f"resume={tmp_path}/checkpoints{writers}/step_3"
        gone_on = run(size, tmp_path, *eight, resumed, f"save_path={next(ends)}")
        return max_difference(gone_on["weights"], saved[writers]["later"])

    def forgotten(codes: torch.Tensor, *of_it: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = recoded(codes, *of_it, **more)
        return codes, torch.zeros_like(scales)

    assert off(2, 2) == 0
    found = off(1, 2), off(2, 1)
    monkeypatch.setattr(shard_states, "recoded", forgotten)
    lost = off(1, 2)
    assert max(found) < 5e-5 < 1e-4 < lost, (found, lost)  # the blocks of steps to come are others, too


def check_resumed(folder: Path, options: Sequence[str], alone: dict[str, Any], together: dict[str, Any]) -> None:
    """Any number of processes resumes from what any number wrote, as if the run had not ended."""

    def gone_on(size: int, writers: int) -> dict[str, torch.Tensor]:
        saved = folder / f"checkpoints{writers}" / "step_3"
        return run(size, folder, *options, f"resume={saved}", f"save_path={folder}/{writers}_then_{size}")["weights"]

    states = folder / "checkpoints2" / "step_3" / STATES_FOLDER
    assert sorted(file.name for file in states.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    undisturbed = together["later"]
    assert max_difference(undisturbed, together["weights"]) > 1e-4
    assert max_difference(gone_on(2, 2), undisturbed) == 0
    assert max_difference(gone_on(1, 2), undisturbed) < 1e-6
    assert max_difference(gone_on(2, 1), alone["later"]) < 1e-6
    for name in (".metadata", "__1_0.distcp"):
        whole = (states / name).read_bytes()
        (states / name).write_bytes(whole[:-1] + b"?")
        for got in ("checksum", "no such file"):
            with pytest.raises(DamagedError) as damaged:
                check_files(states.parent, read_state(states.parent))
            assert damaged.value.field.endswith(f"{STATES_FOLDER}/{name}") and got in damaged.value.got
            (states / name).unlink(missing_ok=True)
        (states / name).write_bytes(whole)


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def test_if_the_first_fails_in_what_all_compute_none_waits_for_ever(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "fail").touch()
    processes = start(2, tmp_path, "weight_bridge_mode=none")
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "MemoryError: " in said[0]
    assert [process.returncode for process in processes] == [1, 1], said[1][-2000:]


def test_a_process_is_told_its_share_and_no_more() -> None:
    config = build(TrainConfig, {"model": "x", "seq_len": 10_000, "batch_size": 2})
    long = [[sample([5], [*range(2000)], 1.0), sample([5], [*range(2000)], 0.0)] for _ in range(4)]
    whole = ready(batch(*long), config, processes=4)
    (second, *_) = whole.shares_of_others()
    assert len(whole.shares_of_others()) == 3 and second.microbatches == whole.others[0]
    (microbatch,) = second.microbatches
    tensors = [value for value in vars(microbatch).values() if isinstance(value, torch.Tensor)]
    assert 2 * 2001 * 8 < sum(tensor.nbytes for tensor in tensors) < len(pickle.dumps(second))
    assert len(pickle.dumps(second)) < 1.1 * sum(tensor.nbytes for tensor in tensors) + 10_000
    assert not second.sequences
    assert second.largest_weight == whole.largest_weight == 1 / (8 * 2000)


@pytest.mark.parametrize("killed", [0, 1])
def test_if_one_process_dies_none_waits_for_ever(tmp_path: Path, killed: int) -> None:
    save_tiny_model(tmp_path / "model")
    processes = start(2, tmp_path, "weight_bridge_mode=lora_only", "lora_r=8")
    try:
        for process in processes:
            assert process.stdout is not None
            assert any(line == "joined\n" for line in process.stdout), "they have met"
        os.kill(processes[killed].pid, signal.SIGKILL)
        other = processes[1 - killed]
        said, _ = other.communicate(timeout=100)
        assert other.returncode not in (0, None), said[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
