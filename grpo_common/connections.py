"""Connections of an HTTP server, bounded in number and in how long a client may leave one waiting.

Each connection takes a descriptor. A process that has none left accepts no more connections, and its event loop does
not log that. So some descriptors stay free: a connection that gets one of them takes the place of another that waits
for its client, first of one without a whole request head, or is refused with 503. No connection whose request is being
answered is closed for another.
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
"""The limit of open descriptors is raised to this, or to the hard limit if that is lower."""
SERVER_IDLE_S: Final = 75
"""For how long a connection is kept between two requests: longer than clients keep it (httpx 5 s, aiohttp 15 s), so
that no client sends a request on a connection that the server is closing."""
HEAD_S: Final = 20.0
"""For how long a client may take to send a request head, from its first byte or from the connection on."""
STALLED_S: Final = 60.0
"""For how long a client may send no further byte of a body, or read nothing of an answer."""
HEAD_BYTES: Final = 1 << 16
"""The longest request head."""
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
    """What of its client a connection waits for."""

    HEAD = auto()
    """The request head, or the rest of it."""
    BODY = auto()
    """The rest of a body."""
    READING = auto()
    """That it reads an answer."""
    NEXT = auto()
    """The next request: all that came is answered."""


class Client:
    """The connections of one address: how many there are, and those that wait for it, the longest first."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open = 0
        self.waiting: dict[Wait, OrderedDict[BoundedHttp, float]] = {wait: OrderedDict() for wait in Wait}

    @property
    def idle(self) -> tuple[int, int]:
        """Connections without a whole request head, and those between two requests."""
        return len(self.waiting[Wait.HEAD]), len(self.waiting[Wait.NEXT])


class Connections:
    """The connections of one server.

    Args:
        descriptors: how many the process may have open.
        log: where a warning goes when connections reach their bound.
        head_s: see `HEAD_S`.
        stalled_s: see `STALLED_S`.
        clock: seconds that nobody sets.

    Attributes:
        highest: a connection whose descriptor is this or higher takes the place of another. The kernel gives the lowest
            that is free, so all below are in use then, whatever for.
        per_client: connections of one address.
        backlog: for `listen`: connections that the kernel accepts before the server takes the first.
        open: connections that are open.
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
        """Return uvicorn's protocol class (`uvicorn.Config(http=…)`) for connections that are counted here."""
        return type("BoundedHttp", (BoundedHttp,), {"bounds": self})

    def keep_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close overdue connections from now on, once a `SWEEP_S`."""
        if not self._keeps_time:
            self._keeps_time = True
            loop.call_later(SWEEP_S, self._sweep, loop)

    def admit(self, connection: BoundedHttp, address: str, descriptor: int) -> None:
        """Count a new connection, and close another for it, or refuse it, where there are too many."""
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
        """Note what a connection waits for from now on; None: for the server's answer."""
        client = connection.owner
        if client is None or (wait is connection.wait and wait is not Wait.BODY):
            return
        if connection.wait is not None:
            client.waiting[connection.wait].pop(connection, None)
        connection.wait = wait
        if wait is not None:
            client.waiting[wait][connection] = self._clock()

    def forget(self, connection: BoundedHttp) -> None:
        """A connection is closed, or speaks another protocol now."""
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
                        self.put(connection, wait)  # it is the server that does not read
                    else:
                        self.put(connection, None)
                        connection.transport.abort()

    def _overdue(self, client: Client, wait: Wait) -> Iterator[BoundedHttp]:
        now = self._clock()
        for connection, since in client.waiting[wait].items():
            # uvicorn's own timer is earlier, but an answer before the end of a body leaves it unset.
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
        """Close a connection of the address that has most of those that wait; see `_close_one_of`."""
        halves = sum(client.idle[0] for client in self.clients.values())
        self._warn(
            f"{self.open} open, {halves} of them without a whole request",
            f"{self.descriptors - self.highest} descriptors free",
        )
        most = max(self.clients.values(), key=lambda client: client.idle, default=None)
        return most is not None and self._close_one_of(most, least_s)

    def _close_one_of(self, client: Client, least_s: float = 0.0) -> bool:
        """Close the connection that has waited longest for a head, `least_s` or more, else for a next request."""
        for wait, least in ((Wait.HEAD, least_s), (Wait.NEXT, _LEAST_IDLE_S)):
            connection, since = next(iter(client.waiting[wait].items()), (None, 0.0))
            if connection is not None and self._clock() - since >= least:
                self.put(connection, None)
                connection.transport.close()
                return True
        return False

    def _warn(self, got: str, wanted: str) -> None:
        """Warn once, and again only after half of the connections have gone."""
        if self._warned_at is None:
            wanted = f"{wanted}, with a limit of {self.descriptors} open files"
            fix = "start the server with a higher limit (ulimit -n) if these connections are yours"
            summary = "idle ones are closed for new ones, and new ones are refused where none is idle"
            self._log.warning("%s", Problem("connections", got, wanted, fix, summary))
        self._warned_at = max(self._warned_at or 0, self.open)


def _lowest_free() -> int:
    """Return the descriptor that the next file gets."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return MOST_DESCRIPTORS
    os.close(descriptor)
    return descriptor


class BoundedHttp(HttpToolsProtocol):
    """One connection. What its client owes is known by where the parser is and whether the last request is answered."""

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
        """Answer 503 to whatever the client is going to ask, and close."""
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
