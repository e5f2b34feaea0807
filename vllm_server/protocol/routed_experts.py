"""Routed experts as bytes: which experts a mixture-of-experts model chose for each token, in each of its MoE layers.

The bytes begin with a header of 8: `RoutedShape` as three little-endian numbers of 16 bits, and two bytes of 0. A row
of `layers * top_k` expert ids follows for each token from the first one on, layer by layer; an id takes a byte if the
model has 256 experts at most, else two. Later tokens have no row: the server has not computed the last sampled token.

A token of Mixtral 8x7B (32 layers, 2 experts) takes 64 bytes, one of Qwen3-30B-A3B (48 layers, 8 experts) 384; in JSON
a third more. `vllm_server.output_blocks` encodes, `grpo_trainer.rollouts.groups` decodes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

_HEADER = struct.Struct("<HHHxx")


class RoutedShape(msgspec.Struct, frozen=True):
    """Of a model: MoE layers, experts that a token uses in each, and experts of a layer."""

    layers: int
    top_k: int
    experts: int

    @property
    def id_bytes(self) -> int:
        return 1 if self.experts <= 256 else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.layers * self.top_k * self.id_bytes


def pack(shape: RoutedShape, rows: bytes) -> bytes:
    return _HEADER.pack(shape.layers, shape.top_k, shape.experts) + rows


def unpack(data: bytes) -> tuple[RoutedShape, bytes]:
    """Return the shape and the rows. Raise a ValueError if the bytes have no header, or no whole rows."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes without a header")
    shape, rows = RoutedShape(*_HEADER.unpack_from(data)), data[_HEADER.size :]
    if not shape.row_bytes or len(rows) % shape.row_bytes:
        raise ValueError(f"{len(rows)} bytes of rows of {shape.row_bytes}")
    return shape, rows


def joined(turns: Sequence[bytes | None]) -> bytes | None:
    """Return the rows of a conversation from those of its turns, each of which begins with all turns before it.

    A token keeps the experts that it had when it was first computed: the next token was sampled with them. None: a turn
    has no rows, or not those of the same model.
    """
    shape, rows = None, b""
    for turn in turns:
        if turn is None:
            return None
        own, more = unpack(turn)
        if own != (shape or own):
            return None
        shape, rows = own, rows + more[len(rows) :]
    return None if shape is None else pack(shape, rows)
