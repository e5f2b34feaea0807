"""Modules that a server lacks, found among rounding errors. The trainer here is a sum of effects, which
each of its states rounds differently, as 16 bits do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_trainer.alignment.diagnosis import (
    Presence,
    adapted_layers,
    adapted_modules,
    left_out,
    look_for_each_module,
    multiplied,
)
from grpo_trainer.model.lora_linear import use_few_kernels
from tests.unit.tiny_lora import fill_b, tiny_lora

TOKENS = 279
MODULES = 200


def rounding(number: int) -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(number))


def looked(sizes: Tensor, absent: tuple[int, ...] = (), seed: int = 0) -> Presence:
    """The findings for modules with effects of `sizes` rounding errors, if the server lacks those in `absent`."""
    effects_MN = sizes[:, None] * torch.randn(MODULES, TOKENS, generator=torch.Generator().manual_seed(10_000 + seed))

    def logprobs(present_M: Tensor) -> Tensor:
        state = int((present_M * torch.arange(1, MODULES + 1)).sum())
        return present_M @ effects_MN + rounding(100_000 * seed + state)

    def logprobs_without(names: Sequence[str]) -> Tensor:
        whole_M, none_M = torch.ones(MODULES), functional.one_hot(torch.tensor(list(map(int, names))), MODULES)
        return torch.stack([logprobs(whole_M), *(logprobs(whole_M - each_M) for each_M in none_M)])

    served_M = torch.ones(MODULES)
    served_M[list(absent)] = 0.0
    server_N = served_M @ effects_MN + rounding(-1 - seed)
    return look_for_each_module([str(number) for number in range(MODULES)], server_N, logprobs_without, at_once=7)


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


@pytest.mark.parametrize("few_kernels", [False, True], ids=["PEFT's layers", "few kernels"])
@torch.no_grad()
def test_each_row_of_a_forward_pass_lacks_one_module(few_kernels: bool) -> None:
    model = tiny_lora().eval()
    fill_b(model)
    if few_kernels:
        assert use_few_kernels(model)
    layers, modules = adapted_layers(model), adapted_modules(model)
    tokens_T = torch.randint(0, model.config.vocab_size, (9,), generator=torch.Generator().manual_seed(0))

    def logits_of(rows: int) -> Tensor:
        return model(input_ids=tokens_T.expand(rows, -1)).logits

    with left_out(list(layers.values())):
        rows_BTV = logits_of(1 + len(layers))
    torch.testing.assert_close(rows_BTV[0], logits_of(1)[0])
    for row_TV, name in zip(rows_BTV[1:], modules, strict=True):
        with multiplied(modules, {name: 0.0}):
            lacking_TV = logits_of(1)[0]
        torch.testing.assert_close(row_TV, lacking_TV)
        assert not torch.allclose(row_TV, rows_BTV[0]), name
    torch.testing.assert_close(logits_of(2)[1], rows_BTV[0])  # the hooks are gone
