"""Limit how many connections an HTTP server has, and how long one may wait for its client.

Each connection takes a file descriptor. A process without a free descriptor accepts no more connections, and its event
loop does not log that. The server therefore keeps some descriptors free. When a new connection gets one of these, the
server closes another connection that waits for its client: first one without a complete request head, then one between
two requests. If there is none, the server refuses the new connection with 503. It never closes a connection whose
request it is answering.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from grpo_common.errors import Problem

MOST_DESCRIPTORS: Final = 1 << 16
"""The server raises its limit of open descriptors to this, or to the hard limit if that is lower."""
SERVER_IDLE_S: Final = 75
"""Seconds that a connection stays open between two requests. Clients close theirs earlier (httpx 5 s, aiohttp 15 s), so
no client sends a request on a connection that the server is closing."""
HEAD_S: Final = 20.0
"""Seconds that a client has to send a request head, counted from its first byte or from the connection on."""
STALLED_S: Final = 60.0
"""Seconds that a client may pause while it sends a body or reads an answer."""
HEAD_BYTES: Final = 1 << 16
"""Size limit of a request head."""
SWEEP_S = 1.0

_LEAST_IDLE_S = 1.0  # a connection that was used a moment ago is likely to be used again
_MOST_SPARE = 2112  # a backlog of 2,048 connections and a few files
_SPARE_FILES = 32


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors as far as this process may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY:
        return MOST_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


class Wait(Enum):
    """What a connection waits for from its client."""

    HEAD = auto()
    """The request head, or the rest of it."""
    BODY = auto()
    """The rest of a body."""
    READING = auto()
    """The client reads an answer."""
    NEXT = auto()
    """The next request: all earlier ones are answered."""


class Client:
    """The connections of one address: their number, and those that wait for this client, the longest wait first."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open = 0
        self.waiting: dict[Wait, OrderedDict[BoundedHttp, float]] = {wait: OrderedDict() for wait in Wait}

    @property
    def idle(self) -> tuple[int, int]:
        """Return how many connections lack a complete request head, and how many are between two requests."""
        return len(self.waiting[Wait.HEAD]), len(self.waiting[Wait.NEXT])


