"""Logits of a server whose model computes in 16 bits, through vLLM's own head."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_server import seams
from vllm_server.worker import LOGITS_VARIABLE, logits

H, V = 64, 320


@pytest.fixture
def method() -> Iterator[Any]:
    """How vLLM's heads make their logits; afterwards it is vLLM's own again."""
    name = "UnquantizedEmbeddingMethod"
    kind = getattr(seams.seam(("vllm.model_executor.layers.vocab_parallel_embedding",), name), name)
    own = kind.apply
    yield kind
    kind.apply = own


def served(method: Any, x: Tensor, bias_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The logits of a head, and what they are in double precision."""
    weight_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(weight_VH, requires_grad=False)
    made = method()
    made.process_weights_after_loading(head)
    wanted = x.double() @ weight_VH.double().T + (0 if bias_V is None else bias_V.double())
    return made.apply(head, x, bias=bias_V), wanted


def hidden(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_not_rounded(method: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool) -> None:
    monkeypatch.setenv(LOGITS_VARIABLE, "float32")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    x, bias_V = hidden(dtype, 5), hidden(dtype, V // H).flatten() if bias else None
    rounded, of_rounded = served(method, x)  # on CPUs with AMX vLLM's product refuses a bias in 16 bits
    logits.prepare_worker()
    exact, of_exact = served(method, x, bias_V)
    assert rounded.dtype == dtype and exact.dtype == torch.float32 and exact.shape == (5, V)
    assert (exact - of_exact).abs().max() < 1e-5 < 1e-3 < (rounded - of_rounded).abs().max()


def test_leading_dimensions_stay() -> None:
    x = hidden(torch.bfloat16, 2, 3)
    weight_VH = hidden(torch.bfloat16, V)
    assert logits.product(x, weight_VH, None).shape == (2, 3, V)


def test_a_model_in_32_bits_is_vllms_own_affair() -> None:
    asked: list[Tensor] = []
    apply = logits.exact_in_place_of(lambda _, layer, x, bias: asked.append(x) or x)
    head = SimpleNamespace(weight=hidden(torch.float32, V))
    apply(None, head, hidden(torch.float32, 5))
    apply(None, head, hidden(torch.bfloat16, 5))  # weights of another dtype: quantized, or a mistake that vLLM reports
    assert [x.dtype for x in asked] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("asked", "invariant"), [("model", "0"), ("float32", "1")])
def test_nothing_is_changed_unasked_or_where_sums_have_a_fixed_order(
    method: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, invariant: str
) -> None:
    monkeypatch.setenv(LOGITS_VARIABLE, asked)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    own = method.apply
    logits.logger.propagate = True
    logits.prepare_worker()
    assert method.apply is own
    assert ("VLLM_BATCH_INVARIANT" in caplog.text) == (invariant == "1")
