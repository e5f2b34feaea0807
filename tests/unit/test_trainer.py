"""The optimisation step: splitting changes nothing, bad steps touch nothing, good ones land."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.batching import prepare
from grpo_trainer.config import LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from grpo_trainer.errors import StoppedError, TrainingError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts.types import RolloutBatch
from grpo_trainer.trainer import Trainer, loss_scale
from tests.unit.factories import VOCAB, TinyModel, batch, sample


def config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {"model": ModelConfig(name="tiny"), "batch_size": 4, "training_steps": 10}
    return TrainConfig.model_validate({**values, **changes})


def rollouts(seed: int = 0, groups: int = 3) -> RolloutBatch:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        rows = []
        for i in range(4):
            completion = random.integers(0, VOCAB, random.integers(1, 7)).tolist()
            logprobs = (-random.random(len(completion)) * 2 - 0.1).tolist()
            rows.append(sample([1, 2], completion, float(i % 2), logprobs=logprobs))
        made.append(rows)
    return batch(*made)


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in trainer.parameters if p.grad is not None]


@settings(max_examples=15)
@given(st.integers(1, 12), st.sampled_from(["grpo", "dapo", "dr_grpo"]), st.integers(0, 5))
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(size: int, loss: str, seed: int) -> None:
    results = []
    for batch_size in (12, size):
        trainer = Trainer(
            TinyModel(), config(batch_size=batch_size, loss={"loss": loss}, optimizer={"max_grad_norm": 0})
        )
        result = trainer.step(rollouts(seed), 0)
        results.append((reduce(result.metrics), gradients(trainer)))
    (whole, whole_grads), (parts, part_grads) = results
    for key in ("train/loss", "grpo/mean_ratio", "grpo/entropy", "train/grad_norm", "grpo/clipped_fraction"):
        assert parts[key] == pytest.approx(whole[key], abs=1e-6, rel=1e-5), key
    for a, b in zip(whole_grads, part_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_order_of_groups_changes_nothing() -> None:
    forward, backward = rollouts(), rollouts()
    backward = RolloutBatch("b", tuple(reversed(backward.groups)), {})
    losses = [reduce(Trainer(TinyModel(), config()).step(b, 0).metrics)["train/loss"] for b in (forward, backward)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_step_raises_the_logprob_of_what_was_rewarded() -> None:
    model = TinyModel()
    good, bad = sample([1, 2], [3], 1.0), sample([1, 2], [4], 0.0)

    def logprob_of(token: int) -> float:
        logits = model(torch.tensor([[1, 2]]), use_cache=False).logits[0, -1]  # type: ignore[attr-defined]
        return torch.log_softmax(logits, -1)[token].item()

    before = logprob_of(3), logprob_of(4)
    trainer = Trainer(model, config(optimizer={"lr": 1e-2}))
    result = trainer.step(batch([good, bad]), 0)
    assert result.updated
    assert logprob_of(3) > before[0] and logprob_of(4) < before[1]
    assert 0 < reduce(result.metrics)["train/changed_fraction"] <= 1


def test_a_step_without_a_spread_of_rewards_is_skipped_and_changes_nothing() -> None:
    model = TinyModel()
    before = copy.deepcopy(model.state_dict())
    result = Trainer(model, config()).step(batch([sample([1], [2], 1.0), sample([1], [3], 1.0)]), 0)
    assert not result.updated
    numbers = reduce(result.metrics)
    assert numbers["train/loss"] == 0 and numbers["train/skipped"] == 1
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_nan_leaves_weights_and_optimizer_untouched_and_too_many_stop_the_run() -> None:
    model = TinyModel()
    trainer = Trainer(model, config(optimizer=OptimizerConfig(max_bad_steps=2)))
    poisoned = batch([sample([1], [2], 1.0, logprobs=[float("nan")]), sample([1], [3], 0.0)])
    before = copy.deepcopy(model.state_dict())
    assert not trainer.step(poisoned, 0).updated
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not trainer.optimizer.state_dict()["state"]
    assert trainer.step(rollouts(), 1).updated  # a good step in between starts the count anew
    assert not trainer.step(poisoned, 2).updated
    with pytest.raises(TrainingError, match="2 steps in a row"):
        trainer.step(poisoned, 3)


def test_a_stop_between_microbatches_leaves_the_weights_untouched() -> None:
    model = TinyModel()
    calls: list[int] = []

    def stop_at_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise StoppedError("stopped by SIGTERM", 15)

    trainer = Trainer(model, config(batch_size=2), stop_at_second)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StoppedError) as stopped:
        trainer.step(rollouts(), 0)
    assert stopped.value.exit_code == 143
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("weight", [1.0, 0.7, 1 / 512, 1 / 3_000_000])
def test_the_loss_scale_is_a_power_of_two_that_brings_the_weight_near_one(weight: float) -> None:
    sequence = prepare(rollouts(), LossConfig(), 100).sequences[0]
    scale = loss_scale([replace(sequence, weight=weight)])
    assert math.log2(scale).is_integer() and 0.5 < weight * scale < 2
    assert loss_scale([]) == 1.0


@contextmanager
def told(events: list[str], watched: Callable[[], object]) -> Iterator[None]:
    """A fence that says when it is entered and left, and whether what is watched changed within."""
    before = copy.deepcopy(watched())
    events.append("begin")
    yield
    events.append("end" if watched() != before else "end, nothing changed")


def test_the_fence_is_held_for_the_write_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel().to(torch.bfloat16)
    trainer = Trainer(model, config(optimizer={"lr": 1e-2}))
    events: list[str] = []
    prepare = trainer.optimizer.prepare
    monkeypatch.setattr(trainer.optimizer, "prepare", lambda: (events.append("prepared"), prepare()))
    model.register_forward_hook(lambda *_: events.append("forward"))
    weights = lambda: [parameter.tolist() for parameter in trainer.parameters]  # noqa: E731
    result = trainer.step(rollouts(), 0, lambda: told(events, weights))
    assert events == [*["forward"] * 3, "prepared", "begin", "end"]
    assert reduce(result.metrics)["train/changed_fraction"] > 0


def test_a_step_that_is_skipped_takes_no_fence() -> None:
    trainer = Trainer(TinyModel(), config())
    poisoned = batch([sample([1], [2], 1.0, logprobs=[float("nan")]), sample([1], [3], 0.0)])
    even = batch([sample([1], [2], 1.0), sample([1], [3], 1.0)])
    events: list[str] = []
    for data in (poisoned, even):
        assert not trainer.step(data, 0, lambda: told(events, list)).updated
    assert not events


def test_16_bit_weights_without_a_landing_optimizer_are_refused() -> None:
    with pytest.raises(TypeError, match="float16, wanted float32, bfloat16, or --master-weights"):
        Trainer(TinyModel().to(torch.float16), config())


def test_paths_in_a_configuration_survive_validation() -> None:
    assert config(checkpoints={"save_path": "x"}).log_dir == Path("x")
