"""Checkpoints and prefetching where weights lie on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_trainer.batch.batching import ready
from grpo_trainer.config.train import CheckpointConfig, RolloutConfig, TrainConfig
from grpo_trainer.feed import BatchFeed
from grpo_trainer.locked_memory import LockedMemory
from grpo_trainer.policy import AllWeights
from grpo_trainer.rollouts.filter import GroupFilter
from grpo_trainer.rollouts.groups import RolloutBatch
from grpo_trainer.saving.background import Snapshot
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, sample
from tests.unit.tiny_lora import tiny_qwen
from vllm_server.protocol.file_parts import page_lock

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GROUP = [sample([1, 2], [3, 4], 1.0), sample([1, 2], [5], 0.0)]
CONFIG = TrainConfig(model_name="tiny", device="cuda", dtype="float32", training_steps=100)


def test_a_copy_is_page_locked_and_does_not_change_with_the_gpu() -> None:
    snapshot = Snapshot()
    on_gpu = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    taken = snapshot.take({"a": on_gpu, "b": on_gpu.to(torch.bfloat16)})
    assert taken is not None
    taken.precede()
    on_gpu.zero_()
    copy = taken.whole()
    assert copy["a"].is_pinned() and copy["a"].device.type == "cpu"
    assert torch.equal(copy["a"], torch.arange(1 << 20, dtype=torch.float32))
    assert copy["b"].dtype == torch.bfloat16
    snapshot.close()


def test_memory_can_be_page_locked_again_after_it_was_freed() -> None:
    for _ in range(3):
        memory = LockedMemory(1 << 28)
        tensor = memory.take([1 << 20], torch.float32)
        assert memory.is_locked
        del memory
        assert tensor.is_pinned()


def test_memory_that_can_not_be_page_locked_leaves_no_error_to_the_next_kernel() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    assert page_lock(memory) and not page_lock(memory)
    assert float(torch.zeros(3, device="cuda").add_(1).sum()) == 3.0


def test_a_background_checkpoint_resumes_weights_optimizer_and_the_gpus_generator(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        model = tiny_qwen().to("cuda")  # pyright: ignore[reportArgumentType]
        model.requires_grad_(True)
        return Trainer(model, CONFIG)

    def saver(one: Trainer) -> Checkpoints:
        config = CheckpointConfig(save_path=tmp_path, resume="auto", checkpoint_interval=1)
        return Checkpoints(config, AllWeights(one.model, None), one.optimizer, one.norms)  # type: ignore[arg-type]

    one = trainer()
    one.step(batch(GROUP), 0)
    checkpoints = saver(one)
    checkpoints.maybe_save(Progress(1, 1))
    kept = [parameter.detach().clone() for parameter in one.parameters]
    drawn = torch.rand(3, device="cuda")
    one.step(batch(GROUP), 1)
    checkpoints.close()
    other = trainer()
    assert saver(other).resume() == Progress(1, 1)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters, kept, strict=True))
    assert torch.equal(torch.rand(3, device="cuda"), drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_copied_during_the_next_step(tmp_path: Path, dtype: torch.dtype) -> None:
    """The copy begins so late that only a wait on the GPU keeps the next update from being in it."""

    def trainer() -> Trainer:
        model = tiny_qwen().to("cuda", dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
        model.requires_grad_(True)
        return Trainer(model, CONFIG)

    def state(one: Trainer) -> list[torch.Tensor]:
        states = one.optimizer.state_dict()["state"].values()
        tensors = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in [*one.parameters, *tensors]]

    one, snapshot = trainer(), Snapshot()
    for step in range(2):  # whatever the first steps compile and allocate
        one.step(batch(GROUP), step)
    config = CheckpointConfig(save_path=tmp_path, resume="auto", checkpoint_interval=1)
    checkpoints = Checkpoints(config, AllWeights(one.model, None), one.optimizer, snapshot=snapshot)  # type: ignore[arg-type]
    kept = state(one)
    stream = snapshot.stream(one.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2 * 10**10)  # about ten seconds
    assert "train/save_time" in checkpoints.maybe_save(Progress(2, 2))
    assert not stream.query(), "training has waited for the copy"
    one.step(batch(GROUP), 2)
    assert not all(torch.equal(a, b) for a, b in zip(state(one), kept, strict=True))
    checkpoints.close()
    other = trainer()
    assert Checkpoints(config, AllWeights(other.model, None), other.optimizer).resume() == Progress(2, 2)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(state(other), kept, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_that_was_made_ready_lies_in_page_locked_memory(packed: bool) -> None:
    client: Any = SimpleNamespace(lease=lambda check_stop: RolloutBatch("b", batch(GROUP).groups))
    device = torch.device("cuda", torch.cuda.current_device())
    make = partial(ready, config=CONFIG, packed=packed)
    with BatchFeed(client, RolloutConfig(), GroupFilter(None, str), make, lambda: None, device) as feed:
        found = feed.next(0, last=True)
    assert found is not None
    (microbatch,) = found.microbatches
    assert microbatch.tokens_BT.is_pinned() and microbatch.advantages_N.is_pinned()
    if packed:
        assert microbatch.packed is not None
        assert microbatch.packed.boundaries.is_pinned() and microbatch.packed.positions_1T.is_pinned()
