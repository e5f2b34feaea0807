"""Modules that a server lacks, found among rounding errors. The trainer here is a sum of effects, which
each of its states rounds differently, as 16 bits do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_trainer.alignment.diagnosis import Modules, Presence, look_for_each_module

TOKENS = 279
MODULES = 200


def rounding(number: int) -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(number))


def looked(sizes: Tensor, absent: tuple[int, ...] = (), seed: int = 0) -> Presence:
    """The findings for modules with effects of `sizes` rounding errors, if the server lacks those in `absent`."""
    effects_MN = sizes[:, None] * torch.randn(MODULES, TOKENS, generator=torch.Generator().manual_seed(10_000 + seed))
    modules: Modules = {str(number): torch.ones(1, 1) for number in range(MODULES)}

    def logprobs() -> Tensor:
        present_M = torch.cat([b_Or[:, 0] for b_Or in modules.values()])
        state = int((present_M * torch.arange(1, MODULES + 1)).sum())
        return present_M @ effects_MN + rounding(100_000 * seed + state)

    served_M = torch.ones(MODULES)
    served_M[list(absent)] = 0.0
    return look_for_each_module(modules, served_M @ effects_MN + rounding(-1 - seed), logprobs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.0, 0.1, 0.5, 3.0])
def test_rounding_errors_that_effect_and_difference_share_are_no_missing_module(size: float, seed: int) -> None:
    found = looked(torch.full((MODULES,), size), seed=seed)
    assert found.wrong == ()
    assert found.seen == (0 if size < 1.0 else MODULES)


@pytest.mark.parametrize("absent", [(7,), (7, 90), (7, 90, 150)])
def test_modules_whose_effects_are_a_little_larger_than_rounding_are_found(absent: tuple[int, ...]) -> None:
    found = looked(torch.full((MODULES,), 4.0), absent)
    assert {int(name) for name, _ in found.wrong} == set(absent)
    assert all(served < 0.5 for _, served in found.wrong)


def test_a_large_module_is_found_among_small_ones() -> None:
    sizes = torch.full((MODULES,), 0.1)
    sizes[42] = 5.0
    assert looked(sizes).seen == 1
    assert [name for name, _ in looked(sizes, (42,)).wrong] == ["42"]
