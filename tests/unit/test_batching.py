"""From groups to a batch: advantages, weights of the whole batch, what is skipped, metrics; by hand and by property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_trainer.batch.batching import ReadyBatch, group_advantages, is_zero_variance, prepare
from grpo_trainer.batch.microbatches import MicroBatch, deal, families, idle_microbatch, plan, split
from grpo_trainer.config.loss import LOSSES, LossConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts.groups import RoutedExperts, Sample
from tests.unit.factories import batch, sample, untrained
from vllm_server.protocol.routed_experts import RoutedShape

# ---------------------------------------------------------------- advantages

REWARDS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("rewards", "scale", "estimator", "advantages"),
    [
        # mean 0.25, centred -0.25 -0.25 -0.25 0.75, sum of squares 0.75, std = sqrt(0.75 / 3) = 0.5
        ([0, 0, 0, 1], "group", "group", [-0.25 / 0.5001] * 3 + [0.75 / 0.5001]),
        ([1, 2, 6], "none", "group", [-2, -1, 3]),
        # 1 - (2 + 6) / 2 = -3, 2 - (1 + 6) / 2 = -1.5, 6 - (1 + 2) / 2 = 4.5
        ([1, 2, 6], "none", "rloo", [-3, -1.5, 4.5]),
        # divided on request: std = sqrt((4 + 1 + 9) / 2) = sqrt 7
        ([1, 2, 6], "group", "rloo", [v / (7**0.5 + 1e-4) for v in (-3, -1.5, 4.5)]),
        ([3.0], "none", "rloo", [0.0]),  # there are no others
    ],
)
def test_group_advantages_by_hand(rewards: list[float], scale: Any, estimator: str, advantages: list[float]) -> None:
    assert group_advantages(rewards, scale, estimator) == pytest.approx(advantages)


def test_group_advantages_of_equal_rewards_and_the_scale_of_each_loss() -> None:
    assert group_advantages([0.1] * 3) == [0.0] * 3  # 0.1 is not exact: a mean would leave noise to amplify
    assert is_zero_variance([0.1] * 3) and not is_zero_variance([0.1, 0.2])
    assert max(map(abs, group_advantages([1.0, 1.0 + 1e-9]))) < 1e-4
    for loss in LOSSES:
        assert LossConfig(loss=loss).advantage_scale == ("none" if loss == "dr_grpo" else "group")
    assert LossConfig(loss="dr_grpo", scale_rewards="group").advantage_scale == "group"
    assert LossConfig(advantage_estimator="rloo").advantage_scale == "none"


@given(REWARDS, st.floats(-5, 5), st.randoms(use_true_random=False))
def test_group_advantages_sum_to_0_keep_the_order_and_ignore_shifts(rewards: list[float], by: float, random) -> None:
    plain = group_advantages(rewards)
    assert sum(plain) == pytest.approx(0, abs=1e-6)
    assert all(a[1] <= b[1] for a, b in pairwise(sorted(zip(rewards, plain, strict=True))))
    order = list(range(len(rewards)))
    random.shuffle(order)
    assert group_advantages([rewards[i] + by for i in order]) == pytest.approx([plain[i] for i in order], abs=1e-6)


# ---------------------------------------------------------------- weights, and what is trained on


def prepared(groups: Sequence[Sequence[Sample]], seq_len: int = 10, *, drop: bool = False, **loss: Any) -> ReadyBatch:
    return prepare(batch(*groups), LossConfig(**loss), seq_len, drop_overlong=drop)


def advantages(made: ReadyBatch) -> list[list[float]]:
    return [[] if one.advantages is None else one.advantages.tolist() for one in made.sequences]


def numbers(made: ReadyBatch, prefix: str = "batch/") -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in reduce(made.metrics).items() if k.startswith(prefix)}


def test_zero_variance_groups_cost_nothing_but_count_in_the_normaliser() -> None:
    dull = [sample([1], [2, 3], 1.0), sample([1], [4, 5], 1.0)]
    made = prepared([dull, [sample([1], [2], 0.0), sample([1], [3], 1.0)]])
    assert [one.number for one in made.sequences] == [2, 3] and made.sequences[0].weight == pytest.approx(1 / 6)
    found = numbers(made)
    assert (found["zero_variance_share"], found["sequences"], found["sequences_trained"]) == (0.5, 4, 2)
    assert reduce(made.metrics)["reward/mean"] == 0.75
    # from these terms there is more to learn than from rewards
    assert len(prepared([dull], kl_beta=0.1).sequences) == len(prepared([dull], entropy_coef=0.1).sequences) == 2
    taught = [sample([1], [2, 3], 1.0, teacher=[{4: -0.1}, {}]), dull[1]]
    made = prepared([taught], distill_coef=1.0)
    assert len(made.sequences) == 1 and made.counts.teacher_tokens == 1
    unused = prepared([taught])
    assert not unused.sequences and numbers(unused)["teacher_tokens"] == 1


@pytest.mark.parametrize(("drop", "kept"), [(False, 2), (True, 1)])
def test_overlong_sequences_are_cut_or_left_out(drop: bool, kept: int) -> None:
    """Left out: as if the batch had been without them, but for the mean of rewards that the others are measured by."""
    groups = [[sample([1, 2], [3, 4, 5], 1.0, logprobs=[-1, -2, -3]), sample([1, 2], [3], 0.0)]]
    made = prepared(groups, 4, drop=drop)
    assert [one.tokens_T.tolist() for one in made.sequences] == [[1, 2, 3, 4], [1, 2, 3]][-kept:]
    assert [one.positions.tolist() for one in made.sequences] == [[2, 3], [2]][-kept:]
    assert advantages(made)[-1] == pytest.approx([-0.5 / 0.70721], 1e-5)
    if not drop:  # with the logprobs of the tokens that are left
        assert made.sequences[0].rollout_logprobs is not None
        assert made.sequences[0].rollout_logprobs.tolist() == [-1.0, -2.0]
    assert made.sequences[-1].weight == pytest.approx(1.0 if drop else 1 / 3)
    found = numbers(made)
    assert (found["dropped_overlong"], found["truncated"]) == (int(drop), int(not drop))
    assert (found["sequences"], found["trained_tokens"]) == (kept, 1 if drop else 3)
    assert prepared(groups, 2, drop=drop, loss="grpo").sequences == ()  # cut before any completion


@pytest.mark.parametrize("why", [{"truncated": True}, {"unscored": True}], ids=["masked", "unscored"])
@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ("grpo", [1 / (3 * 2), 1 / (1 * 2)]),  # a mean over the tokens of each sequence, then over 2 sequences
        ("dapo", [1 / 4, 1 / 4]),  # a mean over 4 tokens
        ("dr_grpo", [1 / (2 * 8), 1 / (2 * 8)]),  # divided by 2 sequences of 8 tokens
    ],
)
def test_prepare_without_trained_tokens(loss: str, weights: list[float], why: dict[str, bool]) -> None:
    group = [sample([1], [2, 3, 4], 0.0), untrained(sample([1], [5, 6], 3.0), **why), sample([1], [7], 0.0)]
    made = prepared([group], loss=loss, scale_rewards="none", max_completion_len=8, entropy_coef=0.1)
    assert [one.weight for one in made.sequences] == pytest.approx(weights)
    # its reward is in the baseline unless no reward applies to it: the mean of 0, 3 and 0 is 1, that of 0 and 0 is 0
    baseline = 1.0 if "truncated" in why else 0.0
    assert advantages(made) == [[-baseline] * 3, [-baseline]]
    found = numbers(made)
    assert (found["sequences"], found["unscored"]) == (3, int("unscored" in why))
    assert numbers(made, "reward/")["mean"] == baseline
    assert numbers(made, "length/")["truncated_share"] == pytest.approx(baseline / 3)
    assert numbers(made, "length/")["completion_mean"] == 2.0  # 3 + 1 tokens of 2 trained sequences
    nothing = prepared([[group[1]] * 2])
    assert not nothing.sequences and nothing.largest_weight == 0.0
    assert numbers(nothing, "length/")["completion_mean"] == 0.0


def test_prepare_advantages_of_the_environment_and_of_imitation() -> None:
    """What is to be imitated has advantage 1, and is no part of the group's baseline."""
    given = [sample([1], [2, 3], 0.0, advantages=[0.25, -4.0]), sample([1], [2], 0.0, advantages=[0.0])]
    assert advantages(prepared([given])) == [[0.25, -4.0]]  # an advantage of 0 teaches nothing
    imitated = sample([1], [9], 5.0, supervised=True, logprobs=[-0.5], version=3)
    made = prepared([[imitated, sample([1], [2], 0.0), sample([1], [3], 1.0)]], scale_rewards="none")
    assert advantages(made) == [[1.0], [-0.5], [0.5]]
    first = made.sequences[0]
    assert first.supervised and first.rollout_logprobs is None and first.version is None  # the policy did not sample it
    assert numbers(made, "reward/")["mean"] == 0.5 and numbers(made)["supervised"] == 1
    alone = prepared([[imitated]])
    assert len(alone.sequences) == 1 and numbers(alone)["zero_variance_share"] == 0
    # the environment's 0 wins over imitation, imitation over its other advantages
    left_out, other = (sample([1], [2], 0.0, supervised=True, advantages=[value]) for value in (0.0, 7.0))
    assert advantages(prepared([[left_out, other]])) == [[1.0]]


