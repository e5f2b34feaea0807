"""Rows of numbers as little-endian bytes, and back: all rows one after another, lengths kept elsewhere."""

import sys
from array import array
from collections.abc import Sequence
from typing import Any


def pack_ints(rows: list[list[int]]) -> bytes:
    """int32 bytes of all rows; the numbers must fit (the wire's schema sees to it)."""
    return _little_endian(_concatenate("i", rows)).tobytes()


def pack_floats(rows: list[list[float]] | None) -> bytes | None:
    """float32 bytes where that loses nothing, else float64; None for no rows."""
    if not rows:
        return None
    double = _concatenate("d", rows)
    single = array("f", double)
    # Logprobs come from float32 models: most rows lose nothing at half the size, the rest stay whole.
    return _little_endian(single if array("d", single) == double else double).tobytes()


def unpack_ints(data: bytes, spans: Sequence[slice]) -> list[list[int]]:
    """The rows that `pack_ints` packed; `spans` says where each lies, in numbers."""
    numbers = _little_endian(array("i", data))
    return [numbers[span].tolist() for span in spans]


def unpack_floats(data: bytes | None, spans: Sequence[slice]) -> list[list[float]] | None:
    """The rows that `pack_floats` packed; the width of a number follows from the length of the whole."""
    if data is None:
        return None
    total = spans[-1].stop
    numbers = _little_endian(array("f" if len(data) == 4 * total else "d", data))
    return [numbers[span].tolist() for span in spans]


def _little_endian(numbers: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _concatenate(typecode: str, rows: list[list[Any]]) -> "array[Any]":
    numbers = array(typecode)
    for row in rows:
        numbers.fromlist(row)
    return numbers
