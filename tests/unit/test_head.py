"""The head's scores and gradients against those of whole logits; two parts of an attention as one softmax."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from grpo_trainer.engine import attention_kernel, head
from grpo_trainer.engine.attention import merge
from grpo_trainer.engine.head import HeadPlan, head_scores, token_scores
from tests.triton_kernels import compiled_for_hopper

N, H, V, K = 300, 8, 37, 3
PLAN = HeadPlan(torch.float32, torch.float32, chunk_bytes=0)
"""Chunks of 128 rows: two whole ones and a part of one."""


def inputs(*, bias: bool, others: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    return {
        "hidden_NH": (0.5 * torch.randn(N, H)).to(dtype),
        "weight_VH": torch.randn(V, H).to(dtype),
        "bias_V": torch.randn(V).to(dtype) if bias else None,
        "targets_N": torch.randint(0, V, (N,)),
        "temperature_N": torch.rand(N) + 0.5,
        "others_NK": torch.randint(0, V, (N, K if others else 0)),
    }


def plain(made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """From the whole logits, in double precision."""
    wide: dict[str, Any] = {
        key: each.double() if each is not None and each.is_floating_point() else each for key, each in made.items()
    }
    logits = functional.linear(wide["hidden_NH"], wide["weight_VH"], wide["bias_V"])
    all_NV = torch.log_softmax(logits / wide["temperature_N"][:, None], -1)
    own_N = all_NV.gather(-1, wide["targets_N"][:, None])[:, 0]
    return own_N, -(all_NV.exp() * all_NV).sum(-1), all_NV.gather(-1, wide["others_NK"])


def leaves(made: dict[str, Tensor | None], trained: set[str]) -> list[Tensor]:
    return [tensor.requires_grad_() for key, tensor in made.items() if key in trained and tensor is not None]


def loss_of(logprobs: Tensor, entropy: Tensor, others: Tensor, entropy_gradient: bool) -> Tensor:
    """A sum with a different factor for everything."""
    generator = torch.Generator().manual_seed(1)

    def weighted(values: Tensor) -> Tensor:
        return (values * torch.randn(values.shape, generator=generator).to(values.dtype)).sum()

    return weighted(logprobs) + (weighted(entropy) if entropy_gradient else 0.0) + weighted(others)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 30], ids=["again", "kept"])
@pytest.mark.parametrize("entropy_gradient", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "teacher"])
@pytest.mark.parametrize(
    "trained", [{"hidden_NH"}, {"hidden_NH", "weight_VH"}, {"hidden_NH", "weight_VH", "bias_V"}], ids=len
)
def test_values_and_gradients(trained: set[str], others: bool, entropy_gradient: bool, kept_bytes: int) -> None:
    made = inputs(bias="bias_V" in trained, others=others)
    own = leaves(made, trained)
    plan = HeadPlan(torch.float32, torch.float32, chunk_bytes=0, kept_bytes=kept_bytes)
    scores = head_scores(**made, plan=plan, entropy_gradient=entropy_gradient)  # type: ignore[arg-type]
    found = scores.logprobs_N, scores.entropy_N, scores.others_NK
    for got, wanted in zip(found, plain(made), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=2e-6)
    gradients = torch.autograd.grad(loss_of(*found, entropy_gradient), own)
    for got, wanted in zip(gradients, torch.autograd.grad(loss_of(*plain(made), entropy_gradient), own), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("logits_dtype", "error"), [(torch.bfloat16, 2**-8 * 8), (torch.float32, 2e-5)], ids=["rounded", "exact"]
)
@pytest.mark.parametrize("trained", [{"hidden_NH"}, {"hidden_NH", "weight_VH"}], ids=len)
def test_16_bits_compute_the_rest_in_32(trained: set[str], logits_dtype: torch.dtype, error: float) -> None:
    """The error is that of the logits (up to 8, 2^-9 of them in bfloat16) and of gradients, not of logprobs in 16 bits;
    and a token that was nearly certain keeps its gradient, although its probability is 1 in bfloat16."""
    made = inputs(bias=False, others=False, dtype=torch.bfloat16)
    own = leaves(made, trained)
    plan = HeadPlan(torch.bfloat16, logits_dtype, chunk_bytes=0)
    scores = head_scores(**made, plan=plan)  # type: ignore[arg-type]
    assert scores.logprobs_N.dtype == torch.float32 and not scores.entropy_N.requires_grad
    wanted_N, *_ = plain(made)
    assert (scores.logprobs_N - wanted_N).abs().max() < error
    gradients = torch.autograd.grad(scores.logprobs_N.sum(), own)
    for got, wanted in zip(gradients, torch.autograd.grad(wanted_N.sum(), own), strict=True):
        assert (got.float() - wanted.float()).norm() < 0.01 * wanted.float().norm()

    weight_VH = torch.zeros(2, 4, dtype=torch.bfloat16)
    weight_VH[0, 0] = 1.0
    hidden_NH = torch.tensor([[8.0, 0, 0, 0]], dtype=torch.bfloat16, requires_grad=True)
    weight_VH.requires_grad_("weight_VH" in trained)
    none = torch.zeros(1, 0, dtype=torch.int64)
    one = torch.ones(1)
    head_scores(hidden_NH, weight_VH, None, torch.tensor([0]), one, none, plan).logprobs_N.sum().backward()
    assert hidden_NH.grad is not None
    # 1 - sigmoid(8) = 3.354e-4; the nearest to 1 - p that 16 bits have below 1 is 2^-9 = 2e-3
    assert hidden_NH.grad[0, 0].item() == pytest.approx(3.354e-4, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_many_chunks_add_up_in_32_bits(dtype: torch.dtype) -> None:
    made: dict[str, Any] = inputs(bias=False, others=False, dtype=torch.bfloat16)
    made |= {key: torch.cat([each] * 50) for key, each in made.items() if key not in ("weight_VH", "bias_V")}
    weight_VH = made["weight_VH"] = torch.nn.Parameter(made["weight_VH"].to(dtype))
    weight_VH.grad_dtype = torch.float32
    plan = HeadPlan(torch.bfloat16, torch.float32, chunk_bytes=0, sum_dtype=torch.float32)
    head_scores(**made, plan=plan).logprobs_N.sum().backward()
    (wanted,) = torch.autograd.grad(plain(made)[0].sum(), weight_VH)
    assert weight_VH.grad is not None and (weight_VH.grad - wanted).norm() < 0.003 * wanted.norm()  # else 0.01


def test_head_without_gradients_or_tokens() -> None:
    made = inputs(bias=False, others=True)
    with torch.no_grad():
        scores = head_scores(**made, plan=PLAN)  # type: ignore[arg-type]
    assert not scores.logprobs_N.requires_grad
    torch.testing.assert_close(scores.others_NK.double(), plain(made)[2], rtol=1e-6, atol=2e-6)
    made = {key: each if each is None or key == "weight_VH" else each[:0] for key, each in made.items()}
    (weight_VH,) = leaves(made, {"weight_VH"})
    scores = head_scores(**made, plan=PLAN)  # type: ignore[arg-type]
    assert not torch.autograd.grad(scores.logprobs_N.sum(), weight_VH)[0].any()


@pytest.mark.parametrize(
    ("vocab", "logits_dtype", "rows"),
    # 2^28 bytes of 2 bytes each: 134,217,728 / 152,064 = 882 rows, of which 6 * 128 = 768 are taken
    [(152_064, torch.bfloat16, 768), (152_064, torch.float32, 384), (1_000_000, torch.bfloat16, 128)],
)
def test_head_plan_chunks(vocab: int, logits_dtype: torch.dtype, rows: int) -> None:
    assert HeadPlan(torch.bfloat16, logits_dtype, chunk_bytes=1 << 28).rows(vocab) == rows
    plan = HeadPlan(torch.bfloat16, torch.float32)
    assert HeadPlan(torch.bfloat16, torch.float32, distills=True).compiled().chunk_bytes == plan.chunk_bytes
    assert plan.compiled().chunk_bytes > plan.chunk_bytes, "where much is compiled"
    assert plan.compiled().logit_bytes == 6  # itself and its gradient


# ---------------------------------------------------------------- memory


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most that it allocated at one time, by the allocator's own word."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    moves: list[Any] = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for move in sorted(moves, key=lambda event: event.start_ns()):
        held += move.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("distills", [False, True])
def test_the_plan_knows_what_a_chunk_takes(distills: bool, dtype: torch.dtype) -> None:
    rows, vocab = 64, 20_000
    logits = (3 * torch.randn(rows, vocab)).to(dtype)
    targets, ones, zeros = torch.randint(vocab, (rows,)), torch.ones(rows), torch.zeros(rows)
    _, entropy, normaliser = head.statistics(logits, targets, ones)
    own = (logits, targets, ones, normaliser, entropy, ones, zeros)
    others = torch.randint(vocab, (rows, 4)), torch.ones(rows, 4)
    took = peak_bytes(
        lambda: (
            head.residual_with_others(*own, *others, torch.bfloat16)
            if distills
            else head.residual(*own, torch.bfloat16)
        )
    )
    planned = HeadPlan(torch.bfloat16, dtype, distills=distills).logit_bytes
    assert 0.9 * planned < took / (rows * vocab) + dtype.itemsize <= planned + 0.1  # the logits are there
    assert peak_bytes(lambda: head.statistics(logits, targets, ones)) / (rows * vocab) + dtype.itemsize <= planned


# ---------------------------------------------------------------- models that do more to their logits


@pytest.mark.parametrize("bias", [False, True])
def test_an_exact_head_is_a_linear_layer_with_logits_in_fp32(bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(H, V, bias=bias).bfloat16()
    exact = copy.deepcopy(plain)
    exact.__class__ = head.ExactHead
    hidden = torch.randn(2, 5, H).bfloat16()
    weights = torch.randn(2, 5, V)
    found = {}
    for name, layer in (("plain", plain), ("exact", exact)):
        own = hidden.clone().requires_grad_()
        logits = layer(own)
        (logits.float() * weights).sum().backward()
        found[name] = [own.grad, *(parameter.grad for parameter in layer.parameters())]
        wanted = functional.linear(hidden.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert (logits.double() - wanted).abs().max() < (2e-6 if name == "exact" else 2**-8 * 4)
    assert logits.dtype == torch.float32 and logits.shape == (2, 5, V)
    for got, wanted in zip(found["exact"], found["plain"], strict=True):
        assert got.dtype == wanted.dtype == torch.bfloat16
        assert (got.float() - wanted.float()).norm() < 0.01 * wanted.float().norm()


# from whole logits ---------------------------------------------------------------------------------------------------


def test_token_scores_by_hand() -> None:
    # position 0 predicts token 1: logits 0, log 3 -> probabilities 1/4, 3/4; at temperature 2: weights 1, sqrt 3
    logits_BTV = torch.tensor([[[0.0, math.log(3.0)], [5.0, -5.0]]])
    tokens_BT = torch.tensor([[0, 1]])
    at = torch.tensor([0]), torch.tensor([1])
    scores = token_scores(logits_BTV, tokens_BT, *at, torch.ones(1), torch.tensor([[1, 0, 0]]))
    assert scores.logprobs_N.item() == pytest.approx(math.log(0.75))
    assert scores.entropy_N.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert scores.others_NK.tolist() == [pytest.approx([math.log(0.75), math.log(0.25), math.log(0.25)])]
    warm = token_scores(logits_BTV, tokens_BT, *at, torch.tensor([2.0]))
    assert warm.logprobs_N.item() == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))))
    assert warm.others_NK.shape == (1, 0)


def test_token_scores_in_chunks_and_bf16_have_the_same_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 50, dtype=torch.bfloat16)
    tokens = torch.randint(0, 50, (2, 9))
    rows = torch.arange(2).repeat_interleave(8)
    columns = torch.arange(1, 9).repeat(2)
    results = []
    for chunk in (3, 1024):
        monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
        leaf = logits.clone().requires_grad_()
        scores = token_scores(leaf, tokens, rows, columns, torch.ones(16), torch.full((16, 2), 7))
        assert scores.logprobs_N.dtype == torch.float32 and not scores.entropy_N.requires_grad
        (scores.logprobs_N.sum() + scores.others_NK.sum()).backward()
        results.append((scores.logprobs_N.detach(), scores.entropy_N, scores.others_NK.detach(), leaf.grad))
    exact = torch.log_softmax(logits.double(), -1)[rows, columns - 1].gather(-1, tokens[rows, columns][:, None])[:, 0]
    torch.testing.assert_close(results[0][0].double(), exact, rtol=0, atol=1e-5)
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 3])
def test_token_scores_gradient_of_the_entropy(tokens: int) -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    at = torch.zeros(tokens, dtype=torch.int64), torch.arange(1, 1 + tokens)
    ids, temperatures = torch.zeros(1, 4, dtype=torch.int64), torch.full((tokens,), 0.7)
    others = torch.zeros(tokens, 2, dtype=torch.int64)
    scores = token_scores(logits, ids, *at, temperatures, others, entropy_gradient=True)
    assert scores.others_NK.shape == (tokens, 2)
    (got,) = torch.autograd.grad(scores.entropy_N.sum(), logits)
    plain = torch.distributions.Categorical(logits=logits[0, :tokens] / 0.7).entropy().sum()
    wanted = torch.autograd.grad(plain, logits)[0] if tokens else torch.zeros_like(logits)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# two parts of an attention as one ------------------------------------------------------------------------------------


ROWS, HEADS = 37, 3


def by_kernel(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, normalisers, seen, seen_normalisers = (each.clone() for each in tensors)
    attention_kernel.launch(out[2:-1], normalisers[:, 2:-1], seen, seen_normalisers)
    return out, normalisers


def parts(size: int) -> tuple[torch.Tensor, ...]:
    """Of queries over 5 keys and over 4 more; the first has three rows besides, which nobody merges."""
    torch.manual_seed(size)
    scores = torch.randn(HEADS, ROWS, 9) * 3
    values = torch.randn(HEADS, 9, size)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        out_HRD = scores[..., keys].softmax(-1) @ values[:, keys]
        return out_HRD.transpose(0, 1).contiguous().half(), scores[..., keys].logsumexp(-1)

    own, own_log = attend(slice(5))
    seen, seen_log = attend(slice(5, 9))
    around = (
        torch.nn.functional.pad(own, (0, 0, 0, 0, 2, 1), value=7.0),
        torch.nn.functional.pad(own_log, (2, 1), value=7),
    )
    return *around, seen, seen_log, *attend(slice(9))


@pytest.mark.parametrize("size", [16, 24, 64])
def test_two_parts_are_one_softmax(size: int, interpreter: Executor) -> None:
    out, logs, seen, seen_logs, wanted, wanted_logs = parts(size)
    plain, plain_logs = out.clone(), logs.clone()
    merge(plain[2:-1], plain_logs[:, 2:-1], seen, seen_logs)
    for got, got_logs in ((plain, plain_logs), interpreter.submit(by_kernel, out, logs, seen, seen_logs).result()):
        torch.testing.assert_close(got[2:-1], wanted, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got_logs[:, 2:-1], wanted_logs, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[:2], out[:2]) and torch.equal(got[-1:], out[-1:])
        assert torch.equal(got_logs[:, :2], logs[:, :2]) and torch.equal(got_logs[:, -1:], logs[:, -1:])


@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_the_kernel_compiles_for_a_hopper_gpu(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"SIZE": size, "BLOCK": 1 << (size - 1).bit_length(), "ROWS": attention_kernel.ROWS}
    kinds = {"out": "*bf16", "seen": "*bf16", "normalisers": "*fp32", "seen_normalisers": "*fp32"}
    even = ("out", "seen", "out_row", "out_head", "seen_row", "seen_head")
    made = compiled_for_hopper(attention_kernel.merge, constants, kinds, even, warps=4)
    assert len(made.asm["cubin"]) > 1000 and "ld.global.v4" in made.asm["ptx"]
