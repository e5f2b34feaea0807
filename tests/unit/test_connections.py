"""Connections of a server: how many, for whom, and for how long they may wait for their client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from grpo_common import connections
from grpo_common.connections import BoundedHttp, Connections, Wait

LOG = logging.getLogger("test.connections")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Opened(BoundedHttp):
    """A connection without a socket."""

    def __init__(self, bounds: Connections, address: str = "a", descriptor: int = 0) -> None:
        self.ended: str | None = None
        self.timeout_keep_alive = 75
        self.flow: Any = SimpleNamespace(read_paused=False)
        self.transport: Any = SimpleNamespace(close=lambda: self.end("closed"), abort=lambda: self.end("aborted"))
        self.book = bounds
        bounds.admit(self, address, descriptor)

    def end(self, how: str) -> None:
        self.ended = how
        self.book.forget(self)

    def refuse(self) -> None:
        self.end("refused")


def bounds_of(descriptors: int, clock: Clock | None = None) -> Connections:
    return Connections(descriptors, LOG, clock=clock or Clock())


def test_the_bounds_follow_from_the_descriptors() -> None:
    small, large = bounds_of(256), bounds_of(65536)
    assert (small.highest, small.per_client, small.backlog) == (192, 144, 32)  # 64 are spare; ¾ of 192; 64 - 32
    assert (large.highest, large.per_client, large.backlog) == (63424, 47568, 2080)  # 2,112 are spare


def test_a_new_connection_takes_the_place_of_the_oldest_that_has_sent_no_request() -> None:
    bounds = bounds_of(256)
    busy, idle, oldest, newer = (Opened(bounds) for _ in range(4))
    bounds.put(busy, None)
    bounds.put(idle, Wait.NEXT)
    new = Opened(bounds, descriptor=192)
    assert (oldest.ended, new.ended, newer.ended, idle.ended, busy.ended) == ("closed", None, None, None, None)
    Opened(bounds, descriptor=193)
    assert newer.ended == "closed"


def test_an_idle_connection_goes_where_all_have_sent_requests_and_busy_ones_never() -> None:
    clock = Clock()
    bounds = bounds_of(256, clock)
    busy, first, second = (Opened(bounds) for _ in range(3))
    bounds.put(busy, None)
    bounds.put(second, Wait.NEXT)
    bounds.put(first, Wait.NEXT)
    assert Opened(bounds, descriptor=192).ended == "refused"  # both were used a moment ago
    clock.now = 1.0
    assert Opened(bounds, descriptor=192).ended is None
    assert (second.ended, first.ended, busy.ended) == ("closed", None, None)


def test_one_address_has_its_share_and_what_it_waits_with_is_its_own() -> None:
    bounds = bounds_of(16)  # 12 are not spare, ¾ of them are 9
    others = Opened(bounds, "b")
    busy = [Opened(bounds) for _ in range(9)]
    for each in busy[1:]:
        bounds.put(each, None)
    assert Opened(bounds).ended is None
    assert (busy[0].ended, others.ended) == ("closed", None)
    bounds.put(busy[0], None)
    newest = next(iter(bounds.clients["a"].waiting[Wait.HEAD]))
    bounds.put(newest, None)
    assert Opened(bounds).ended == "refused"
    assert Opened(bounds, "b").ended is None


def test_where_descriptors_are_short_the_address_with_most_unfinished_requests_pays() -> None:
    bounds = bounds_of(256)
    lone = Opened(bounds, "a")
    many = [Opened(bounds, "b") for _ in range(2)]
    Opened(bounds, "c", descriptor=192)
    assert (lone.ended, many[0].ended, many[1].ended) == (None, "closed", None)


def test_the_warning_comes_once_and_again_after_half_have_gone(caplog: pytest.LogCaptureFixture) -> None:
    bounds = bounds_of(256)
    opened = [Opened(bounds, descriptor=192) for _ in range(8)]
    assert len(caplog.records) == 1
    args: Any = caplog.records[0].args
    (problem,) = args
    assert (problem.field, "256" in problem.wanted) == ("connections", True)
    for each in opened:
        bounds.forget(each)
    Opened(bounds, descriptor=192)
    assert len(caplog.records) == 1, "time has to pass first"
    loop: Any = SimpleNamespace(call_later=lambda *_: None)
    bounds.keep_time(loop)
    bounds._sweep(loop)
    Opened(bounds, descriptor=192)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("wait", "seconds"), [(Wait.HEAD, 20.0), (Wait.BODY, 60.0), (Wait.READING, 60.0), (Wait.NEXT, 76.0), (None, None)]
)
def test_what_waits_for_too_long_is_closed(wait: Wait | None, seconds: float | None) -> None:
    clock = Clock()
    bounds = bounds_of(256, clock)
    connection = Opened(bounds)
    bounds.put(connection, wait)
    clock.now = seconds - 0.1 if seconds else 1e6
    bounds.close_overdue()
    assert connection.ended is None
    clock.now = seconds or 1e9
    bounds.close_overdue()
    assert connection.ended == ("aborted" if seconds else None)


def test_a_head_that_trickles_has_no_more_time_and_a_body_that_comes_has() -> None:
    clock = Clock()
    bounds = bounds_of(256, clock)
    head, body, unread = (Opened(bounds) for _ in range(3))
    for each in (body, unread):
        bounds.put(each, Wait.BODY)
    unread.flow.read_paused = True
    clock.now = 50.0
    bounds.put(head, Wait.HEAD)
    bounds.put(body, Wait.BODY)
    clock.now = 61.0
    bounds.close_overdue()
    assert (head.ended, body.ended) == ("aborted", None)
    assert unread.ended is None, "it is the server that does not read on"


ACTS = st.one_of(st.sampled_from("abc"), st.tuples(st.integers(0, 30), st.sampled_from([*Wait, None, "lost"])))


@given(st.lists(st.tuples(st.floats(0, 30), ACTS), max_size=80))
def test_the_books_are_right_whatever_happens(acts: list[tuple[float, Any]]) -> None:
    clock = Clock()
    bounds = bounds_of(16, clock)
    made: list[Opened] = []
    for seconds, act in acts:
        clock.now += seconds
        bounds.close_overdue()
        living = [each for each in made if each.ended is None]
        index: int = -1 if isinstance(act, str) else act[0]
        if isinstance(act, str):
            made.append(Opened(bounds, act, descriptor=len(living)))
        elif index < len(living) and act[1] == "lost":
            living[index].end("lost")
        elif index < len(living):
            bounds.put(living[index], act[1])
        living = [each for each in made if each.ended is None]
        assert bounds.open == len(living) == sum(client.open for client in bounds.clients.values())
        listed = {
            connection: wait
            for client in bounds.clients.values()
            for wait, line in client.waiting.items()
            for connection in line
        }
        assert listed == {each: each.wait for each in living if each.wait is not None}
        assert all(0 < client.open <= bounds.per_client for client in bounds.clients.values())


def test_the_limit_of_descriptors_is_raised_where_it_may_be() -> None:
    code = """
