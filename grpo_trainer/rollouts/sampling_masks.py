"""Sampling masks: the token ids that top-p, top-k and min-p kept when each token of a sequence was sampled.

The server's logprobs are those of the kept tokens, renormalised. The trainer's must be, too: otherwise each importance
ratio is off by the kept mass (DeepSeek-V3.2, arXiv 2512.02556, "Keep Sampling Mask").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_common.errors import UserError
from vllm_server.protocol.sampling_masks import LONGEST

LARGEST_ID = 2**31 - 1


class MaskError(UserError, ValueError):
    """Bytes that are no sampling masks of this sequence."""


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """The kept ids at T positions of a sequence.

    Attributes:
        counts_T: number of kept ids at each position; 0: no mask, the whole vocabulary was kept.
        ids_M: the kept ids, position by position, ascending within each.
    """

    counts_T: NDArray[np.int64]
    ids_M: NDArray[np.int32]

    def at(self, positions: NDArray[np.int64] | slice) -> SamplingMasks:
        """Return the masks at some positions only, in their order."""
        counts_t = self.counts_T[positions]
        begins_t = (np.cumsum(self.counts_T) - self.counts_T)[positions]
        within_m = np.arange(counts_t.sum()) - np.repeat(np.cumsum(counts_t) - counts_t, counts_t)
        return SamplingMasks(counts_t, self.ids_M[np.repeat(begins_t, counts_t) + within_m])

    @property
    def rows_M(self) -> NDArray[np.int64]:
        """The position of each kept id."""
        return np.repeat(np.arange(len(self.counts_T)), self.counts_T)

    def forbid(self, tokens_T: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where a token is not among the kept ones: it can't have been sampled with this mask."""
        rows_M = self.rows_M
        allowed_T = self.counts_T == 0
        allowed_T[rows_M[self.ids_M == tokens_T[rows_M]]] = True
        return ~allowed_T


def decode(data: bytes, length: int) -> SamplingMasks:
    """Return the masks of a sequence from bytes (the format: `vllm_server.protocol.sampling_masks`).

    Args:
        length: tokens of the sequence.

    Raises:
        MaskError: the bytes are no masks, or they are those of a sequence of another length.
    """
    numbers = _numbers(data)
    counts_T, gaps = np.zeros(length, np.int64), [np.zeros(0, np.int64)]
    at = position = 0
    while at < len(numbers):
        skipped, many = numbers[at], numbers[at + 1] if at + 1 < len(numbers) else len(numbers)
        position += int(skipped)
        counts = numbers[at + 2 : at + 2 + many]
        own = numbers[at + 2 + many : at + 2 + many + counts.sum()]
        if len(counts) < many or len(own) < counts.sum():
            raise _broken(f"{len(data)} bytes that end within a mask")
        if position + many > length:
            break
        counts_T[position : position + many] = counts
        gaps.append(own)
        position, at = position + int(many), at + 2 + len(counts) + len(own)
    if position != length or at < len(numbers):
        got = "more" if at < len(numbers) else position
        raise _broken(f"masks of {got} positions", f"{length}, one for each token")
    return SamplingMasks(counts_T, _ids(counts_T, np.concatenate(gaps)))


def _ids(counts_T: NDArray[np.int64], gaps_M: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return ids from the numbers of ids left out before each."""
    ends_M = np.cumsum(gaps_M + 1)
    begins = (np.cumsum(counts_T) - counts_T)[counts_T > 0]
    before = np.where(begins > 0, ends_M[begins - 1], 0) if len(begins) else begins
    ids_M = ends_M - np.repeat(before, counts_T[counts_T > 0]) - 1
    if ids_M.size and ids_M.max() > LARGEST_ID:
        raise _broken(f"a token id of {ids_M.max()}", f"{LARGEST_ID} at most")
    return ids_M.astype(np.int32)


def _numbers(data: bytes) -> NDArray[np.int64]:
    raw = np.frombuffer(data, np.uint8)
    ends_K = np.flatnonzero(raw < 0x80)
    if not len(ends_K) or ends_K[-1] != len(raw) - 1:
        raise _broken(f"{len(data)} bytes that end within a number")
    begins_K = np.concatenate([[0], ends_K[:-1] + 1])
    width_K = ends_K - begins_K + 1
    if width_K.max() > LONGEST:
        raise _broken(f"a number of {width_K.max()} bytes", f"{LONGEST} at most")
    values_K = np.zeros(len(ends_K), np.int64)
    for n in range(int(width_K.max())):
        has_K = width_K > n
        values_K[has_K] |= (raw[begins_K[has_K] + n] & 0x7F).astype(np.int64) << 7 * n
    return values_K


def _broken(got: str, wanted: str = "whole masks") -> MaskError:
    return MaskError(field="sampling_masks", got=got, wanted=wanted, fix="send those of grpo serve as they are")
