"""Microbatches: which sequences go together, and where their tokens lie; padded, packed, with shared prompts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_trainer.batch.microbatches import MicroBatch, deal, families, idle_microbatch, plan, split
from grpo_trainer.rollouts.groups import RoutedExperts, Sample
from vllm_server.protocol.routed_experts import RoutedShape

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


def of_length(tokens: int) -> Sample:
    return Sample(np.zeros(tokens, np.int64), np.array([tokens - 1]))


FAMILY = [sequence([1, 2, 3], [4, 5]), sequence([7], [8, 9]), sequence([1, 2, 3], [6]), sequence([1, 2], [3, 4])]

# ---------------------------------------------------------------- who goes together


def test_a_budget_of_tokens_decides_the_split() -> None:
    def planned(lengths: list[int], budget: int | None, packed: bool) -> list[list[int]]:
        return plan([of_length(length) for length in lengths], size=2, max_tokens=budget, packed=packed)

    lengths = [5, 2, 4, 3, 2]
    assert planned(lengths, None, True) == [[1, 4], [3, 2], [0]]
    # padded, 8 tokens: one row of 5, two of 4 (4 and 3), two of 2
    assert planned(lengths, 8, False) == [[0], [2, 3], [4, 1]]
    # packed, 8 tokens: 16 in all, so two bins: 5 + 3 and 4 + 2 + 2 first fit
    assert planned(lengths, 8, True) == [[0, 3], [2, 4, 1]]
    # two bins of 12 for 24 tokens: 6 + 6 and 4 + 4 + 4; the longest to the emptier one would come to 6 + 4 + 4 = 14
    assert planned([6, 6, 4, 4, 4], 12, True) == [[1, 0], [4, 3, 2]]
    assert planned([9, 2, 2], 4, True) == [[0], [2, 1]]  # longer than the budget: alone


def test_a_family_stays_together_and_a_repeated_prompt_counts() -> None:
    assert families(FAMILY) == [[0, 2], [1], [3]]
    assert plan(FAMILY, size=10, max_tokens=None, packed=True, shared=True) == [[0, 2, 3, 1]]
    # A prompt of 8 tokens, nine completions of 4: a row has 8 + 3 x 4 = 20 tokens, also if it repeats the prompt.
    nine = [sequence([1] * 8, [n, 2, 3, 4]) for n in range(9)]
    assert [len(one) for one in plan(nine, size=7, max_tokens=20, packed=True, shared=True)] == [3, 3, 3]


def test_families_are_cut_where_a_process_has_its_share() -> None:
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


# ---------------------------------------------------------------- where tokens lie


def test_a_padded_microbatch_by_hand() -> None:
    (one,) = split([sequence([1], [2, 3, 4]), sequence([1], [2])], 2)
    assert one.tokens_BT.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]  # sorted by length
    assert one.rows_N.tolist() == [0, 1, 1, 1] and one.columns_N.tolist() == [1, 1, 2, 3]
    assert one.targets_N.tolist() == [2, 2, 3, 4] and one.predictors_N.tolist() == [0, 4, 5, 6]
    assert one.packed is None and one.temperature_N.dtype == torch.float32
    assert one.weights_N.tolist() == [1.0] * 4 and one.advantages_N.tolist() == [2.0, 2.0, 3.0, 4.0]


def test_a_packed_row_by_hand() -> None:
    (one,) = split([sequence([1], [2, 3, 4]), sequence([5], [6])], 2, packed=True)
    assert one.tokens_BT.tolist() == [[5, 6, 1, 2, 3, 4]]
    assert one.packed is not None and one.packed.longest == 4 and one.packed.shared is None
    assert one.packed.boundaries.tolist() == [0, 2, 6] and one.packed.boundaries.dtype == torch.int32
    assert one.packed.positions_1T.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert one.targets_N.tolist() == [6, 2, 3, 4] and one.predictors_N.tolist() == [0, 2, 3, 4]
    assert one.segments.count == 2 and one.rows_N.tolist() == [0, 1, 1, 1]


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
def test_a_row_with_shared_prompts_by_hand(
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
    assert found.prompts.dtype == found.readers.dtype == torch.int32
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


def test_every_tensor_of_a_packed_microbatch_moves_those_of_shared_prompts_included() -> None:
    (packed,) = split(FAMILY, 4, packed=True, shared=True)
    copied: list[Tensor] = []

    def move(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return tensor.clone()

    moved = packed.moved(move)
    assert packed.packed is not None and moved.packed is not None
    parts = [(packed, moved), (packed.packed, moved.packed), (packed.packed.shared, moved.packed.shared)]
    for before, after in parts:
        tensors = {name: tensor for name, tensor in vars(before).items() if isinstance(tensor, Tensor)}
        assert tensors
        for name, tensor in tensors.items():
            assert any(tensor is each for each in copied), name
            assert getattr(after, name) is not tensor and torch.equal(getattr(after, name), tensor)
