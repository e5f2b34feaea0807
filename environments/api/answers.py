"""Batches as bytes: groups are kept packed, so a MessagePack answer is a header and the groups as they lie there."""

from collections.abc import Iterator, Sequence

import msgspec

from environments.api import wire


def packed_batch(payloads: Sequence[bytes], fields: dict[str, object]) -> Iterator[bytes]:
    """`wire.PackedBatch` in pieces, a piece per group; `fields` are the others of the message."""
    head = bytes([0x80 | (1 + len(fields))])  # a map of so many entries
    for name, value in fields.items():
        head += msgspec.msgpack.encode(name) + msgspec.msgpack.encode(value)
    yield head + msgspec.msgpack.encode("batch") + b"\xdd" + len(payloads).to_bytes(4, "big")
    yield from payloads


def json_batch(payloads: Sequence[bytes], fields: dict[str, object]) -> Iterator[bytes]:
    """`wire.Batch` in pieces, a piece per group."""
    yield b'{"batch":['
    for i, payload in enumerate(payloads):
        yield (b"," if i else b"") + json_group(payload)
    rest = msgspec.json.encode(fields)[1:]
    yield b"]," + rest if fields else b"]}"


def json_group(payload: bytes) -> bytes:
    """A group in JSON with the original's 14 keys, and `policy_versions` where the environment sent it."""
    group = wire.unpack(msgspec.msgpack.decode(payload, type=wire.PackedGroup))
    return msgspec.json.encode(group).removesuffix(b',"policy_versions":null}') + (
        b"}" if group.policy_versions is None else b""
    )
