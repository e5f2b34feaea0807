"""The optimisation step: splitting changes nothing, bad steps touch nothing, good ones land."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from grpo_trainer.config.loss import LOSSES as BUILT_IN
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import StoppedError, TrainingError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.reference import FrozenWeights
from grpo_trainer.optim.steps import first_not_finite
from grpo_trainer.rollouts.groups import RolloutBatch, Sample
from grpo_trainer.trainer import Trainer, loss_scale
from tests.unit.factories import VOCAB, TinyModel, batch, refusing, sample


def config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {"model_name": "tiny", "batch_size": 4, "training_steps": 10}
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


def full_rollouts(seed: int = 0) -> RolloutBatch:
    """Besides `rollouts`: samples to imitate, teachers, temperatures, and a group without a spread."""
    random = np.random.default_rng(seed)

    def teacher(length: int) -> list[dict[int, float]]:
        return [
            {int(token): -float(random.random()) for token in random.integers(0, VOCAB, i % 3)} for i in range(length)
        ]

    noted = [sample([1], [3, 4, 5], 1.0, supervised=True), sample([1], [6], 0.0, teacher=[{7: -0.1, 8: -3.0}])]
    dull = [sample([1, 2], [3, 4, 5, 6], 1.0, teacher=teacher(4), temperature=0.7) for _ in range(2)]
    plain = rollouts(seed).groups
    return RolloutBatch("b", (*plain, *batch([*noted, sample([1], [2], 1.0)], dull).groups))


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in trainer.parameters if p.grad is not None]


EVERYTHING = {"kl_beta": 0.1, "entropy_coef": 0.02, "distill_coef": 0.5, "distill_temperature": 2.0}
LOSSES: list[dict[str, object]] = [
    *({"loss": name} for name in BUILT_IN),
    {"loss": "gspo", "ratio_against": "trainer", "is_level": "sequence", **EVERYTHING},
    {"loss": "dapo", "ratio_against": "trainer", "is_correction": "mask", "is_cap": 1.5, **EVERYTHING},
    {"loss": "dr_grpo", "advantage_estimator": "rloo", "dual_clip": 3.0, **EVERYTHING},
]


def trained_once(data: RolloutBatch, loss: dict[str, object], batch_size: int) -> tuple[dict[str, float], list[Tensor]]:
    """Metrics and gradients of a step."""
    model, other = TinyModel(), TinyModel(seed=1)
    settings = config(batch_size=batch_size, **loss, max_grad_norm=0)
    reference = FrozenWeights(model, {name: value.detach() for name, value in other.named_parameters()})
    trainer = Trainer(model, settings, reference=reference.active)
    return reduce(trainer.step(data, 0).metrics), gradients(trainer)


def assert_same(one: tuple[dict[str, float], list[Tensor]], other: tuple[dict[str, float], list[Tensor]]) -> None:
    assert one[0].keys() == other[0].keys()
    for key, value in one[0].items():
        if not key.endswith("_time"):
            assert other[0][key] == pytest.approx(value, abs=1e-6, rel=1e-5), key
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@settings(max_examples=25)
@given(st.integers(1, 16), st.sampled_from(LOSSES), st.integers(0, 5))
def test_step_any_split_is_the_same(size: int, loss: dict[str, object], seed: int) -> None:
    """And so does padding: one sequence a microbatch has none."""
    data = full_rollouts(seed)
    assert_same(trained_once(data, loss, 100), trained_once(data, loss, size))


@settings(max_examples=20)
@given(st.sampled_from(LOSSES), st.randoms(use_true_random=False))
def test_the_order_of_groups_and_samples_changes_nothing(loss: dict[str, object], random: Random) -> None:
    data = full_rollouts()
    groups = [replace(group, samples=tuple(random.sample(group.samples, len(group.samples)))) for group in data.groups]
    random.shuffle(groups)
    assert_same(trained_once(data, loss, 4), trained_once(replace(data, groups=tuple(groups)), loss, 4))


def no_fence() -> AbstractContextManager[None]:
    pytest.fail("a step that is skipped takes a fence")


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@contextmanager
def noted(events: list[str], watched: Callable[[], object]) -> Iterator[None]:
    """A fence that says when it is entered and left, and whether what is watched changed within."""
    before = copy.deepcopy(watched())
    events.append("begin")
    yield
    events.append("end" if watched() != before else "end, nothing changed")


def test_step_without_a_spread_of_rewards_is_skipped() -> None:
    model = TinyModel()
    before = weights_of(model)
    result = Trainer(model, config()).step(batch([sample([1], [2], 1.0), sample([1], [3], 1.0)]), 0, no_fence)
    numbers = reduce(result.metrics)
    assert not result.updated and numbers["train/loss"] == 0 and numbers["train/skipped"] == 1
    assert torch.equal(weights_of(model), before)


def test_step_with_a_nan_changes_nothing_and_too_many_stop_the_run() -> None:
    model = TinyModel()
    trainer = Trainer(model, config(max_bad_steps=2, updates_per_batch=2))
    poisoned = batch([sample([1], [2], 1.0, logprobs=[float("nan")]), sample([1], [3], 0.0)])
    before = weights_of(model)
    assert not trainer.step(poisoned, 0, no_fence).updated
    assert torch.equal(weights_of(model), before) and not trainer.optimizer.state_dict()["state"]
    assert trainer.step(rollouts(), 1).updated  # a good step in between resets the count
    assert not trainer.step(poisoned, 2).updated
    with pytest.raises(TrainingError, match=r"--max-bad-steps\b.*\b2\b.*\bnan\b") as sound:
        trainer.step(poisoned, 3)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = math.nan  # now it is the weights'
    with pytest.raises(TrainingError, match=r"--max-bad-steps\b.*\b3\b.*\bnan\b") as spoilt:
        trainer.step(rollouts(), 4)
    assert not sound.value.spoils_weights and spoilt.value.spoils_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_that_leaves_weights_not_finite(dtype: torch.dtype) -> None:
    """In 32 bits torch's optimizer writes them, and the error tears the fence; in 16 bits nothing is written."""
    model = TinyModel().to(dtype)
    trainer = Trainer(model, config(lr=1e39))
    before = weights_of(model)
    events: list[str] = []
    with pytest.raises(TrainingError) as ended:
        trainer.step(rollouts(), 6, lambda: noted(events, lambda: None))
    changed = not torch.equal(weights_of(model), before)
    assert ended.value.field in dict(model.named_parameters())
    assert ended.value.got.endswith(" 7") and ended.value.spoils_weights
    assert changed is (dtype is torch.float32) and events == ["begin"] * changed


