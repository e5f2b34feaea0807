"""Batches as bytes, in pieces, so that other requests have their turn between two pieces.

Groups are kept packed, so a MessagePack answer is a header and the groups as they lie there.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from environments.api import wire
from environments.api.packing import unpack_row

_ROW_BY_ROW = ("messages", "distill_token_ids", "distill_logprobs")
_OURS = ("policy_versions", "routed_experts")
_PER_TOKEN = {"tokens": "i", "masks": "i", "advantages": "f", "ref_logprobs": "f", "inference_logprobs": "f"}


def packed_batch(payloads: Sequence[bytes], fields: dict[str, object]) -> Iterator[bytes]:
    """`wire.PackedBatch`, a piece per group; `fields` are the others of the message."""
    head = bytes([0x80 | (1 + len(fields))])  # a map, with the number of its entries
    for name, value in fields.items():
        head += msgspec.msgpack.encode(name) + msgspec.msgpack.encode(value)
    yield head + msgspec.msgpack.encode("batch") + b"\xdd" + len(payloads).to_bytes(4, "big")
    yield from payloads


def json_batch(payloads: Sequence[bytes], fields: dict[str, object]) -> Iterator[bytes]:
    """`wire.Batch`, a piece per sequence and field."""
    yield b'{"batch":['
    for i, payload in enumerate(payloads):
        if i:
            yield b","
        yield from json_group(payload)
    yield b"]," + msgspec.json.encode(fields)[1:] if fields else b"]}"


def json_group(payload: bytes) -> Iterator[bytes]:
    """A group in JSON with the original's 14 keys, and ours where the environment sent them."""
    group = msgspec.msgpack.decode(payload, type=wire.UnreadGroup)
    rows = wire.spans(group.lengths)
    opening = b"{"
    for name in wire.ScoredData.__struct_fields__:
        value = getattr(group, name)
        if name in _OURS and value is None:
            continue
        yield opening + b'"%s":' % name.encode()
        opening = b","
        if name in _PER_TOKEN and value is not None:
            yield from _array(
                msgspec.json.encode(unpack_row(value, row, rows[-1].stop, _PER_TOKEN[name])) for row in rows
            )
        elif name in _ROW_BY_ROW and value is not None:
            yield from _array(msgspec.json.encode(msgspec.msgpack.decode(row)) for row in value)
        else:
            yield msgspec.json.encode(value)
    yield b"}"


def _array(items: Iterable[bytes]) -> Iterator[bytes]:
    opening = b"["
    for item in items:
        yield opening + item
        opening = b","
    yield b"]" if opening == b"," else b"[]"
