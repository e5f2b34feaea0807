"""Keep vLLM's weights on a CPU in their plain layout.

vLLM packs weights for its own kernels when it loads them, and computes from the packed copy: later writes to the
parameter have no effect. This module tells vLLM that those kernels are missing, only in this process, and only for
servers that share their weights.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.nn.functional import linear


class PlainExperts:
    """Replaces two methods of vLLM's CPU kernel for experts."""

    w1_bias: Tensor | None
    w2_bias: Tensor | None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do not pack or pad the weights."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        *_: Any,
        apply_router_weight_on_input: bool,
        **__: Any,
    ) -> None:
        """Compute the experts one by one, as transformers does.

        Args:
            output: [token, hidden], written.
            w1: gate and up projections, [expert, 2 * intermediate, hidden]; w2: [expert, hidden, intermediate].
            topk_weights, topk_ids: [token, choice].
        """
        compute = importlib.import_module("vllm.model_executor.layers.fused_moe.activation").apply_moe_activation
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            gate_up = linear(hidden_states[tokens], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
            inner = gate_up.new_empty(len(tokens), w2.shape[2])
            compute(activation, inner, gate_up)
            part = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert])
            if not apply_router_weight_on_input:
                part = part * topk_weights[tokens, choices].to(part.dtype).unsqueeze(-1)
            output.index_add_(0, tokens, part.to(output.dtype))


def keep_weights_plain() -> None:
    """Turn off vLLM's packing. Call before the model is loaded.

    Raises:
        AttributeError: vLLM has moved one of the switches.
    """
    operators = importlib.import_module("vllm._custom_ops")
    utils = importlib.import_module("vllm.model_executor.layers.utils")
    for module, name in ((operators, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")):
        if not hasattr(module, name):
            raise AttributeError(f"this vLLM has no {module.__name__}.{name}, which turns off its packing")
    vars(operators)["_supports_onednn"] = False
    vars(utils)["check_cpu_sgl_kernel"] = lambda n, k, dtype: False
    experts = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    for name in ("process_weights_after_loading", "apply"):
        setattr(experts, name, getattr(PlainExperts, name))
