"""Skip vLLM's allocation for a running request whose next token fits in the KV block that it has.

With blocks of 16 tokens these are 14 of 16 tokens. vLLM does its whole bookkeeping for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_server import seams


def skip_needless_allocations() -> None:
    """Call this in the engine's process, before it takes requests.

    Raises:
        FatalError: this vLLM allocates elsewhere.
    """
    manager = seams.found("vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots")
    plain = seams.found("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager")
    vllms: Callable[..., Any] = manager.allocate_slots

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **more: Any) -> Any:
        # the arguments of a running request that decodes; one that waits, or a draft of several tokens, has others
        if num_new_tokens == 1 and not args and not any(more.values()) and _fits(self, plain, request):
            return self.empty_kv_cache_blocks
        return vllms(self, request, num_new_tokens, *args, **more)

    manager.allocate_slots = allocate_slots


def _fits(manager: Any, plain: type, request: Any) -> bool:
    """Return whether vLLM would neither allocate nor free a block, nor enter one in the prefix cache."""
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not plain:
        return False  # windows and states free blocks as they move on
    blocks, size = groups[0], groups[0].block_size
    tokens = request.num_computed_tokens + 1
    if len(blocks.req_to_blocks.get(request.request_id, ())) * size < tokens:
        return False
    if not manager.enable_caching:
        return True
    # a step that is scheduled ahead computes a token that the request does not have yet
    return min(tokens, request.num_tokens) // size <= blocks.num_cached_block.get(request.request_id, 0)
