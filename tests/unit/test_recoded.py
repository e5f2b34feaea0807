"""States in 8 bits whose rows go to other processes: what they say stays, in blocks that begin elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_trainer.optim.eight_bits import BLOCK, Scaled, decoded, encoded, levels_of, recoded

Shape = tuple[int, ...]
HALF_A_STEP = 0.9 / 64 / 2 + 1e-5
"""Of the largest value of a block; smaller ones are off by less, at most half of themselves but for the smallest."""


def written(values: Tensor, writers: int, *, signed: bool) -> tuple[Tensor, list[Scaled]]:
    """Codes of all rows, end to end, and each writer's scales, as its optimizer has them."""
    midpoints = levels_of(signed, values.device)[1]
    codes, known, first = [], [], 0
    for rows in values.chunk(writers):
        matrices = rows.flatten(0, -3) if rows.ndim > 2 else rows[None]
        parts = [encoded(matrix.flatten(), midpoints) for matrix in matrices]
        codes += [part for part, _ in parts]
        known.append(Scaled(torch.cat([scales for _, scales in parts]), tuple(rows.shape), first))
        first += rows.numel()
    return torch.cat(codes), known


def read(codes: Tensor, scales: Tensor, shape: Shape, *, signed: bool) -> Tensor:
    levels, _ = levels_of(signed, codes.device)
    matrix = math.prod(shape[-2:])
    blocks = -(-matrix // BLOCK)
    found = [
        decoded(codes[number * matrix : (number + 1) * matrix], scales[number * blocks : (number + 1) * blocks], levels)
        for number in range(len(codes) // matrix)
    ]
    return torch.cat(found).view(shape)


shapes = st.one_of(
    st.tuples(st.integers(1, 900)),
    st.tuples(st.integers(1, 9), st.integers(1, 700)),
    st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 30)),
)


@given(shape=shapes, writers=st.integers(1, 4), readers=st.integers(1, 4), signed=st.booleans(), seed=st.integers(0, 9))
def test_every_reader_has_what_was_written_within_a_step_of_8_bits(
    shape: Shape, writers: int, readers: int, signed: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape[0], generator=generator).view(
        -1, *(1,) * (len(shape) - 1)
    )
    values = values if signed else values.abs()
    codes, known = written(values, writers, signed=signed)
    before = torch.cat([read_of(codes, each, signed=signed).flatten() for each in known]).view(shape)
    first = 0
    for rows in values.chunk(readers):
        own, mine = slice(first, first + rows.numel()), tuple(rows.shape)
        got = read(*recoded(codes[own], known, mine, first, signed=signed), mine, signed=signed)
        wanted = before.flatten()[own].view(mine)
        largest = wanted.abs().max()
        assert ((got - wanted).abs() <= HALF_A_STEP * largest).all()
        assert ((got - wanted).abs() <= 0.5 * wanted.abs() + 1e-6 * largest).all()
        first += rows.numel()


def read_of(codes: Tensor, part: Scaled, *, signed: bool) -> Tensor:
    return read(codes[part.first : part.end], part.scales, part.shape, signed=signed)


@pytest.mark.parametrize("shape", [(8, 256), (1024,), (6, 128, 6), (4, 3, 100)])
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (4, 2)])
def test_where_blocks_begin_where_they_did_nothing_changes(shape: Shape, writers: int, readers: int) -> None:
    torch.manual_seed(0)
    codes, known = written(torch.randn(shape), writers, signed=True)
    scales = torch.cat([each.scales for each in known])
    found, first = [], 0
    for rows in torch.zeros(shape).chunk(readers):
        own = slice(first, first + rows.numel())
        found.append(recoded(codes[own], known, tuple(rows.shape), first, signed=True))
        first += rows.numel()
    assert torch.equal(torch.cat([own for own, _ in found]), codes)
    assert torch.equal(torch.cat([own for _, own in found]), scales)


def test_a_process_without_rows_has_no_blocks() -> None:
    codes, known = written(torch.ones(1, 300), 1, signed=False)
    empty, scales = recoded(codes[:0], known, (0, 300), 300, signed=False)
    assert len(empty) == len(scales) == 0
