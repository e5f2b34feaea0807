"""Skip vLLM's bookkeeping of KV blocks for a running request whose next token neither begins nor completes a block.

With blocks of 16 tokens these are 14 of 16 tokens. vLLM allocates, and looks for complete blocks, for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_server import seams


def skip_needless_bookkeeping() -> None:
    """Call this in the engine's process, before it takes requests.

    Raises:
        FatalError: this vLLM keeps its blocks elsewhere.
    """
    manager = seams.found("vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots", "cache_blocks")
    plain = seams.found("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager")
    allocate: Callable[..., Any] = manager.allocate_slots
    cache: Callable[..., None] = manager.cache_blocks

    def plain_blocks(self: Any) -> Any | None:
        groups = self.coordinator.single_type_managers
        # windows and states free blocks as they move on
        return groups[0] if len(groups) == 1 and type(groups[0]) is plain else None

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **more: Any) -> Any:
        # the arguments of a running request that decodes; one that waits, or a draft of several tokens, has others
        if num_new_tokens == 1 and not args and not any(more.values()) and (blocks := plain_blocks(self)) is not None:
            tokens = request.num_computed_tokens + 1
            fits = len(blocks.req_to_blocks.get(request.request_id, ())) * blocks.block_size >= tokens
            # a step that is scheduled ahead computes a token that the request does not have yet
            if fits and (not self.enable_caching or _has_cached(blocks, request, min(tokens, request.num_tokens))):
                return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *args, **more)

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        blocks = plain_blocks(self)
        if blocks is None or not _has_cached(blocks, request, num_computed_tokens):
            cache(self, request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks


def _has_cached(blocks: Any, request: Any, tokens: int) -> bool:
    """Return whether all complete blocks of a request's first tokens are in the prefix cache."""
    return tokens // blocks.block_size <= blocks.num_cached_block.get(request.request_id, 0)