def test_the_teachers_tokens_follow_the_trained_ones_through_cutting_and_sorting() -> None:
    long = sample([1, 2], [3, 4, 5], 1.0, teacher=[{7: -0.1, 8: -2.0}, {}, {9: -0.3}])
    made = prepared([[long, sample([1], [6], 0.0, teacher=[{10: -0.4}])]], 4, distill_coef=1.0)
    assert made.counts.teacher_tokens == 2  # the last of the long one is cut away
    (microbatch,) = split(made.sequences, 2)
    assert microbatch.teacher_ids_NK.tolist() == [[10, 0], [7, 8], [0, 0]]
    assert microbatch.teacher_logprobs_NK.isfinite().tolist() == [[True, False], [True, True], [False, False]]


def test_a_stale_groups_share_multiplies_its_weight_and_leaves_the_normaliser() -> None:
    group = [sample([1], [2, 3], 0.0), sample([1], [4], 1.0)]
    plain, lowered = prepared([group, group]), prepared([group, [replace(one, share=0.25) for one in group]])
    assert lowered.counts == plain.counts
    ratios = [b.weight / a.weight for a, b in zip(plain.sequences, lowered.sequences, strict=True)]
    assert ratios == [1.0, 1.0, 0.25, 0.25] == [one.share for one in lowered.sequences]  # in the entropy bonus, too


