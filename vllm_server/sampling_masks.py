"""Sampling masks in the server's process: collected from the engine's answers (`worker/sampling_masks.py`), encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_server import output_blocks
from vllm_server.errors import ServeError
from vllm_server.protocol.sampling_masks import LONGEST

_KEPT = "grpo_kept"
"""Attribute of a completion's logprobs: position -> kept ids, none of them negative unless all ids were kept."""


def collect() -> None:
    """Have vLLM's output processor add kept ids to a request's logprobs.

    Raises:
        FatalError: this vLLM processes logprobs elsewhere.
    """

    def take(processor: Any, lists: Any) -> Any:
        ids, columns = lists.logprob_token_ids, np.shape(lists.logprobs)[-1]
        if np.shape(ids)[-1] > columns:
            if hasattr(processor.logprobs, "start_indices"):  # the flat form, which `POST /generate` asks for
                vars(processor.logprobs).setdefault(_KEPT, {})[len(processor.logprobs)] = ids[0, columns:]
            lists = lists._replace(logprob_token_ids=ids[:, :columns])
        return lists

    output_blocks.pass_through(take)


def kept_of(logprobs: Any) -> Mapping[int, NDArray[np.integer]]:
    """Return position -> kept ids of a completion's logprobs, no ids where all were kept."""
    return {position: ids[ids >= 0] for position, ids in vars(logprobs).get(_KEPT, {}).items()}


def encode(kept: Mapping[int, NDArray[np.integer]], length: int) -> bytes:
    """Return the masks of a completion.

    Args:
        kept: position -> the ids that were kept there, ascending; none: all were.
        length: tokens of the completion; later positions are ignored.

    Returns:
        One block (the format: `protocol/sampling_masks.py`).

    Raises:
        ServeError: 422, a token has no mask.
    """
    if len(rows := [kept[position] for position in range(length) if position in kept]) < length:
        raise ServeError(
            422, "sampling_masks", got=f"masks of {len(rows)} of {length} tokens", wanted="a mask of each",
            fix="omit top_p, top_k and min_p: this vLLM loses masks, or top_k is not below the size of the vocabulary",
        )  # fmt: skip
    counts_T = np.array([len(row) for row in rows], np.int64)
    ids_M = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
    before_M = np.roll(ids_M, 1)
    before_M[(np.cumsum(counts_T) - counts_T)[counts_T > 0]] = -1
    return _leb128(np.concatenate([[0, length], counts_T, ids_M - before_M - 1]))


def _leb128(values_K: NDArray[np.int64]) -> bytes:
    """Return numbers of 0 to 2**35 - 1 as bytes."""
    assert values_K.size and values_K.min() >= 0 and values_K.max() < 1 << 7 * LONGEST
    width_K = 1 + np.searchsorted([1 << 7 * n for n in range(1, LONGEST)], values_K, side="right")
    ends_K = np.cumsum(width_K)
    begins_K, written = ends_K - width_K, np.empty(ends_K[-1], np.uint8)
    for n in range(int(width_K.max())):
        has_K = width_K > n
        more_K = (width_K[has_K] > n + 1).astype(np.int64)
        written[begins_K[has_K] + n] = (values_K[has_K] >> 7 * n & 0x7F) | more_K << 7
    return written.tobytes()
