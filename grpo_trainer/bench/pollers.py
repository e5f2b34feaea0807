"""Environments that ask GET /status-env every 0.1 s, very many of them in one process.

Each has its own connection and sends the same few bytes over and over, so that a thousand of them need little CPU time
compared with the server.
"""

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

INTERVAL_S = 0.1
_CONNECTING_AT_ONCE = 50


class _Environment(asyncio.Protocol):
    """One connection: sends requests at a fixed interval and times them. A late answer delays the next request."""

    def __init__(self, request: bytes, times: list[float], failures: list[str]) -> None:
        self.request = request
        self.times = times
        self.failures = failures
        self.sent_at = 0.0
        self.received = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self) -> None:
        """Send the request, unless the last one is still unanswered."""
        if not self.sent_at:
            self.sent_at = time.perf_counter()
            self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        start = lowered.find(b"content-length:") + len(b"content-length:")
        if len(body) < int(lowered[start:].split(b"\r\n", 1)[0]):
            return
        self.times.append(time.perf_counter() - self.sent_at)
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            self.failures.append(f"GET /status-env: {self.received[:200]!r}")
        self.received = b""
        self.sent_at = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        if self.sent_at:
            self.failures.append(f"GET /status-env: connection lost: {exc}")


def poll(pipe: Connection, host: str, port: int, env_ids: list[int]) -> None:
    """The process: `ready`, then from `go` to `stop` every environment asks on its beat; ends with the times."""
    times: list[float] = []
    failures: list[str] = []
    uvloop.run(_poll(pipe, host, port, env_ids, times, failures))
    pipe.send({"times": times, "failures": failures})


async def _poll(
    pipe: Connection, host: str, port: int, env_ids: list[int], times: list[float], failures: list[str]
) -> None:
    loop = asyncio.get_running_loop()
    environments: list[_Environment] = []
    for first in range(0, len(env_ids), _CONNECTING_AT_ONCE):
        connecting = [
            _connect(loop, host, port, each, times, failures) for each in env_ids[first:][:_CONNECTING_AT_ONCE]
        ]
        environments += await asyncio.gather(*connecting)
    pipe.send("ready")
    await loop.run_in_executor(None, pipe.recv)
    stop = loop.run_in_executor(None, pipe.recv)
    start = time.monotonic()
    beat = 0
    while not stop.done():
        for i, environment in enumerate(environments):  # spread over the interval, as independent processes are
            due = start + (beat + i / len(environments)) * INTERVAL_S
            if due > time.monotonic() + 0.001:
                await asyncio.sleep(due - time.monotonic())
            environment.ask()
        beat += 1
        due = start + beat * INTERVAL_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    for environment in environments:
        environment.sent_at = 0.0
        environment.transport.close()


async def _connect(
    loop: asyncio.AbstractEventLoop, host: str, port: int, env_id: int, times: list[float], failures: list[str]
) -> _Environment:
    body = b'{"env_id": %d}' % env_id
    request = (
        b"GET /status-env HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    )
    request %= (host.encode(), port, len(body), body)
    _, environment = await loop.create_connection(lambda: _Environment(request, times, failures), host, port)
    return environment