def test_check_finite_names_the_weights() -> None:
    model = TinyModel()
    trainer = Trainer(model, config())
    trainer.check_finite()
    name, parameter = list(model.named_parameters())[-1]
    with torch.no_grad():
        parameter.view(-1)[-1] = math.inf
    with refusing(TrainingError, name):
        trainer.check_finite()


@pytest.mark.parametrize(
    ("values", "target", "found"),
    [
        ([[1.0, -2.0], [0.0]], torch.float32, None),
        ([[1.0], [2.0, math.nan], [math.inf]], torch.bfloat16, 1),
        ([[1.0], [2.0], [-math.inf]], torch.float32, 2),
        ([[65_504.0], [-65_505.0]], torch.float16, 1),  # what float16 ends at, and one more
        ([[3.4e38]], torch.bfloat16, 0),  # bfloat16 ends at 3.3895e38
        ([[3.4e38]], torch.float32, None),
        ([], torch.float32, None),
    ],
)
def test_first_not_finite(values: list[list[float]], target: torch.dtype, found: int | None) -> None:
    """In the dtype of its parameter."""
    tensors = [torch.tensor(each) for each in values]
    assert first_not_finite(tensors, [each.to(target) for each in tensors]) == found
    mixed = [*tensors, torch.ones(3, dtype=torch.bfloat16), torch.tensor([math.nan])]
    assert first_not_finite(mixed, mixed) == next(n for n, each in enumerate(mixed) if not each.isfinite().all())


