"""What the HTTP clients and servers of a run share: time-outs, which failures are temporary, how to read an error
answer, how many connections a server takes, and what it does when a client disconnects."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive

T = TypeVar("T")

CONNECT_S = 10.0
"""Time limit of a connection attempt, in seconds."""

CLIENT_IDLE_S = 2.0
"""A client does not reuse a connection that was idle for longer than this, in seconds. Plain uvicorn and vLLM close
idle connections after 5 s, possibly while the client sends a request."""

SERVER_IDLE_S = 75
"""Our servers close a connection that was idle for this many seconds after an answer. Clients close theirs earlier
(httpx after 5 s, aiohttp after 15 s), so no client sends a request on a connection that the server is closing."""

_MOST_DESCRIPTORS = 1 << 16
_SPARE_DESCRIPTORS = 256  # for files, sockets to other processes, and connections that get the answer 503

_SAYS_NOTHING_OF_THE_REQUEST = frozenset({408, 425, 429, 499})
"""4xx statuses after which the same request may succeed. A server that shuts down answers 499: it treats its clients
as disconnected."""
_NOT_IMPLEMENTED = 501
_LONGEST = 500


def address(host: str, port: int) -> str:
    """Return HOST:PORT as a URL has it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def may_pass(status: int) -> bool:
    """Return whether the same request may succeed later: the server has an error (5xx), or is too busy."""
    return status in _SAYS_NOTHING_OF_THE_REQUEST or (status >= 500 and status != _NOT_IMPLEMENTED)


def connection_limit() -> int:
    """Raise the limit of open files (`ulimit -n`) as far as possible, at most to 65,536, and return how many
    connections this process's server takes, for uvicorn's `limit_concurrency`.

    Without a free file descriptor the event loop would close new connections unanswered; uvicorn answers those beyond
    the limit with 503 and logs it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    return descriptors - min(_SPARE_DESCRIPTORS, descriptors // 4)


MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})


def is_msgpack(content_type: str | None) -> bool:
    """Return whether a `Content-Type` is MessagePack, whatever its parameters and case; any other is read as JSON."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES


@dataclass(frozen=True, slots=True)
class Complaint:
    """The content of an error answer; `got`, `wanted` and `fix` are parts of the reason, if the server gives them."""

    reason: str  # the whole message, at most 500 characters
    key: str | None = None  # the request key at fault, if the server names it
    got: str | None = None
    wanted: str = ""
    fix: str = ""


def complaint(body: bytes, content_type: str | None) -> Complaint:
    """Return the content of an error answer: `detail` and `field` of the rollout API, `error` of the inference server.

    For any other answer the reason is its text.
    """
    packed = is_msgpack(content_type)
    try:
        said: Any = msgspec.msgpack.decode(body) if packed else msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    said = said if isinstance(said, dict) else {}
    if isinstance(error := said.get("error"), dict):
        reason, parts = error.get("message", error), {name: error.get(name) or "" for name in ("wanted", "fix")}
        return Complaint(str(reason)[:_LONGEST], error.get("param"), error.get("got"), **parts)
    if "detail" in said:
        return Complaint(str(said["detail"])[:_LONGEST], said.get("field"))
    text = f"{len(body)} bytes of {content_type}" if packed else body.decode(errors="replace")[:_LONGEST]
    return Complaint(text or "no reason given")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None.

    Call it only after the body was read: before that, `request.receive` returns the body's parts.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def replayed(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that yields the message once and then the client's further ones, usually its disconnect."""
    first = [message]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
