"""Logits in fp32: the head's product is summed in fp32, and vLLM rounds the sum to the model's 16 bits.

A logit of 10 in bfloat16 is off by up to 0.03: half of the total error of a bfloat16 model, measured on the demo model.
The trainer's logits are fp32, too (`grpo_trainer.engine.head`). vLLM 0.32, unlike 0.25, has this as
`--hf-overrides '{"head_dtype": "float32"}'`. The change here works in both, and users need no flag.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vllm_server import seams
from vllm_server.worker import LOGITS_VARIABLE, is_batch_invariant

logger = logging.getLogger("vllm.grpo.logits")


def prepare_worker() -> None:
    """Make heads return fp32 logits if `--logits-dtype` says so. Call before a model is loaded."""
    if os.environ.get(LOGITS_VARIABLE) != "float32":
        return
    if is_batch_invariant():
        logger.warning("VLLM_BATCH_INVARIANT: logits have the model's dtype, the only one of its product")
        return
    method = seams.found("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod")
    method.apply = exact_in_place_of(method.apply)


def exact_in_place_of(vllms: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement for a method's `apply`, by which unquantized heads compute their logits."""

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float16) or layer.weight.dtype != x.dtype:
            return vllms(self, layer, x, bias)
        return product(x, layer.weight, bias)

    return apply


def product(x: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in fp32, with factors in 16 bits: [..., V] from [..., H]."""
    if not x.is_cuda:
        wide = None if bias_V is None else bias_V.float()
        return functional.linear(x.float(), weight_VH.float(), wide)
    logits_NV = torch.mm(x.flatten(0, -2), weight_VH.mT, out_dtype=torch.float32)
    if bias_V is not None:
        logits_NV += bias_V
    return logits_NV.unflatten(0, x.shape[:-1])