def test_step_stopped_between_microbatches_changes_nothing() -> None:
    model = TinyModel()
    trainer = Trainer(model, config(batch_size=2), Mock(side_effect=[None, StoppedError(15)]))
    before = weights_of(model)
    with pytest.raises(StoppedError) as stopped:
        trainer.step(rollouts(), 0)
    assert stopped.value.exit_code == 143 and torch.equal(weights_of(model), before)


@pytest.mark.parametrize("weight", [1.0, 0.7, 1 / 512, 1 / 3_000_000])
def test_the_loss_scale_is_a_power_of_two_that_brings_the_weight_near_one(weight: float) -> None:
    scale = loss_scale(weight)
    assert math.log2(scale).is_integer() and 0.5 < weight * scale < 2


def test_step_later_updates_count_from_the_policy_before_the_first() -> None:
    """Three updates on a batch are three steps on it whose old logprobs are those from before the first."""
    together, apart = TinyModel(), TinyModel()
    data = batch([sample([1, 2], [3, 4], 1.0), sample([1, 2], [5], 0.0)])
    loss: dict[str, object] = {"ratio_against": "trainer", "clip_eps": 0.01, "lr": 1e-2}
    numbers = reduce(Trainer(together, config(**loss, updates_per_batch=3)).step(data, 0).metrics)

    def with_logprobs(one: Sample) -> Sample:
        with torch.no_grad():
            all_TV = torch.log_softmax(apart(torch.tensor(one.tokens_T)[None], False).logits[0], -1)  # type: ignore[attr-defined]
        before = all_TV[:-1].gather(-1, torch.tensor(one.tokens_T)[1:, None])[:, 0].numpy()
        return replace(one, rollout_logprobs=before[one.positions - 1])

    then = replace(data, groups=(replace(data.groups[0], samples=tuple(map(with_logprobs, data.groups[0].samples))),))
    once = Trainer(apart, config(**loss))
    steps = [reduce(once.step(data, 0).metrics)]
    once.config = config(clip_eps=0.01, lr=1e-2)
    steps += [reduce(once.step(then, 0).metrics) for _ in range(2)]
    torch.testing.assert_close(weights_of(together), weights_of(apart), rtol=0, atol=1e-7)
    assert steps[1]["grpo/clipped_fraction"] > 0  # so it does matter what they count from
    for key in ("train/loss", "train/grad_norm", "grpo/mean_ratio", "grpo/clipped_fraction"):
        assert numbers[key] == pytest.approx(sum(each[key] for each in steps) / 3, abs=1e-6), key


@pytest.mark.parametrize("updates", [1, 3])
def test_step_needs_one_forward_pass_an_update(updates: int) -> None:
    """The logprobs before the first one cost none."""
    model, calls = TinyModel(), list[int]()
    model.register_forward_hook(lambda *_: calls.append(1))
    options = config(batch_size=100, updates_per_batch=updates, ratio_against="trainer")
    Trainer(model, options).step(rollouts(), 0)
    assert len(calls) == updates


def test_a_stop_after_the_first_update_waits_for_the_last() -> None:
    model = TinyModel()
    before = weights_of(model)

    def stop_once_changed() -> None:
        if not torch.equal(weights_of(model), before):
            raise StoppedError(15)

    trainer = Trainer(model, config(updates_per_batch=3), stop_once_changed)
    assert trainer.step(rollouts(), 0).updated


