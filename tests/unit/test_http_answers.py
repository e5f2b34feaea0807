"""What all HTTP clients make of an error answer, and of its status."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_common.http import Complaint, address, complaint, may_pass
from grpo_trainer.config.server import Server
from vllm_server.errors import ServeError

MSGPACK = "application/msgpack"


@pytest.mark.parametrize(
    ("status", "passes"),
    [(200, False), (404, False), (409, False), (422, False), (501, False)]
    + [(status, True) for status in (408, 425, 429, 499, 500, 502, 503, 504, 507)],
)
def test_which_failures_may_pass(status: int, passes: bool) -> None:
    assert may_pass(status) == passes


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1:80"), ("node-1", "node-1:80"), ("::1", "[::1]:80"), ("[fd00::2]", "[fd00::2]:80")],
)
def test_address_of_a_url(host: str, shown: str) -> None:
    assert address(host, 80) == shown


def test_servers_at_ipv6_addresses() -> None:
    config = Server(host="::1", port=9001, also=("[fd00::2]:9002",))
    assert [each.url for each in config.each] == ["http://[::1]:9001", "http://[fd00::2]:9002"]
    assert config.each[1].host == "fd00::2"  # as a socket has it


def test_parts_of_our_servers_errors_are_kept() -> None:
    body = msgspec.json.encode(ServeError(409, "version", got=3, wanted="4", fix="ask again").response())
    said = complaint(body, "application/json")
    assert (said.key, said.got, said.wanted, said.fix) == ("version", "3", "4", "ask again")


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (b'{"detail": "why", "field": "scores"}', "application/json", Complaint("why", "scores")),
        (b'{"error": {"message": "broken", "param": null}}', None, Complaint("broken")),
        (msgspec.msgpack.encode({"detail": "why"}), MSGPACK, Complaint("why")),
        (b"\x81\xa1x\x01", MSGPACK, Complaint(f"4 bytes of {MSGPACK}")),
        (b"<html>", "text/html", Complaint("<html>")),
        (b"[1]", "application/json", Complaint("[1]")),
        (b"", None, Complaint("no reason given")),
    ],
)
def test_what_an_error_answer_says(body: bytes, content_type: str | None, said: Complaint) -> None:
    assert complaint(body, content_type) == said


@given(st.binary(max_size=2000), st.sampled_from([None, "text/html", "application/json", MSGPACK]))
def test_any_bytes_are_read(body: bytes, content_type: str | None) -> None:
    assert 0 < len(complaint(body, content_type).reason) <= 500
