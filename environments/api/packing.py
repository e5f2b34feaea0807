"""Rows of numbers as little-endian bytes, and back: all rows one after another, lengths kept elsewhere."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any


def pack_ints(rows: Iterable[list[int]]) -> bytes:
    """int32 bytes of all rows; the numbers must fit (the wire's schema sees to it)."""
    numbers = array("i")
    for row in rows:
        numbers.fromlist(row)
    return _little_endian(numbers).tobytes()


def pack_floats(rows: Iterable[list[float]] | None) -> bytes | None:
    """float32 bytes where that loses nothing, else float64; None for no numbers."""
    numbers = array("f")
    for row in rows or ():
        packed = array(numbers.typecode, row)
        # Logprobs come from float32 models: most rows lose nothing at half the size.
        if numbers.typecode == "f" and packed.tolist() != row:
            numbers, packed = array("d", numbers), array("d", row)
        numbers += packed
    return _little_endian(numbers).tobytes() or None


def unpack_ints(data: bytes, spans: Sequence[slice]) -> list[list[int]]:
    """The rows that `pack_ints` packed; `spans` says where each lies, in numbers."""
    return [unpack_row(data, span, spans[-1].stop, "i") for span in spans]


def unpack_floats(data: bytes | None, spans: Sequence[slice]) -> list[list[float]] | None:
    """The rows that `pack_floats` packed."""
    return None if data is None else [unpack_row(data, span, spans[-1].stop, "f") for span in spans]


def unpack_row(data: bytes, span: slice, total: int, kind: str) -> list[Any]:
    """One row of `total` packed numbers, of `kind` "i" or "f"; a float's width follows from the data's length."""
    return numbers_of(data, span, total, kind).tolist()


def numbers_of(data: bytes, span: slice, total: int, kind: str) -> "array[Any]":
    """The same as an array."""
    width = len(data) // total if total else 4
    numbers = array("d" if width == 8 else kind, memoryview(data)[span.start * width : span.stop * width].tobytes())
    return _little_endian(numbers)


def _little_endian(numbers: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
