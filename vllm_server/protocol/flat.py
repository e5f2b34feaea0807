"""One layout for an adapter on every transport: that of a safetensors file.

    8 bytes, little endian: length of the header │ header, JSON, padded with spaces │ the tensors' data, without gaps

The header alone describes the data, so the same code reads a file, a request's body, GPU memory and a broadcast.
Format: https://github.com/huggingface/safetensors (README, "Format"). No torch here.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from vllm_server.protocol import HIGHEST_VERSION

ITEM_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
HEADER_LIMIT = 100 << 20  # bytes; safetensors' own limit
_ALIGNMENT = 64
_VERSION_DIGITS = len(str(HIGHEST_VERSION))


@dataclass(frozen=True)
class TensorSpan:
    """One tensor's place in the data, in bytes from its start."""

    name: str
    dtype: str  # by safetensors' names: F32, BF16, …
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A decoded header. `size` is its bytes with the length field, so the data starts there."""

    spans: tuple[TensorSpan, ...]
    metadata: Mapping[str, str]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return max((span.end for span in self.spans), default=0)


def lay_out(tensors: Iterable[tuple[str, tuple[int, ...]]], dtype: str) -> tuple[TensorSpan, ...]:
    """Return places for tensors of one dtype, one after the other."""
    spans, start = [], 0
    for name, shape in tensors:
        end = start + prod(shape) * ITEM_SIZES[dtype]
        spans.append(TensorSpan(name, dtype, shape, start, end))
        start = end
    return tuple(spans)


def encode_header(spans: Iterable[TensorSpan], metadata: Mapping[str, str]) -> bytes:
    """Return length and header, padded so that the data starts at a multiple of 64 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    entries |= {s.name: {"dtype": s.dtype, "shape": list(s.shape), "data_offsets": [s.start, s.end]} for s in spans}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def with_version(header: bytes, version: int) -> bytes:
    """Return a header that names a version as well; its size is the same for all versions."""
    decoded = decode_header(header)
    return encode_header(decoded.spans, {**decoded.metadata, "version": f"{version:0{_VERSION_DIGITS}}"})


def header_size(head: bytes) -> int:
    """Return the size of length and header, from the first eight bytes; a ValueError if they are not safetensors'."""
    if len(head) < 8:
        raise ValueError(f"{len(head)} bytes")
    size = struct.unpack("<Q", head[:8])[0]
    if size > HEADER_LIMIT:
        raise ValueError(f"a header of {size} bytes")
    return 8 + size


def read_header(stream: BinaryIO) -> bytes:
    """Return length and header from the beginning of a file, for `decode_header`. The stream then is at the data.

    Raise a ValueError if this is not a safetensors file.
    """
    head = stream.read(8)
    return head + stream.read(header_size(head) - 8)


def decode_header(data: bytes) -> Header:
    """Decode length and header, which more bytes may follow. Raise a ValueError that says how they are damaged."""
    size = header_size(data)
    if len(data) < size:
        raise ValueError(f"a file that ends in its header ({len(data)} of {size} bytes)")
    try:
        entries = json.loads(data[8:size])
        metadata = entries.pop("__metadata__", {})
        spans = tuple(
            TensorSpan(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in entries.items()
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"an invalid header ({error})") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ that is not an object of strings")
    for span in spans:
        if not all(type(n) is int and n >= 0 for n in (*span.shape, span.start, span.end)) or span.end < span.start:
            raise ValueError(f"{span.name} with shape {span.shape} at {span.start}:{span.end}")
        if not isinstance(span.dtype, str):
            raise ValueError(f"{span.name} of dtype {span.dtype}")
        wanted = prod(span.shape) * ITEM_SIZES.get(span.dtype, 0)
        if span.dtype in ITEM_SIZES and span.end - span.start != wanted:
            raise ValueError(f"{span.name} with {span.end - span.start} bytes for shape {span.shape} of {span.dtype}")
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):  # neither gaps nor bytes of two tensors
        if span.start != end:
            raise ValueError(f"{span.name} at byte {span.start} of the data, wanted {end}")
        end = span.end
    return Header(spans, metadata, size)
