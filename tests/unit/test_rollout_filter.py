"""Groups that this model can't be trained on: left out, counted, logged once; none of them ends a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from environments.api import wire
from grpo_trainer.batch.batching import ready
from grpo_trainer.batch.microbatches import split
from grpo_trainer.config.train import ModelConfig, RolloutConfig, TrainConfig
from grpo_trainer.errors import TrainingError
from grpo_trainer.feed import UNFIT_IN_A_ROW, BatchFeed
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts.decode import to_group
from grpo_trainer.rollouts.filter import GroupFilter, misfit
from grpo_trainer.rollouts.types import Group, RolloutBatch
from grpo_trainer.trainer import Trainer
from tests.unit.factories import VOCAB, TinyModel, sample

CONFIG = TrainConfig(model=ModelConfig(name="m", seq_len=10), batch_size=2)
GOOD = Group((sample([1], [2], 0.0), sample([1], [3], 1.0)), environment=0)


def bad(**changes: Any) -> Group:
    return replace(GOOD, samples=(GOOD.samples[0], replace(GOOD.samples[1], **changes)))


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


UNFIT = [
    (bad(tokens_T=ids(1, 2_000_000_000)), "tokens", "2000000000"),
    (bad(tokens_T=ids(1, VOCAB)), "tokens", str(VOCAB)),
    (bad(tokens_T=ids(-1, 3)), "tokens", "-1"),
    (bad(teacher=sample([1], [2], 0.0, teacher=[{VOCAB: -0.5}]).teacher), "distill_token_ids", str(VOCAB)),
    (bad(temperature=-1.0), "temperature", "-1"),
    (bad(temperature=float("inf")), "temperature", "inf"),
    (bad(reward=1e300), "scores", "1e+300"),
    (bad(advantages_T=np.array([0.0, np.inf], np.float32)), "advantages", "inf"),
    (bad(rollout_logprobs_T=np.array([1.0, -np.inf], np.float32)), "inference_logprobs", "-inf"),
]


@pytest.mark.parametrize(("group", "field", "got"), UNFIT)
def test_a_group_that_would_end_the_run_is_told_apart_by_field_and_value(group: Group, field: str, got: str) -> None:
    problem = misfit(group, VOCAB)
    assert problem is not None and (problem.field, problem.got) == (f"sequence 1: {field}", got)
    assert misfit(GOOD, VOCAB) is None


def test_what_is_not_trained_and_what_a_teacher_did_not_give_does_not_matter() -> None:
    masked = bad(rollout_logprobs_T=np.array([np.nan, -0.5], np.float32))
    filled = bad(teacher=sample([1], [2], 0.0, teacher=[{4: -0.5}]).teacher)
    assert misfit(masked, VOCAB) is None and misfit(filled, VOCAB) is None


@pytest.mark.parametrize("temperature", ["hot", {"a": 1}, [1.0]])
def test_a_temperature_that_is_no_number_is_decoded_and_does_not_fit(temperature: object) -> None:
    rows = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.0]}
    group = to_group(wire.pack(wire.ScoredData(**rows, generation_params={"temperature": temperature})))  # type: ignore[arg-type]
    problem = misfit(group)
    assert problem is not None and (problem.field, problem.got) == ("sequence 0: temperature", "nan")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"generation_params": {"top_p": 0.9}}, "sequence 0: top_p"),
        ({"generation_params": {"repetition_penalty": 1.1}}, "sequence 0: repetition_penalty"),
        ({"overrides": [{}, {"top_k": 2}]}, "sequence 1: top_k"),
        ({"group_overrides": {"min_p": 0.1}}, "sequence 0: min_p"),
        ({"group_overrides": {"min_p": 0.1, "sft": True}}, None),  # imitated: it may have been sampled in any way
        ({"generation_params": {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 0.7}}, None),
    ],
)
def test_groups_sampled_so_that_the_trainer_cant_compute_it(fields: dict[str, Any], field: str | None) -> None:
    rows: dict[str, Any] = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}
    problem = misfit(to_group(wire.pack(wire.ScoredData(**rows, **fields))), VOCAB)
    assert (problem and problem.field) == field
    assert problem is None or (problem.got and problem.wanted and problem.fix)


def test_a_stored_group_with_sampling_masks_is_read_and_refused_for_how_it_was_sampled() -> None:
    """Groups of version 0.1.0, from a queue: their masks are an unknown field."""
    rows: dict[str, Any] = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.0]}
    packed = msgspec.to_builtins(
        wire.pack(wire.ScoredData(**rows, generation_params={"top_p": 0.9})), builtin_types=[bytes]
    )
    stored = msgspec.msgpack.encode(packed | {"sampling_masks": [bytes([1, 1, 1, 2])]})
    problem = misfit(to_group(wire.decode(stored, wire.PackedGroup, wire.MSGPACK)), VOCAB)
    assert problem is not None and problem.field == "sequence 0: top_p"


@pytest.mark.parametrize("said", [True, False])
def test_an_environment_that_does_not_say_how_it_samples_is_named_once(
    caplog: pytest.LogCaptureFixture, said: bool
) -> None:
    rows: dict[str, Any] = {
        "tokens": [[1, 2]],
        "masks": [[-100, 2]],
        "scores": [0.0],
        "inference_logprobs": [[1.0, -0.5]],
    }
    more: dict[str, Any] = {"generation_params": {"temperature": 1.0}} if said else {}
    group = to_group(wire.pack(wire.ScoredData(**rows, **more)))
    without = replace(group, samples=tuple(replace(s, rollout_logprobs_T=None) for s in group.samples))
    groups = GroupFilter(VOCAB, lambda number: f"sums_{number}")
    with caplog.at_level(logging.WARNING):
        for found in ((without,), (group, group, replace(group, environment=7)), (group,)):
            groups.sift(RolloutBatch("b", found))
    assert len(caplog.records) == (0 if said else 2)


class Api:
    """A rollout API with these batches."""

    def __init__(self, batches: Iterator[tuple[Group, ...]]) -> None:
        self.batches = batches
        self.dropped: list[str] = []

    def lease(self, check_stop: Any) -> RolloutBatch:
        return RolloutBatch("b", next(self.batches))

    def drop(self, leased: RolloutBatch, why: str) -> None:
        self.dropped.append(why)

    def environment_name(self, env_id: int | None) -> str:
        return f"environment sums_{env_id}"


def feed(api: Any) -> BatchFeed:
    groups = GroupFilter(VOCAB, api.environment_name, CONFIG.model.seq_len)
    return BatchFeed(api, RolloutConfig(prefetch=False), groups, lambda one: ready(one, CONFIG), lambda: None)


def test_the_rest_of_a_batch_is_trained_on_and_one_warning_names_the_environment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poison = UNFIT[0][0]
    api = Api(iter([(poison, GOOD), (poison, poison), (GOOD, GOOD)]))
    with caplog.at_level(logging.WARNING), feed(api) as batches:
        first = batches.next(0)
        second = batches.next(1)
    assert first.rollouts.groups == (GOOD,)  # the log of samples sees no other either
    assert [reduce(each.metrics)["rollout/refused_groups"] for each in (first, second)] == [1, 2]
    assert reduce(second.metrics)["rollout/dropped_stale_groups"] == 0
    (why,) = api.dropped
    assert "environment sums_0: sequence 1: tokens: " in why
    warned: list[Any] = [record.args for record in caplog.records if record.name == "grpo_trainer.rollouts.filter"]
    ((problem,),) = warned
    assert (problem.field, problem.got) == ("environment sums_0: sequence 1: tokens", "2000000000")
    result = Trainer(TinyModel(), CONFIG).step(first, 0)
    assert result.updated


def test_a_group_without_a_trained_token_is_left_out_wherever_the_others_are() -> None:
    empty = Group((sample([1, 2], [], 0.0), sample([1, 2], [], 1.0)), environment=0)
    half = Group((sample([1, 2], [], 0.0), sample([1, 2], [3], 1.0)), environment=0)
    only_first = Group((sample([], [3], 0.0),), environment=0)  # which nothing predicts
    beyond = Group((sample([1] * 12, [3], 0.0),), environment=0)
    for unfit in (empty, only_first):
        problem = misfit(unfit, VOCAB)
        assert problem is not None and problem.field == "masks"
    assert misfit(half, VOCAB) is None and misfit(beyond, VOCAB) is None
    cut_off = replace(unfit, samples=tuple(replace(each, truncated=True) for each in unfit.samples))
    assert misfit(cut_off, VOCAB) is None, "left out of the loss on purpose"
    problem = misfit(beyond, VOCAB, 10)
    assert problem is not None and problem.field == "masks" and "10" in problem.got


def test_sequences_that_are_cut_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    long = Group((sample([1], [2] * 100_000, 0.0), sample([1], [3], 1.0)), environment=0)
    with caplog.at_level(logging.WARNING), feed(Api(iter([(long,), (long, GOOD)]))) as batches:
        found = [batches.next(version) for version in range(2)]
    assert [reduce(each.metrics)["batch/truncated"] for each in found] == [1, 1]
    (warned,) = [record.args for record in caplog.records if record.name == "grpo_trainer.rollouts.filter"]
    assert warned == ("environment sums_0", 100_001, 10)


def test_an_environment_of_another_vocabulary_altogether_ends_the_run_by_name() -> None:
    def forever() -> Iterator[tuple[Group, ...]]:
        while True:
            yield (UNFIT[1][0],)

    api = Api(forever())
    with pytest.raises(TrainingError) as ended:
        feed(api).next(0)
    assert ended.value.field.startswith("environment sums_0: ") and str(UNFIT_IN_A_ROW) in ended.value.summary
    assert len(api.dropped) == UNFIT_IN_A_ROW  # none of them comes again after a restart


def test_the_trainer_knows_its_vocabulary() -> None:
    assert Trainer(TinyModel(), CONFIG).vocabulary is None  # neither a head nor a configuration: its logits will tell
    configured: Any = TinyModel()
    configured.config = LlamaConfig(vocab_size=7)
    assert Trainer(configured, CONFIG).vocabulary == 7


def test_every_tensor_of_a_packed_microbatch_moves_those_of_shared_prompts_included() -> None:
    samples = [sample([1, 2], [3 + i], float(i)) for i in range(3)]
    prepared = ready(RolloutBatch("b", (Group(tuple(samples)),)), CONFIG)
    (packed,) = split(prepared.sequences, 4, packed=True, shared=True)
    assert packed.packed is not None and packed.packed.shared is not None
    seen: list[Tensor] = []

    def move(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    moved = packed.moved(move)
    assert moved.packed is not None and moved.packed.shared is not None
    parts = [(packed, moved), (packed.packed, moved.packed), (packed.packed.shared, moved.packed.shared)]
    for before, after in parts:
        for name, tensor in vars(before).items():
            if isinstance(tensor, Tensor):
                assert any(tensor is each for each in seen), name
                assert getattr(after, name) is not tensor and torch.equal(getattr(after, name), tensor)