# ---------------------------------------------------------------- metrics


def test_equal_answers_to_one_prompt_and_to_different_ones() -> None:
    first = [sample([1], [7, 8], 1.0), sample([1], [7, 8], 0.0), sample([1], [9], 0.0)]
    second = [sample([2], [7, 8], 1.0), sample([2], [7], 0.0), sample([2], [8], 0.0)]
    found = numbers(prepared([first, second]))
    assert found["same_answers_in_group"] == pytest.approx(1 / 6)  # of 3 + 3 pairs one is equal
    assert found["same_answers"] == pytest.approx(2 / 9)  # [7, 8] of the second and two of the first
    masked = [untrained(sample([1], [token], 0.0)) for token in (7, 8)]
    groups = [[sample([1], [3], 1.0), masked[0]], [sample([2], [4], 1.0), masked[1]]]
    assert numbers(prepared(groups))["same_answers"] == 0.0  # of 3 and 4; answers that are left out do not count


def test_prepare_reward_metrics() -> None:
    rollouts = batch([sample([1], [2], 0.0), sample([1], [3], 1.0)], [sample([1], [2], 3.0)], [sample([1], [2], 5.0)])
    first, *rest = rollouts.groups
    rollouts = replace(rollouts, groups=(first, *(replace(group, environment=1) for group in rest)))
    found = numbers(prepare(rollouts, LossConfig(), 9), "reward/")
    assert (found["env_0"], found["env_0_std"], found["env_1"], found["env_1_std"]) == (0.5, 0.5, 4.0, 1.0)

    made = prepared([[sample([1], [2] * n, reward) for n, reward in ((1, 0.0), (2, 1.0), (3, 2.0), (11, 4.0))]], 20)
    found = numbers(made, "reward/")
    # p25: a quarter of 3 places from the first, 0 + 0.75 * (1 - 0)
    assert [found[name] for name in ("min", "p25", "median", "p75", "max")] == [0.0, 0.75, 1.5, 2.5, 4.0]
    found = numbers(made, "length/completion_")
    # 0.3 places from 1; 2.7 places: 3 + 0.7 * (11 - 3)
    assert [found[name] for name in ("min", "p10", "p90", "max")] == pytest.approx([1.0, 1.3, 8.6, 11.0])

    few = (0.0, 0.0, 0.0, 1 / 3, 0.0, 0.0, 0.0, 1 / 3)
    for rewards, shares in ((few, {"0": 0.75, "0.3333": 0.25}), (few[:7], {})):  # one distinct value for four samples
        assert numbers(prepared([[sample([1], [2], reward) for reward in rewards]]), "reward/share/") == shares