import resource
from grpo_common.connections import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for soft, hard in ((100, hard), (100, 200)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = connections.MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, connections.MOST_DESCRIPTORS)
    assert [int(number) for number in done.stdout.split()] == [most, most, 200, 200]


# A real server on a real socket

ANSWER = b"HTTP/1.1 200 OK\r\n"


class App:
    """`/` answers without reading the body, `/read` when it has it, `/wait` when `go` is set, `/long` at length."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        path, body = scope["path"], b"x" * (32 << 20 if scope["path"] == "/long" else 1)
        while path == "/read" and (await receive())["more_body"]:
            pass
        if path == "/wait":
            await self.go.wait()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            await send({"type": "http.response.body", "body": part, "more_body": start + len(part) < len(body)})


class Server:
    """uvicorn in this loop with short patience."""

    def __init__(self) -> None:
        self.app = App()
        self.bounds = Connections(65536, LOG, head_s=0.3, stalled_s=0.3)
        config = uvicorn.Config(self.app, http=self.bounds.protocol(), log_config=None, port=0, lifespan="off")
        self.uvicorn = uvicorn.Server(config)

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        return reader, writer

    async def until_closed(self, sent: bytes) -> bytes:
        """All that the server says before it closes the connection."""
        reader, writer = await self.connect(sent)
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
        writer.close()
        return b""


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Server]:
    server = Server()
    serving = asyncio.create_task(server.uvicorn.serve())
    while not server.uvicorn.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.uvicorn.should_exit = server.uvicorn.force_exit = True
        server.app.go.set()
        await serving


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


def request(path: str, length: int = 0) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", request("/read", 9) + b"abc"], ids=str
)
@pytest.mark.usefixtures("often")
def test_a_client_that_does_not_finish_its_request_is_let_go(sent: bytes) -> None:
    async def run() -> bytes:
        async with served() as server:
            said = await server.until_closed(sent)
            while server.bounds.open:
                await asyncio.sleep(0.01)
            return said

    assert asyncio.run(run()) == b""


@pytest.mark.usefixtures("often")
def test_half_a_second_request_on_a_kept_connection_is_let_go() -> None:
    async def run() -> bytes:
        async with served() as server:
            return await server.until_closed(request("/") + b"GET / HT")

    assert asyncio.run(run()).startswith(ANSWER)


@pytest.mark.usefixtures("often")
def test_kept_connections_and_running_requests_outlive_those_that_owe_a_request() -> None:
    async def run() -> None:
        async with served() as server:
            kept, keeping = await server.connect(request("/"))
            assert (await kept.readuntil(b"x")).startswith(ANSWER)
            waiting, asking = await server.connect(request("/wait"))
            for _ in range(2):
                await server.until_closed(b"GET")  # so long the others have had nothing to say
            assert server.bounds.open >= 2
            keeping.write(request("/"))
            assert (await kept.readuntil(b"x")).startswith(ANSWER)
            server.app.go.set()
            assert (await waiting.readuntil(b"x")).startswith(ANSWER)
            asking.close()

    asyncio.run(run())


@pytest.mark.usefixtures("often")
def test_an_answer_before_the_end_of_the_body_leaves_the_connection_usable() -> None:
    async def run() -> None:
        async with served() as server:
            reader, writer = await server.connect(request("/", 1 << 20))
            assert (await reader.readuntil(b"x")).startswith(ANSWER)
            writer.write(b"b" * (1 << 20) + request("/"))
            assert (await reader.readuntil(b"x")).startswith(ANSWER)

    asyncio.run(run())


@pytest.mark.usefixtures("often")
def test_a_client_that_does_not_read_its_answer_is_let_go() -> None:
    async def run() -> int:
        async with served() as server:
            reader, writer = await server.connect(request("/long"))
            while server.bounds.open:
                await asyncio.sleep(0.01)
            received = 0
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 20):
                    received += len(data)
            writer.close()
            return received

    assert asyncio.run(run()) < 32 << 20


def test_a_head_without_end_is_refused() -> None:
    async def run() -> bytes:
        async with served() as server:
            return await server.until_closed(b"GET / HTTP/1.1\r\nX: " + b"x" * (connections.HEAD_BYTES + 1))

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400")


@pytest.mark.usefixtures("often")
def test_a_server_without_free_descriptors_says_so_and_lets_idle_connections_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with served() as server:
            kept, keeping = await server.connect(request("/"))
            await kept.readuntil(b"x")
            server.bounds.highest = os.dup(0)  # what comes next is beyond it
            try:
                assert await kept.read() == b""
            finally:
                os.close(server.bounds.highest)
                keeping.close()

    asyncio.run(run())
    assert len([record for record in caplog.records if record.name == LOG.name]) == 1
