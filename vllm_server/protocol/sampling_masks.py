"""Sampling masks as bytes: the token ids that top-p, top-k and min-p kept when each token was sampled.

The bytes are a sequence of blocks, so masks of consecutive parts are joined by joining their bytes. A block is a list
of whole numbers, each in LEB128 (7 bits a byte, the lowest first, the high bit set on all but the last byte):

    positions that the block skips: they have no mask
    T, the positions that follow
    for each of them the number of ids kept; 0: no mask, the whole vocabulary was kept
    for each of them its ids in ascending order, each as the number of ids left out since the one before

A position with one kept id of a vocabulary of 150,000 takes 4 bytes, one with 20 ids about 41: 1 byte for the count,
and 1 to 3 bytes for an id. `vllm_server.sampling_masks` encodes, `grpo_trainer.rollouts.sampling_masks` decodes.
"""

from __future__ import annotations

LONGEST = 5
"""Bytes of the largest number, below 2**35."""


def skip(positions: int) -> bytes:
    """Return the block for positions without a mask: a prompt, or what a user said."""
    return _number(positions) + b"\0"


def _number(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(0x80 | value & 0x7F)
        value >>= 7
    written.append(value)
    return bytes(written)
