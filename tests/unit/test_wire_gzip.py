"""gzip by ISA-L is the gzip of everybody else."""

from __future__ import annotations

import gzip

import pytest

from environments.api.http import GZIP_ERROR, gzip_inflater, gzipped

BODY = b'{"tokens": [[1, 2, 3]]}' * 10_000


def test_what_is_compressed_is_read_by_anyone():
    packed = gzipped(BODY)
    assert gzip.decompress(packed) == BODY
    assert len(packed) < len(BODY) / 2


def test_inflating_stops_at_the_limit_and_goes_on():
    inflater = gzip_inflater()
    data = gzip.compress(BODY) + b"rest"
    pieces = []
    while not inflater.eof:
        pieces.append(inflater.decompress(data, 1000))
        assert len(pieces[-1]) <= 1000
        data = inflater.unconsumed_tail
    assert b"".join(pieces) == BODY
    assert inflater.unused_data == b"rest"


def test_a_damaged_body_is_an_error_of_the_list():
    data = bytearray(gzip.compress(BODY))
    data[-6] ^= 0xFF  # in the checksum
    with pytest.raises(GZIP_ERROR):
        gzip_inflater().decompress(bytes(data))
