"""gzip by either library is the same gzip."""

from __future__ import annotations

import gzip

import pytest

from environments.api import gzipping

BODY = b'{"tokens": [[1, 2, 3]]}' * 10_000


@pytest.fixture(params=["as installed", "zlib alone"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "zlib alone":
        monkeypatch.setattr(gzipping, "isal_zlib", None)


@pytest.mark.usefixtures("library")
def test_what_is_compressed_is_read_by_anyone():
    packed = gzipping.compress(BODY)
    assert gzip.decompress(packed) == BODY
    assert len(packed) < len(BODY) / 2


@pytest.mark.usefixtures("library")
def test_inflating_stops_at_the_limit_and_goes_on():
    inflater = gzipping.inflater()
    data = gzip.compress(BODY) + b"rest"
    pieces = []
    while not inflater.eof:
        pieces.append(inflater.decompress(data, 1000))
        assert len(pieces[-1]) <= 1000
        data = inflater.unconsumed_tail
    assert b"".join(pieces) == BODY
    assert inflater.unused_data == b"rest"


@pytest.mark.usefixtures("library")
def test_a_damaged_body_is_an_error_of_the_list():
    data = bytearray(gzip.compress(BODY))
    data[-6] ^= 0xFF  # in the checksum
    with pytest.raises(gzipping.ERRORS):
        gzipping.inflater().decompress(bytes(data))
