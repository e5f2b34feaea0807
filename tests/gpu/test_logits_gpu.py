"""Logits on a GPU at the size of a real vocabulary: the product on both sides, and the sampled tokens' logprobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from grpo_trainer.engine.head import HeadPlan, head_scores
from grpo_trainer.engine.head import product as trainers

H, V, N = 512, 151_936, 700


def made(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and a bias whose logits have a spread of 8."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((N, H), (V, H), (V,))
    drawn = [torch.randn(*shape, device="cuda", generator=generator) for shape in shapes]
    return drawn[0].to(dtype), (drawn[1] * 8 * H**-0.5).to(dtype), drawn[2].to(dtype)


def servers(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """vLLM's product for a head in fp32."""
    processor: Any = SimpleNamespace(head_dtype=torch.float32)
    head: Any = SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=weight)
    return LogitsProcessor._apply_head(processor, head, hidden, bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_sides_give_what_the_product_is_summed_in(dtype: torch.dtype, bias: bool) -> None:
    hidden, weight, added = made(dtype)
    at = slice(0, 64)
    wanted = hidden[at].double() @ weight.double().T + (added.double() if bias else 0.0)
    rounded = torch.nn.functional.linear(hidden[at], weight, added if bias else None)
    for product in (trainers, servers):
        logits = product(hidden[at], weight, added if bias else None)
        assert logits.dtype == torch.float32 and logits.shape == (64, V)
        assert (logits - wanted).abs().max() < 3e-4 < 1e-3 < (rounded - wanted).abs().max()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("trains_head", [False, True])
def test_scores_are_exact_and_gradients_those_of_16_bits(compiled: bool, trains_head: bool) -> None:
    hidden, weight, _ = made(torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_(trains_head)
    targets = torch.arange(N, device="cuda") * 211 % V
    ones, none = torch.ones(N, device="cuda"), torch.zeros(N, 0, dtype=torch.long, device="cuda")
    plan = HeadPlan(torch.bfloat16, torch.float32)
    plan = plan.compiled() if compiled else plan
    scores = head_scores(hidden, weight, None, targets, ones, none, plan)
    factor = torch.linspace(-1, 1, N, device="cuda")
    got: list[Any] = list(torch.autograd.grad((scores.logprobs_N * factor).sum(), [hidden, *[weight] * trains_head]))

    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logprobs = torch.log_softmax(exact[0] @ exact[1].T, -1).gather(-1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((logprobs * factor).sum(), exact)
    assert (scores.logprobs_N - logprobs).abs().max() < 2e-4
    for gradient, plain in zip(got, wanted, strict=False):
        assert gradient.dtype == torch.bfloat16 and (gradient - plain).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 250])
def test_logprobs_and_ranks_of_sampled_tokens_are_vllms(rows: int, dtype: torch.dtype) -> None:
    from vllm.v1.worker.gpu.sample import sampler

    from vllm_server.worker import speed

    name = speed.NAME
    vllms = getattr(sampler, name)
    generator = torch.Generator("cuda").manual_seed(1)
    logits = (torch.randn(rows, V, device="cuda", generator=generator) * 8).to(dtype)
    logits[:, :1000] = -torch.inf
    tokens = logits.float().softmax(-1).multinomial(1, generator=generator)[:, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, name, vllms)  # put back after `prepare_worker`
        speed.compute_logprobs_once()
        ours = getattr(sampler, name)(logits, 0, tokens, None, max_per_req_token_ids=0)
    theirs = vllms(logits, 0, tokens, None, max_per_req_token_ids=0)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=2e-5)
    for field in ("logprob_token_ids", "selected_token_ranks", "cu_num_generated_tokens"):
        one, other = getattr(ours, field), getattr(theirs, field)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other is None, field