class Connections:
    """The connections of one server.

    Args:
        descriptors: how many the process may have open.
        log: gets a warning when connections reach a limit.
        head_s: see `HEAD_S`.
        stalled_s: see `STALLED_S`.
        clock: returns monotonic seconds.

    Attributes:
        highest: a connection whose descriptor is this or higher replaces another connection. The kernel assigns the
            lowest free descriptor, so all lower ones are in use then.
        per_client: limit of connections from one address.
        backlog: argument for `listen`: connections that the kernel holds before the server accepts the first.
        open: number of open connections.
    """

    def __init__(
        self,
        descriptors: int,
        log: logging.Logger,
        *,
        head_s: float = HEAD_S,
        stalled_s: float = STALLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.descriptors = descriptors
        spare = min(_MOST_SPARE, descriptors // 4)
        self.highest = descriptors - spare
        self.per_client = self.highest * 3 // 4
        self.backlog = max(8, spare - _SPARE_FILES)
        self.open = 0
        self.clients: dict[str, Client] = {}
        self._log = log
        self._limits = {Wait.HEAD: head_s, Wait.BODY: stalled_s, Wait.READING: stalled_s}
        self._clock = clock
        self._warned_at: int | None = None
        self._keeps_time = False

    def protocol(self) -> type[HttpToolsProtocol]:
        """Return uvicorn's protocol class (`uvicorn.Config(http=…)`) whose connections this object counts."""
        return type("BoundedHttp", (BoundedHttp,), {"bounds": self})

    def keep_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start closing overdue connections, every `SWEEP_S` seconds."""
        if not self._keeps_time:
            self._keeps_time = True
            loop.call_later(SWEEP_S, self._sweep, loop)

    def admit(self, connection: BoundedHttp, address: str, descriptor: int) -> None:
        """Count a new connection. Where there are too many, close another one for it, or refuse it."""
        client = connection.owner = self.clients.setdefault(address, Client(address))
        client.open += 1
        self.open += 1
        if client.open > self.per_client:
            self._warn(f"{client.open} of {address or 'one client'}", f"{self.per_client} of one address")
            admitted = self._close_one_of(client)
        elif descriptor >= self.highest:
            admitted = self._make_room()
        else:
            admitted = True
        if admitted:
            self.put(connection, Wait.HEAD)
        else:
            connection.refuse()

    def put(self, connection: BoundedHttp, wait: Wait | None) -> None:
        """Record what a connection waits for from now on. None: it waits for the server's answer."""
        client = connection.owner
        if client is None or (wait is connection.wait and wait is not Wait.BODY):
            return
        if connection.wait is not None:
            client.waiting[connection.wait].pop(connection, None)
        connection.wait = wait
        if wait is not None:
            client.waiting[wait][connection] = self._clock()

    def forget(self, connection: BoundedHttp) -> None:
        """Stop counting a connection that is closed or has changed to another protocol."""
        self.put(connection, None)
        client, connection.owner = connection.owner, None
        if client is not None:
            client.open -= 1
            self.open -= 1
            if not client.open:
                del self.clients[client.address]

    def close_overdue(self) -> None:
        """Close connections that have waited for too long."""
        for client in list(self.clients.values()):
            for wait in Wait:
                for connection in list(self._overdue(client, wait)):
                    if wait is Wait.BODY and connection.flow.read_paused:
                        self.put(connection, wait)  # the server has paused reading, not the client
                    else:
                        self.put(connection, None)
                        connection.transport.abort()

    def _overdue(self, client: Client, wait: Wait) -> Iterator[BoundedHttp]:
        now = self._clock()
        for connection, since in client.waiting[wait].items():
            # uvicorn's own keep-alive timer fires earlier, but uvicorn does not set it when an answer ends before
            # the request's body does.
            limit = connection.timeout_keep_alive + SWEEP_S if wait is Wait.NEXT else self._limits[wait]
            if now - since < limit:
                return
            yield connection

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close_overdue()
        if _lowest_free() >= self.highest:
            for _ in range(self.backlog):
                if not self._make_room(_LEAST_IDLE_S):
                    break
        elif self._warned_at is not None and self.open * 2 < self._warned_at:
            self._warned_at = None
        loop.call_later(SWEEP_S, self._sweep, loop)

    def _make_room(self, least_s: float = 0.0) -> bool:
        """Close a waiting connection of the address that has most of them; see `_close_one_of`."""
        halves = sum(client.idle[0] for client in self.clients.values())
        self._warn(
            f"{self.open} open, {halves} of them without a whole request",
            f"{self.descriptors - self.highest} descriptors free",
        )
        most = max(self.clients.values(), key=lambda client: client.idle, default=None)
        return most is not None and self._close_one_of(most, least_s)

    def _close_one_of(self, client: Client, least_s: float = 0.0) -> bool:
        """Close the connection that has waited longest (at least `least_s`) for a head, else for a next request.

        Return whether there was one.
        """
        for wait, least in ((Wait.HEAD, least_s), (Wait.NEXT, _LEAST_IDLE_S)):
            connection, since = next(iter(client.waiting[wait].items()), (None, 0.0))
            if connection is not None and self._clock() - since >= least:
                self.put(connection, None)
                connection.transport.close()
                return True
        return False

    def _warn(self, got: str, wanted: str) -> None:
        """Warn once, and again only after half of the connections have closed."""
        if self._warned_at is None:
            wanted = f"{wanted}, with a limit of {self.descriptors} open files"
            fix = "start the server with a higher limit (ulimit -n) if these connections are yours"
            summary = "the server closes idle connections for new ones, and refuses new ones when none is idle"
            self._log.warning("%s", Problem("connections", got, wanted, fix, summary))
        self._warned_at = max(self._warned_at or 0, self.open)


def _lowest_free() -> int:
    """Return the descriptor that the next opened file would get."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return MOST_DESCRIPTORS
    os.close(descriptor)
    return descriptor


class BoundedHttp(HttpToolsProtocol):
    """One connection.

    The parser's position and the state of the last answer show what the connection waits for (`_put`).
    """

    bounds: ClassVar[Connections]

    owner: Client | None = None
    wait: Wait | None = None
    _parsing: Wait | None = Wait.HEAD
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.bounds.keep_time(self.loop)
        socket = transport.get_extra_info("socket")
        self.bounds.admit(self, self.client[0] if self.client else "", socket.fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.bounds.forget(self)

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        self.bounds.forget(self)

    def data_received(self, data: bytes) -> None:
        in_head = self._parsing is Wait.HEAD
        super().data_received(data)
        if in_head and self._parsing is Wait.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request head is longer than {HEAD_BYTES} bytes.")
        self._put()

    def on_message_begin(self) -> None:
        self._parsing, self._head_bytes = Wait.HEAD, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._parsing = Wait.BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._parsing = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._put()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._put()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._put()

    def refuse(self) -> None:
        """Answer 503 before any request is read, and close."""
        body = b"too many connections"
        self.transport.write(_REFUSAL % (len(body), body))
        self.transport.close()

    def _put(self) -> None:
        cycle: Any = self.cycle
        if self._parsing is Wait.BODY:
            wait: Wait | None = Wait.BODY
        elif self.flow.write_paused:
            wait = Wait.READING
        elif cycle is not None and not cycle.response_complete:
            wait = None
        else:
            wait = self._parsing or Wait.NEXT
        self.bounds.put(self, wait)


_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
)