# microbatches --------------------------------------------------------------------------------------------------------


FORMS = [{}, {"packed": True}, {"packed": True, "shared": True}]
IDS = ["padded", "packed", "shared"]


def sequence(prompt: list[int], completion: list[int], trained: list[int] | None = None) -> Sample:
    """A token's advantage, its logprob's negative and its expert are its id.

    `trained`: places in the completion; the first is always.
    """
    tokens = np.array(prompt + completion)
    at = np.array([0, *(range(1, len(completion)) if trained is None else trained)]) + len(prompt)
    values = tokens[at].astype(np.float32)
    experts = RoutedExperts(RoutedShape(1, 1, 256), tokens.astype(np.uint8)[:-1, None, None])
    return Sample(tokens, at, advantages=values, rollout_logprobs=-values, weight=len(prompt), experts=experts)


FAMILY = [sequence([1, 2, 3], [4, 5]), sequence([7], [8, 9]), sequence([1, 2, 3], [6]), sequence([1, 2], [3, 4])]

# ---------------------------------------------------------------- who goes together


def test_a_budget_of_tokens_decides_the_split() -> None:
    def planned(lengths: list[int], budget: int | None, packed: bool) -> list[list[int]]:
        samples = [Sample(np.zeros(length, np.int64), np.array([length - 1])) for length in lengths]
        return plan(samples, size=2, max_tokens=budget, packed=packed)

    lengths = [5, 2, 4, 3, 2]
    assert planned(lengths, None, True) == [[1, 4], [3, 2], [0]]
    # padded, 8 tokens: one row of 5, two of 4 (4 and 3), two of 2
    assert planned(lengths, 8, False) == [[0], [2, 3], [4, 1]]
    # packed, 8 tokens: 16 in all, so two bins: 5 + 3 and 4 + 2 + 2 first fit
    assert planned(lengths, 8, True) == [[0, 3], [2, 4, 1]]
    # two bins of 12 for 24 tokens: 6 + 6 and 4 + 4 + 4; the longest to the emptier one would come to 6 + 4 + 4 = 14
    assert planned([6, 6, 4, 4, 4], 12, True) == [[1, 0], [4, 3, 2]]
    assert planned([9, 2, 2], 4, True) == [[0], [2, 1]]  # longer than the budget: alone


def test_microbatch_families() -> None:
    assert families(FAMILY) == [[0, 2], [1], [3]]
    assert plan(FAMILY, size=10, max_tokens=None, packed=True, shared=True) == [[0, 2, 3, 1]]
    # A prompt of 8 tokens, nine completions of 4: a row has 8 + 3 x 4 = 20 tokens, also if it repeats the prompt.
    nine = [sequence([1] * 8, [n, 2, 3, 4]) for n in range(9)]
    assert [len(one) for one in plan(nine, size=7, max_tokens=20, packed=True, shared=True)] == [3, 3, 3]

    group, other = ([sequence([prompt] * 8, [2 + n, 3, 4, 5]) for n in range(4)] for prompt in (1, 2))
    shares = deal([*group, *other], 2, shared=True)
    assert [{int(each.tokens_T[0]) for each in share} for share in shares] == [{1}, {2}]
    assert [len(share) for share in deal(group, 4, shared=True)] == [1, 1, 1, 1]
    assert deal([], 2, shared=True) == deal([], 2) == [[], []]


