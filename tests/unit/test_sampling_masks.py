"""Sampling masks as bytes: by hand, there and back, joined, cut, and broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.rollouts.sampling_masks import MaskError, SamplingMasks, decode
from vllm_server.errors import ServeError
from vllm_server.protocol.sampling_masks import skip
from vllm_server.sampling_masks import encode

Rows = list[list[int]]

sets = st.sets(st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)), max_size=6)
completions = st.lists(sets.map(sorted), min_size=1, max_size=8)


def encoded(rows: Rows) -> bytes:
    """A completion's masks; a row without ids is a position where nothing was left out."""
    return encode({position: np.array(row) for position, row in enumerate(rows)}, len(rows))


def rows_of(masks: SamplingMasks) -> Rows:
    ends = np.cumsum(masks.counts_T)
    return [ids.tolist() for ids in np.split(masks.ids_M, ends[:-1])]


def test_bytes_by_hand() -> None:
    # 0 positions skipped, 3 positions; 2, 0 and 1 ids kept; 5 ids before the 5, none between 5 and 6;
    # 300 = 2 * 128 + 44 ids before the 300: the low 7 bits with the high bit, then the rest
    assert encoded([[5, 6], [], [300]]) == bytes([0, 3, 2, 0, 1, 5, 0, 0x80 | 44, 2])
    assert skip(300) == bytes([0x80 | 44, 2, 0])
    masks = decode(skip(2) + encoded([[5, 6], [], [300]]) + skip(1), 6)
    assert masks.counts_T.tolist() == [0, 0, 2, 0, 1, 0]
    assert masks.ids_M.tolist() == [5, 6, 300]


@pytest.mark.parametrize(
    ("ids", "size"),
    # 1 byte for the count; 151,000 needs 18 bits: 3 bytes; gaps of 7,999 take 13 bits: 2 bytes, and the first, 0, one
    [([151_000], 1 + 3), ([*range(0, 160_000, 8_000)], 1 + 1 + 19 * 2), ([*range(100)], 1 + 100)],
)
def test_bytes_of_a_token(ids: list[int], size: int) -> None:
    assert len(encoded([ids])) == size + 2  # the block's head


@given(completions, completions, st.integers(0, 400), st.integers(0, 3))
def test_what_is_joined_comes_back(first: Rows, second: Rows, prompt: int, heard: int) -> None:
    data = skip(prompt) + encoded(first) + skip(heard) + encoded(second)
    wanted = [[]] * prompt + first + [[]] * heard + second
    assert rows_of(decode(data, len(wanted))) == wanted


@given(completions, st.data())
def test_masks_of_some_positions(rows: Rows, data: Any) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True).map(sorted))
    found = decode(encoded(rows), len(rows)).at(np.array(chosen))
    assert rows_of(found) == [rows[position] for position in chosen]


@given(completions)
def test_a_token_outside_its_mask_is_forbidden(rows: Rows) -> None:
    masks = decode(encoded(rows), len(rows))
    inside = np.array([row[-1] if row else 7 for row in rows])
    assert not masks.forbid(inside).any()
    outside = np.array([next(i for i in range(8) if i not in row) for row in rows])
    assert masks.forbid(outside).tolist() == [bool(row) for row in rows]


GOOD = skip(1) + encoded([[5, 6], [300]])


@pytest.mark.parametrize(
    ("data", "length"),
    [(GOOD, 2), (GOOD, 4), (GOOD[:-1], 3), (GOOD[:-3], 3), (GOOD + b"\x01", 3), (skip(2**34) + GOOD, 3)],
    ids=["longer", "shorter", "within a number", "within a mask", "half a block", "far away"],
)
def test_masks_of_something_else_are_refused(data: bytes, length: int) -> None:
    assert rows_of(decode(GOOD, 3)) == [[], [5, 6], [300]]
    with pytest.raises(MaskError) as caught:
        decode(data, length)
    assert caught.value.field == "sampling_masks" and caught.value.got and caught.value.wanted


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20))
def test_any_bytes_are_masks_or_refused(data: bytes, length: int) -> None:
    try:
        masks = decode(data, length)
    except MaskError:
        return
    assert len(masks.counts_T) == length and masks.counts_T.sum() == len(masks.ids_M)
    assert all(row == sorted(set(row)) for row in rows_of(masks))


def test_the_end_of_a_completion_ends_its_masks() -> None:
    """A stop string may drop tokens that were sampled."""
    kept = {0: np.array([1]), 1: np.array([], np.int64), 2: np.array([9])}
    assert rows_of(decode(encode(kept, 2), 2)) == [[1], []]


def test_a_token_without_a_mask_is_noticed() -> None:
    """Planted fault: on the way through vLLM one is lost."""
    with pytest.raises(ServeError) as caught:
        encode({0: np.array([1]), 2: np.array([9])}, 3)
    assert caught.value.status == 422 and caught.value.field == "sampling_masks" and caught.value.fix
