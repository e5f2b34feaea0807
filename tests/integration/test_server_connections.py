"""Connections of the inference server: those of its clients are kept, beside many that never send a request."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

from tests.integration.serving import shared_server

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

HALF_OPEN = 200


def test_idle_connections_are_kept_beside_half_open_ones() -> None:
    server = shared_server()
    port = httpx.URL(server.url).port or 80
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with ExitStack() as held:
        held.callback(kept.close)
        kept.request("GET", "/bridge/info")
        assert kept.getresponse().read()
        own = kept.sock.getsockname()
        for _ in range(HALF_OPEN):
            half = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            half.sendall(b"POST /generate HTTP/1.1\r\n")
        assert server.generate("2+2=", max_tokens=2).text
        time.sleep(6)  # vLLM's own default closes a connection that is idle for 5 s
        kept.request("GET", "/bridge/info")
        assert kept.getresponse().status == 200
        assert kept.sock.getsockname() == own
