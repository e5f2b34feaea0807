"""Three replacements inside vLLM's engine and workers that only save time; `output_blocks` has the fourth."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_server import seams

logger = logging.getLogger("vllm.grpo.speed")

# ----------------------------------------------------------------------------------------------------------------------
# Skip vLLM's bookkeeping of KV blocks for a running request whose next token neither begins nor completes a block.
# With blocks of 16 tokens these are 14 of 16 tokens. vLLM allocates, and looks for complete blocks, for each of them.


def skip_needless_bookkeeping() -> None:
    """Call this in the engine's process, before it takes requests."""
    manager = seams.require("vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots", "cache_blocks")
    plain = seams.require("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager")
    allocate: Callable[..., Any] = manager.allocate_slots
    cache: Callable[..., None] = manager.cache_blocks

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **more: Any) -> Any:
        # the arguments of a running request that decodes; one that waits, or a draft of several tokens, has others
        if num_new_tokens == 1 and not args and not any(more.values()) and _fits(self, plain, request):
            return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *args, **more)

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        blocks = _only_group(self, plain)
        if blocks is None or not _has_cached(blocks, request, num_computed_tokens):
            cache(self, request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks


def _fits(manager: Any, plain: type, request: Any) -> bool:
    """Return whether vLLM would neither allocate nor free a block, nor enter one in the prefix cache."""
    blocks, tokens = _only_group(manager, plain), request.num_computed_tokens + 1
    if blocks is None or len(blocks.req_to_blocks.get(request.request_id, ())) * blocks.block_size < tokens:
        return False
    # a step that is scheduled ahead computes a token that the request does not have yet
    return not manager.enable_caching or _has_cached(blocks, request, min(tokens, request.num_tokens))


def _has_cached(blocks: Any, request: Any, tokens: int) -> bool:
    """Return whether all complete blocks of a request's first tokens are in the prefix cache."""
    return tokens // blocks.block_size <= blocks.num_cached_block.get(request.request_id, 0)


def _only_group(manager: Any, plain: type) -> Any | None:
    """Return the blocks of a model whose layers all attend to all tokens; windows and states free theirs."""
    groups = manager.coordinator.single_type_managers
    return groups[0] if len(groups) == 1 and type(groups[0]) is plain else None


# ----------------------------------------------------------------------------------------------------------------------
# Copy sampling parameters to the GPU only after a request has come. vLLM copies those of all requests at each step.
# With 240 running sequences the copies took 4.5 % of the time in which the engine's process computes (1.5B, an H100).


_COPIED = "_grpo_copied"
"""Attribute of vLLM's states: whether the GPU has the parameters of all requests."""


def copy_when_changed() -> None:
    """Call this in each worker, before a model is loaded."""
    states = seams.require("vllm.v1.worker.gpu.sample.states", "SamplingStates", "add_request", "apply_staged_writes")
    add, copy = states.add_request, states.apply_staged_writes

    def add_request(self: Any, *args: Any, **more: Any) -> Any:
        vars(self)[_COPIED] = False
        return add(self, *args, **more)  # whether the parameters change logits

    def apply_staged_writes(self: Any) -> None:
        if not vars(self).get(_COPIED):
            copy(self)
            vars(self)[_COPIED] = True

    states.add_request, states.apply_staged_writes = add_request, apply_staged_writes


# ----------------------------------------------------------------------------------------------------------------------
# Logprobs of sampled tokens from one read of the logits. vLLM's newer sampler reads them three times, a row after
# another on each part of the GPU: 0.3 of the 4.9 ms that an H100 computes for a step of 250 sequences (1.5B).


SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
NAME = "compute_topk_scores"
"""vLLM's function."""
KNOWN = frozenset(
    {
        *("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state"),
        *("expanded_idx_mapping", "max_per_req_token_ids", "logits_mode"),
    }
)
"""Its parameters that this module knows."""


def compute_logprobs_once() -> None:
    """Replace vLLM's function if its parameters are known. Call this in each worker on an NVIDIA GPU."""
    module = seams.require(SAMPLER, "", NAME)
    if not KNOWN.issuperset(inspect.signature(vars(module)[NAME]).parameters):
        logger.warning("vLLM computes the logprobs of sampled tokens itself: %s.%s is not as before", SAMPLER, NAME)
        return
    vars(module)[NAME] = in_place_of(vars(module)[NAME], seams.require("vllm.v1.outputs", "LogprobsTensors"))


def in_place_of(vllms: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for vLLM's function, whose result is `tensors`.

    It leaves requests for other tokens' logprobs to vLLM.
    """
    from vllm_server.worker.logprob_kernels import logprobs_and_ranks  # needs Triton

    def compute(
        logits_NV: Tensor,
        num_logprobs: int,
        sampled_N: Tensor,
        cu_num_logits: Any = None,
        **more: Any,
    ) -> Any:
        if num_logprobs or cu_num_logits is not None or any(map(more.get, ("max_per_req_token_ids", "logits_mode"))):
            return vllms(logits_NV, num_logprobs, sampled_N, cu_num_logits, **more)
        logprobs_N, ranks_N = logprobs_and_ranks(logits_NV, sampled_N)
        return tensors(sampled_N.unsqueeze(-1), logprobs_N.unsqueeze(-1), ranks_N)

    return compute
