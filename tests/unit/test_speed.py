"""Replacements that only save time: KV blocks, and sampling parameters on the GPU, are as vLLM's own would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_server.worker.speed import copy_when_changed, skip_needless_bookkeeping

SIZE = 4
"""Tokens of a block."""


def manager(spec: type[KVCacheSpec], *, caching: bool) -> KVCacheManager:
    window = {"sliding_window": 6} if spec is SlidingWindowSpec else {}
    made: Any = spec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, **window)  # type: ignore[call-arg]
    config = KVCacheConfig(num_blocks=12, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], made)])
    return KVCacheManager(config, 64, SIZE, SIZE, enable_caching=caching)


def request(name: str, prompt: int) -> Request:
    hasher = get_request_block_hasher(SIZE, sha256)
    return Request(name, list(range(prompt)), SamplingParams(max_tokens=64), None, block_hasher=hasher)


@pytest.fixture(scope="module")
def vllms() -> Iterator[Vllms]:
    """vLLM's own functions; within the module, managers have ours."""
    init_none_hash(sha256)
    own = Vllms(KVCacheManager.allocate_slots, KVCacheManager.cache_blocks)
    skip_needless_bookkeeping()
    yield own
    KVCacheManager.allocate_slots, KVCacheManager.cache_blocks = own


class Vllms(NamedTuple):
    """Functions of `KVCacheManager`."""

    allocate: Callable[..., Any]
    cache: Callable[..., None]


def ids(blocks: Any) -> Any:
    return None if blocks is None else blocks.get_block_ids()


@given(
    spec=st.sampled_from([FullAttentionSpec, SlidingWindowSpec]),
    caching=st.booleans(),
    prompts=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    ahead=st.booleans(),
    drafts=st.sampled_from([0, 3]),
    steps=st.integers(1, 20),
)
def test_blocks_and_prefix_cache_are_those_of_vllm(
    vllms: Vllms,
    spec: type[KVCacheSpec],
    caching: bool,
    prompts: list[int],
    ahead: bool,
    drafts: int,
    steps: int,
) -> None:
    """With `ahead`, a token is computed before the request has it. The pool is small, so some requests get no block."""
    ours, theirs = manager(spec, caching=caching), manager(spec, caching=caching)

    def both(one: Request, other: Request, count: int, **more: Any) -> bool:
        mine = ours.allocate_slots(one, count, num_lookahead_tokens=drafts, **more)
        assert ids(mine) == ids(vllms.allocate(theirs, other, count, num_lookahead_tokens=drafts, **more))
        return mine is not None

    running = []
    for number, prompt in enumerate(prompts):
        pair = request(str(number), prompt), request(str(number), prompt)
        if both(*pair, prompt, full_sequence_must_fit=True):
            running.append(pair)
        for each in pair:
            each.num_computed_tokens, each.status = prompt, RequestStatus.RUNNING
    for token in range(steps):
        for one, other in running:
            for each in (one, other) if not ahead else ():
                each.append_output_token_ids(token)
            if not both(one, other, 1):
                continue
            for each in (one, other):
                each.num_computed_tokens += 1
                if ahead:
                    each.append_output_token_ids(token)
            if ahead:  # vLLM's scheduler does this when it gets the token
                ours.cache_blocks(one, one.num_computed_tokens)
                vllms.cache(theirs, other, other.num_computed_tokens)
    assert ours.block_pool.get_num_free_blocks() == theirs.block_pool.get_num_free_blocks()
    for group, other in zip(
        ours.coordinator.single_type_managers, theirs.coordinator.single_type_managers, strict=True
    ):
        assert group.num_cached_block == other.num_cached_block
    for one, other in running:
        ours.free(one)
        theirs.free(other)
    later, again = request("later", 20), request("later", 20)
    assert ids(ours.get_computed_blocks(later)[0]) == ids(theirs.get_computed_blocks(again)[0])


def test_most_tokens_ask_nothing_of_vllm(vllms: Vllms, monkeypatch: pytest.MonkeyPatch) -> None:
    made, one = manager(FullAttentionSpec, caching=True), request("one", 5)
    assert made.allocate_slots(one, 5, num_lookahead_tokens=0, has_scheduled_reqs=True) is not None
    one.num_computed_tokens, one.status = 5, RequestStatus.RUNNING
    allocated: list[int] = []
    coordinator = made.coordinator
    allocate, cache = coordinator.get_num_blocks_to_allocate, Mock(wraps=coordinator.cache_blocks)

    def watched_allocate(**more: Any) -> int:
        allocated.append(one.num_computed_tokens)
        return allocate(**more)

    monkeypatch.setattr(coordinator, "get_num_blocks_to_allocate", watched_allocate)
    monkeypatch.setattr(coordinator, "cache_blocks", cache)
    for token in range(12):
        made.allocate_slots(one, 1, num_lookahead_tokens=0)
        one.num_computed_tokens += 1
        one.append_output_token_ids(token)
        made.cache_blocks(one, one.num_computed_tokens)
    assert allocated == [8, 12, 16]  # a new block begins
    assert [call.args[1] for call in cache.call_args_list] == [
        8,
        8,
        12,
        12,
        16,
        16,
    ]  # one is complete; vLLM looks again when it allocates


# sampling parameters ----------------------------------------------------------------------------------------


NAMES = ("temperature", "top_p", "top_k", "min_p", "seeds")


@pytest.fixture(scope="module")
def add_request() -> Iterator[Callable[..., object]]:
    """vLLM's own `add_request`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "is_uva_available", lambda: False)  # in main memory
        for name in ("add_request", "apply_staged_writes"):
            patch.setattr(SamplingStates, name, getattr(SamplingStates, name))  # vLLM's own, after the module
        vllms = SamplingStates.add_request
        copy_when_changed()
        yield vllms


@pytest.mark.usefixtures("add_request")
@given(steps=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=12))
def test_the_gpu_has_every_parameter_after_each_step(steps: list[list[int]]) -> None:
    """`steps`: the rows that new requests take before each step."""
    states = SamplingStates(8, 100)
    for number, rows in enumerate(steps):
        before = [getattr(states, name).gpu for name in NAMES]
        for row in rows:
            params = SamplingParams(
                temperature=0.1 + number % 16 / 10, top_p=0.9, top_k=7, min_p=0.1, seed=10 * number + row
            )
            states.add_request(row, params)
        states.apply_staged_writes()
        for name, old in zip(NAMES, before, strict=True):
            kept = getattr(states, name)
            assert kept.gpu.tolist() == kept.np.tolist()
            assert number == 0 or (kept.gpu.data_ptr() == old.data_ptr()) is not bool(rows)


@pytest.mark.parametrize("given", [{}, {"temperature": 0.7}, {"top_p": 0.9}])
def test_vllm_learns_whether_a_request_changes_logits(
    add_request: Callable[..., object], given: dict[str, float]
) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    assert SamplingStates(8, 100).add_request(3, params) == add_request(SamplingStates(8, 100), 3, params)
