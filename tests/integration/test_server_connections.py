"""Connections of the inference server: those that owe a request are closed, those of its clients are kept."""

from __future__ import annotations

import http.client
import socket
from contextlib import ExitStack

import httpx
import pytest

from tests.integration.serving import shared_server

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

HALF_OPEN = 50


def test_half_open_connections_are_closed_and_idle_ones_kept() -> None:
    server = shared_server()
    port = httpx.URL(server.url).port or 80
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with ExitStack() as held:
        held.callback(kept.close)
        kept.request("GET", "/bridge/info")
        assert kept.getresponse().read()
        own = kept.sock.getsockname()
        sockets = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120)) for _ in range(HALF_OPEN)
        ]
        for each in sockets[::2]:
            each.sendall(b"POST /generate HTTP/1.1\r\n")
        assert server.generate("2+2=", max_tokens=2).text
        assert [each.recv(1) for each in sockets] == [b""] * HALF_OPEN
        kept.request("GET", "/bridge/info")  # idle for longer than vLLM's own default of 5 s
        assert kept.getresponse().status == 200
        assert kept.sock.getsockname() == own