DRAWN = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=30)


@given(DRAWN, st.none() | st.integers(1, 120), st.sampled_from(FORMS), st.integers(1, 5))
def test_every_sequence_is_planned_and_dealt_once_within_the_budget(
    drawn: list[tuple[int, int]], budget: int | None, form: dict[str, bool], processes: int
) -> None:
    """Prompt n has 3 n + 1 tokens."""
    made = [sequence([number] * (3 * number + 1), [9] * length) for number, length in drawn]
    planned = plan(made, size=7, max_tokens=budget, **form)
    assert sorted(index for one in planned for index in one) == list(range(len(drawn)))

    def load(one: list[int]) -> int:
        if "shared" in form:
            return sum(3 * n + 1 for n in {drawn[i][0] for i in one}) + sum(drawn[i][1] for i in one)
        lengths = [len(made[index].tokens_T) for index in one]
        return sum(lengths) if form else max(lengths) * len(lengths)

    assert all(len(one) <= 7 if budget is None else load(one) <= budget or len(one) == 1 for one in planned)
    if budget is not None and "shared" in form:
        assert [*map(load, planned)] == sorted(map(load, planned), reverse=True)  # later passes reuse memory
    dealt = deal(made, processes, shared="shared" in form)
    assert len(dealt) == processes
    assert sorted(id(one) for share in dealt for one in share) == sorted(map(id, made))
    if "shared" not in form:  # evenly
        loads = [sum(len(one.tokens_T) for one in share) for share in dealt]
        assert max(loads) - min(loads) <= max(len(one.tokens_T) for one in made)


# ---------------------------------------------------------------- where tokens lie


@pytest.mark.parametrize(
    ("made", "tokens", "boundaries", "positions", "shared", "targets", "predictors"),
    [
        # Prompts, then what follows each, then the others; the first trained token is predicted at its prompt's end.
        (
            FAMILY,  # in the order of the plan 0, 2, 3, 1
            [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7, 8, 9],
            [0, 3, 5, 6, 10, 13],
            [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 0, 1, 2],
            ([0, 3], [0, 3], 3, 3, 3, 6),
            [4, 5, 6, 3, 4, 8, 9],
            [2, 3, 2, 7, 8, 10, 11],
        ),
        # A tool's answer stays where it is: its tokens are seen, and not predicted.
        (
            [sequence([1, 2], [3, 4, 5, 6], trained=[3]), sequence([1, 2], [7])],
            [1, 2, 3, 4, 5, 6, 7],
            [0, 2, 6, 7],
            [0, 1, 2, 3, 4, 5, 2],
            ([0, 2], [0, 5], 2, 5, 2, 7),
            [3, 6, 7],
            [1, 4, 1],
        ),
        # Without a family the first sequence counts as one, so that torch has no other graph to compile.
        (
            [FAMILY[1], FAMILY[3]],  # in the order of the plan 3, 1
            [1, 2, 3, 4, 7, 8, 9],
            [0, 2, 4, 7],
            [0, 1, 2, 3, 0, 1, 2],
            ([0, 2], [0, 2], 2, 2, 2, 4),
            [3, 4, 8, 9],
            [1, 2, 4, 5],
        ),
    ],
    ids=["family", "tool", "no family"],
)
def test_microbatch_with_shared_prompts_by_hand(
    made: list[Sample],
    tokens: list[int],
    boundaries: list[int],
    positions: list[int],
    shared: tuple[list[int], list[int], int, int, int, int],
    targets: list[int],
    predictors: list[int],
) -> None:
    (one,) = split(made, 10, packed=True, shared=True)
    assert one.packed is not None and one.packed.shared is not None
    assert (one.tokens_BT.tolist(), one.packed.positions_1T.tolist()) == ([tokens], [positions])
    found = one.packed.shared
    assert one.packed.boundaries.tolist() == boundaries
    assert one.packed.longest == max(b - a for a, b in pairwise(boundaries))
    assert one.packed.boundaries.dtype == found.prompts.dtype == found.readers.dtype == torch.int32
    sizes = (found.longest_prompt, found.longest_readers, found.first, found.last)
    assert (found.prompts.tolist(), found.readers.tolist(), *sizes) == shared
    assert (one.targets_N.tolist(), one.predictors_N.tolist()) == (targets, predictors)


