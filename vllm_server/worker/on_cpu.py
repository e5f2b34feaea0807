"""Repairs of vLLM on a CPU: seeded requests, and weights in their plain layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm_server import seams

# ----------------------------------------------------------------------------------------------------------------------
# Seeded requests: vLLM can discard a sample of theirs.
#
# vLLM samples a token for every request of a step, even for one whose prompt is not complete yet, because it is
# computed in chunks or computed again. It discards this token, and rewinds the request's generator so that the seed's
# next number is used again. It rewinds by an offset, which a CPU generator does not have: the engine would end with
# "CPU Generator does not use offset". Here the generator gets back the state that it had before the sample.


def rewind_generators() -> None:
    """Let CPU generators be rewound. Call before a model is loaded, on a CPU, whose runner derives from the GPU's."""
    runner = seams.require("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_sample", "_bookkeeping_sync")
    sample: Callable[..., Any] = runner._sample
    sync: Callable[..., Any] = runner._bookkeeping_sync

    @wraps(sample)
    def _sample(self: Any, *given: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        self._grpo_before = {row: generator.get_state() for row, generator in generators.items()}
        return sample(self, *given, **named)

    @wraps(sync)
    def _bookkeeping_sync(self: Any, *given: Any, **named: Any) -> Any:
        batch, generators = self.input_batch, self.input_batch.generators
        batch.generators = {row: Rewindable(each, self._grpo_before[row]) for row, each in generators.items()}
        try:
            return sync(self, *given, **named)
        finally:
            batch.generators = generators

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


class Rewindable:
    """What vLLM uses of a generator in order to discard a sample."""

    def __init__(self, generator: torch.Generator, before: Tensor) -> None:
        self._generator, self._before = generator, before

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> None:
        """Rewind by one sample, the only rewind that vLLM asks for."""
        self._generator.set_state(self._before)


# ----------------------------------------------------------------------------------------------------------------------
# Keep vLLM's weights on a CPU in their plain layout.
#
# vLLM packs weights for its own kernels when it loads them, and computes from the packed copy: later writes to the
# parameter have no effect. This module tells vLLM that those kernels are missing, only in this process, and only for
# servers that share their weights.


def keep_weights_plain() -> None:
    """Turn off vLLM's packing. Call before the model is loaded."""
    experts = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
    kernel = seams.require(experts, "CPUUnquantizedExperts", "process_weights_after_loading", "apply")
    vars(seams.require("vllm._custom_ops", "", "_supports_onednn"))["_supports_onednn"] = False
    utils = seams.require("vllm.model_executor.layers.utils", "", "check_cpu_sgl_kernel")
    vars(utils)["check_cpu_sgl_kernel"] = lambda n, k, dtype: False
    kernel.process_weights_after_loading = lambda self, layer: None  # neither packs nor pads
    kernel.apply = compute_experts


def compute_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *_: Any,
    apply_router_weight_on_input: bool,
    **__: Any,
) -> None:
    """Compute the experts one by one, as transformers does, in the place of vLLM's CPU kernel.

    Args:
        output: [token, hidden], written.
        w1: gate and up projections, [expert, 2 * intermediate, hidden]; w2: [expert, hidden, intermediate].
        topk_weights, topk_ids: [token, choice].
    """
    activate = seams.require("vllm.model_executor.layers.fused_moe.activation", "apply_moe_activation")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate_up = linear(hidden_states[tokens], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
        inner = gate_up.new_empty(len(tokens), w2.shape[2])
        activate(activation, inner, gate_up)
        part = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert])
        if not apply_router_weight_on_input:
            part = part * topk_weights[tokens, choices].to(part.dtype).unsqueeze(-1)
        output.index_add_(0, tokens, part.to(output.dtype))