def test_a_step_counts_as_landed_if_one_of_its_updates_did(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(TinyModel(), config(updates_per_batch=3))
    norms = iter([1.0, math.nan])  # no third try with the weights that the second has left
    clip = trainer.holding.clip
    monkeypatch.setattr(trainer.holding, "clip", lambda limit: clip(limit) * next(norms))
    result = trainer.step(rollouts(), 0)
    assert result.updated and reduce(result.metrics)["train/skipped"] == 1


def test_a_teacher_that_is_not_listened_to_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(TinyModel(), config())
    for step in range(2):
        trainer.step(full_rollouts(), step)
    assert ["--distill-coef" in record.message for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("kind", ["rewarded", "imitated", "taught"])
def test_step_raises_the_logprob(kind: str) -> None:
    """Imitation and distillation need no spread of rewards."""
    model = TinyModel()
    shown = {
        "rewarded": [sample([1, 2], [3], 1.0), sample([1, 2], [4], 0.0)],
        "imitated": [sample([1, 2], [3], 0.0, supervised=True)],
        "taught": [sample([1, 2], [4], 0.0, teacher=[{3: -0.01}])],
    }[kind]

    @torch.no_grad()
    def logprob_of(token: int) -> float:
        logits = model(torch.tensor([[1, 2]]), use_cache=False).logits[0, -1]  # type: ignore[attr-defined]
        return torch.log_softmax(logits, -1)[token].item()

    before = logprob_of(3), logprob_of(4)
    result = Trainer(model, config(distill_coef=1.0, lr=1e-2)).step(batch(shown), 0)
    assert result.updated and logprob_of(3) > before[0]
    assert kind != "rewarded" or logprob_of(4) < before[1]
    assert 0 < reduce(result.metrics)["train/changed_fraction"] <= 1


def test_the_fence_is_held_for_the_write_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel().to(torch.bfloat16)
    trainer = Trainer(model, config(lr=1e-2))
    events: list[str] = []
    prepare = trainer.optimizer.prepare
    monkeypatch.setattr(trainer.optimizer, "prepare", lambda: (events.append("prepared"), prepare()))
    model.register_forward_hook(lambda *_: events.append("forward"))
    weights = lambda: [parameter.tolist() for parameter in trainer.parameters]  # noqa: E731
    result = trainer.step(rollouts(), 0, lambda: noted(events, weights))
    assert events == [*["forward"] * 3, "prepared", "begin", "end"]
    assert reduce(result.metrics)["train/changed_fraction"] > 0


def test_a_rate_too_low_for_the_weights_ends_the_run_but_not_at_the_end_of_a_schedule() -> None:
    """The last rate of 2,000 cosine steps is 6e-7 of --lr: hardly a 16-bit weight changes by so little."""
    low = Trainer(TinyModel().to(torch.bfloat16), config(lr=1e-15))
    with refusing(TrainingError, "--lr"):
        low.step(rollouts(), 0)
    falls = {"lr": 1e-6, "lr_schedule": "cosine"}
    last = Trainer(TinyModel().to(torch.bfloat16), config(**falls, training_steps=2000))
    result = last.step(rollouts(), 1999)
    assert result.updated and reduce(result.metrics)["train/changed_fraction"] == 0


@pytest.mark.parametrize(("dtype", "asked"), [(torch.bfloat16, "float32"), (torch.float16, "weights")])
def test_gradients_in_float32_on_request_and_for_float16(dtype: torch.dtype, asked: str) -> None:
    model = TinyModel().to(dtype)
    trainer = Trainer(model, config(grad_dtype=asked, master_weights=True, lr=1e-2))
    dtypes: set[torch.dtype] = set()
    prepare = trainer.optimizer.prepare

    def look() -> None:
        dtypes.update(p.grad.dtype for p in trainer.parameters if p.grad is not None)
        prepare()

    trainer.optimizer.prepare = look  # type: ignore[method-assign]
    assert trainer.step(rollouts(), 0).updated
    assert dtypes == {torch.float32} and all(p.dtype == dtype for p in model.parameters())


def test_norm_of_gradients_in_16_bits_is_not_rounded_to_16_bits() -> None:
    trainer = Trainer(TinyModel().to(torch.bfloat16), config())
    for parameter in trainer.parameters:
        parameter.grad = torch.randn_like(parameter)
    exact = torch.cat([p.grad.double().flatten() for p in trainer.parameters if p.grad is not None]).norm().item()
    assert trainer.holding.clip(math.inf) == pytest.approx(exact, rel=1e-6)
