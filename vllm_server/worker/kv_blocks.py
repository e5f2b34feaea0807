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