def seen(one: MicroBatch, place: int) -> list[int]:
    """The tokens that attention lets this place of a microbatch see."""
    if one.packed is None:
        row, column = divmod(place, one.tokens_BT.shape[1])
        return one.tokens_BT[row, : column + 1].tolist()
    row = one.tokens_BT[0].tolist()
    own = row[max(at for at in one.packed.boundaries.tolist() if at <= place) : place + 1]
    shared = one.packed.shared
    if shared is None or not shared.first <= place < shared.last:
        return own
    family = sum(begin <= place - shared.first for begin in shared.readers.tolist()) - 1
    return row[slice(*shared.prompts.tolist()[family : family + 2])] + own


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=5)
MADE = st.lists(st.tuples(st.sampled_from([[1], [2], [1, 2], [3, 3, 3]]), TOKENS), min_size=1, max_size=12)


@given(MADE, st.integers(1, 9), st.none() | st.integers(8, 30), st.sampled_from(FORMS))
def test_each_trained_token_is_in_one_microbatch_and_predicted_from_all_before_it(
    drawn: list[tuple[list[int], list[int]]], size: int, budget: int | None, form: dict[str, bool]
) -> None:
    made = [sequence(prompt, completion) for prompt, completion in drawn]
    wanted = sorted((one.tokens_T[: at + 1].tolist(), int(at), one.weight) for one in made for at in one.positions)
    found = []
    for one in split(made, size, max_tokens=budget, **form):
        at, of_token = one.predictors_N, (one.targets_N, one.columns_N, one.weights_N)
        for place, target, column, weight in zip(*(each.tolist() for each in (at, *of_token)), strict=True):
            found.append(([*seen(one, place), target], column, weight))
        assert torch.equal(one.advantages_N, one.targets_N.float()) and one.has_rollout_N.all()
        assert torch.equal(one.rollout_logprobs_N, -one.targets_N.float())
        if one.packed is not None:
            assert torch.equal(one.packed.positions_1T[0, at], one.columns_N - 1)
        assert one.experts_PLK is not None  # each at its token
        assert torch.equal(one.experts_PLK[at, 0, 0].long(), one.tokens_BT.view(-1)[at])
    assert sorted(found) == wanted


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_an_idle_microbatch_has_no_weight_and_no_size_of_0_or_1(form: dict[str, bool]) -> None:
    one = idle_microbatch(form.get("packed", False), form.get("shared", False))
    assert not one.weights_N.any() and len(one.targets_N) == 4
    assert (one.packed is not None and one.packed.shared is not None) == ("shared" in form)
    assert one.tokens_BT.shape == {0: (2, 4), 1: (1, 8), 2: (1, 6)}[len(form)]


def test_microbatch_moves_every_tensor() -> None:
    """Those of shared prompts included."""
    (packed,) = split(FAMILY, 4, packed=True, shared=True)
    copied: list[Tensor] = []

    def move(tensor: Tensor) -> Tensor:
        copied.append(tensor.clone())
        return copied[-1]

    moved = packed.moved(move)
    assert packed.packed is not None and moved.packed is not None
    for before, after in ((packed, moved), (packed.packed, moved.packed), (packed.packed.shared, moved.packed.shared)):
        tensors = {name: tensor for name, tensor in vars(before).items() if isinstance(tensor, Tensor)}
        assert tensors
        for name, tensor in tensors.items():
            assert any(getattr(after, name) is each for each in copied) and torch.equal(getattr(after, name), tensor)
