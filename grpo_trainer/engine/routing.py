"""Routing replay: a mixture of experts computes with experts that were chosen before, in forward and backward pass.

Server and trainer break near-ties between experts differently, since their kernels round differently; a token that
goes to another expert has other logits. With replay the choice is the server's, and the weights of the chosen experts
are the trainer's own, with gradient (rollout routing replay, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from grpo_trainer.batch.microbatches import MicroBatch
from grpo_trainer.errors import ConfigError
from grpo_trainer.metrics.types import Max, Mean, Metric
from vllm_server.protocol.routed_experts import RoutedShape

ROUTERS = (MixtralTopKRouter, Qwen2MoeTopKRouter, Qwen3MoeTopKRouter)
"""Routers whose weights are a softmax over all experts, at the chosen ones, normalised or not."""

CHANGED = "alignment/routing_changed"
CHANGED_MAX = "alignment/routing_changed_max"

FEWEST = 32
"""Choices, of a token in a layer, over which the largest share of changed ones is taken at least."""


class Routing:
    """Replays a microbatch's experts in the routers of a model."""

    def __init__(self, model: nn.Module) -> None:
        routers = [module for module in model.modules() if isinstance(module, ROUTERS)]
        kinds = {(int(router.top_k), int(router.num_experts)) for router in routers}
        if len(kinds) != 1:
            kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
            raise ConfigError(
                field="--routing-replay",
                got=f"server, for {kind}" + ("" if kinds else ", in which no known router chooses experts"),
                wanted="a Mixtral, Qwen2-MoE or Qwen3-MoE model with the same number of experts in each layer",
                fix="leave it out",
            )
        (top_k, experts) = kinds.pop()
        self.shape = RoutedShape(len(routers), top_k, experts)
        self._given_PLK: Tensor | None = None
        self._changed: list[Tensor] | None = None  # of a forward pass: by layer, each token's share of changed experts
        self._sums_BL: Tensor | None = None  # of the last forward pass: these, of tokens that predict trained ones
        self._tokens_B: Tensor | None = None
        places = enumerate(routers)
        self._hooks = [router.register_forward_hook(partial(self._route, layer)) for layer, router in places]

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return the context for training passes and their backward passes, which may recompute layers."""
        try:
            yield
        finally:
            self._given_PLK = None

    @contextmanager
    def replaying(self, microbatch: MicroBatch) -> Iterator[None]:
        """Replay a microbatch's experts in the forward pass within the block, and in its backward pass after it."""
        self._given_PLK = microbatch.experts_PLK
        self._changed = []
        try:
            yield
        finally:
            self._note_changed(microbatch)
            if not torch.is_grad_enabled():
                self._given_PLK = None

    def _route(self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Exchange the experts that a router has chosen; called after each of its forward passes."""
        logits_PE, weights_PK, own_PK = output
        if self._given_PLK is None:
            return None
        given_PK = self._given_PLK[:, layer].long()
        used_PK = torch.where(given_PK >= 0, given_PK, own_PK)
        if self._changed is not None:
            same_PKK = used_PK[:, :, None] == own_PK[:, None, :]
            self._changed.append(1.0 - same_PKK.any(-1).float().mean(-1))
        replayed_PK = logits_PE.float().softmax(-1).gather(-1, used_PK)
        if getattr(router, "norm_topk_prob", True):  # Mixtral always normalises
            replayed_PK = replayed_PK / replayed_PK.sum(-1, keepdim=True)
        return logits_PE, replayed_PK.to(weights_PK.dtype), used_PK

    def _note_changed(self, microbatch: MicroBatch) -> None:
        """Sum the shares of changed experts at tokens that predict trained ones, by sequence and by layer."""
        changed, self._changed = self._changed, None
        self._sums_BL = self._tokens_B = None
        if not changed:
            return
        at_NL = torch.stack(changed, dim=1).index_select(0, microbatch.predictors_N).double()
        sums_BL = at_NL.new_zeros(len(microbatch.versions_B), self.shape.layers)
        self._sums_BL = sums_BL.index_add_(0, microbatch.rows_N, at_NL)
        self._tokens_B = torch.bincount(microbatch.rows_N, minlength=len(sums_BL))

    def metrics(self) -> dict[str, Metric]:
        """Return how many of the replayed experts the trainer would not have chosen, in the last forward pass.

        The largest share is that of a sequence over all layers, or of a layer over all sequences.
        """
        if self._sums_BL is None or self._tokens_B is None:
            return {}
        tokens, layers = self._tokens_B.sum(), self.shape.layers
        of_layers_L = self._sums_BL.sum(0) / tokens.clamp(min=FEWEST)
        of_rows_B = self._sums_BL.sum(1) / (self._tokens_B * layers).clamp(min=FEWEST)
        largest = torch.cat([of_layers_L, of_rows_B]).max()
        return {CHANGED: Mean(self._sums_BL.sum(), tokens * layers), CHANGED_MAX: Max(largest)}
