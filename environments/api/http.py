"""HTTP around the service: routes, bodies of requests within bounds, answers in turns, and requests that wait.

gzip is ISA-L's: a JSON group takes 0.3 ms to compress, and 1.8 ms by zlib's fastest level, which Starlette's middleware
would use.
"""

import asyncio
import contextlib
import inspect
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, get_type_hints

import msgspec
from isal import isal_zlib
from msgspec import Struct
from msgspec.structs import asdict
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from environments.api import wire
from environments.api.errors import ApiError
from environments.api.groups import ENCODED_ROWS, REFUSED, UnreadGroup, refusal
from grpo_common.errors import Problem
from grpo_common.http import is_msgpack, unless_disconnected

GZIP_MINIMUM = 1000
"""Answers of this many bytes or more are gzipped for clients that accept it."""
JSON_SHARE = 4
"""A body of JSON may have this part of what one of MessagePack may. No other request is answered while one group of a
body is decoded: a millisecond for 100 kB of JSON, and for 10 MB of MessagePack."""
LARGE_BODY = 1 << 20
"""Bytes; a message that is no group may have as many."""
LARGE_BODIES_AT_ONCE = 4
BODY_TIMEOUT_S = 60.0
"""Time in which a body must arrive; of a large one the first part, and once it has a place the rest."""
TURN_S = 0.005
"""How long one request may work before others have their turn."""
_PIECE = 256 << 10
_ENCODING = "Content-Encoding"
_GZIP = 31  # zlib's way to say: gzip, with its header and trailer
_GZIP_ERROR: Any = isal_zlib.error

Call = TypeVar("Call", bound=Callable[..., object])
T = TypeVar("T")

ROUTES: list[Route] = []


def endpoint(
    method: str, path: str, *, fields: type[Struct] | None = None, changes: bool = False
) -> Callable[[Call], Call]:
    """Make a function of the service a route. Its answer is encoded, unless it is a response.

    Its arguments are the path's parameters; `http`, the request; `body`, the message that is its type; the fields of a
    body of type `fields`, which may be empty; and the query's fields, as they are annotated. For a GET that `changes`
    state, HEAD, which shows no answer, is refused.
    """

    def enter(call: Call) -> Call:
        hints = get_type_hints(call, include_extras=True)
        other = {*re.findall(r"{(\w+)}", path), "http", "body", *(fields.__struct_fields__ if fields else ())}
        arguments = list(inspect.signature(call).parameters.values())[1:]  # the first is the service
        query = msgspec.defstruct(
            "Query",
            [
                (each.name, hints[each.name], msgspec.NODEFAULT if each.default is each.empty else each.default)
                for each in arguments
                if each.name not in other
            ],
        )

        async def answer(http: Request) -> Response:
            given: dict[str, object] = dict(http.path_params)
            if query.__struct_fields__:
                given |= asdict(_decoded_query(http, query))
            if fields is not None:
                given |= asdict(await read_message(http, fields, optional=True))
            if "body" in hints:
                given["body"] = await read_message(http, hints["body"])
            if "http" in hints:
                given["http"] = http
            made = call(http.app.state.service, **given)
            made = await made if inspect.isawaitable(made) else made
            return made if isinstance(made, Response) else respond(http, made)

        ROUTES.append(Route(path, answer, methods=[method]))
        if changes:
            (ROUTES[-1].methods or set()).discard("HEAD")
        return call

    return enter


async def read_message(request: Request, message_type: type[T], *, optional: bool = False) -> T:
    """Return a request's body as a message of the wire. Raises ApiError (400, 422 naming the field)."""
    content_type = request.headers.get("content-type")
    async with request.app.state.bodies.read(request, LARGE_BODY) as body:
        try:
            if optional and not body:
                return msgspec.convert({}, message_type)
            return wire.decode(body, message_type, content_type or wire.JSON)
        except REFUSED as error:
            raise refusal(error, content_type) from None


def _decoded_query(request: Request, query_type: type[Struct]) -> Struct:
    for name in query_type.__struct_fields__:
        if (
            value := request.query_params.get(name, "")
        ).lower() == "null":  # the decoder would read it as an absent field: a lease that nobody asked for
            raise ApiError(422, Problem(name, value, "a value", "leave the field out"), name)
    try:
        return msgspec.convert(dict(request.query_params), query_type, strict=False)
    except REFUSED as error:
        raise refusal(error, None) from None


class BodyReader:
    """Reads request bodies: of MessagePack no larger than `limit`, compressed or not, and few large ones at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._large = asyncio.Semaphore(LARGE_BODIES_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, request: Request, most: int | None = None) -> AsyncIterator[bytes]:
        """Yield the decompressed body, of `most` bytes if they are given, for as long as it is held.

        Raise ApiError if it is too large (413), no gzip or cut short (400), of another encoding (415), too slow (408).
        """
        limit = self.limit if wire.is_msgpack(request.headers.get("content-type")) else self.limit // JSON_SHARE
        limit = min(limit, most or limit)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise _too_large(limit)
        async with contextlib.AsyncExitStack() as held:
            pieces: list[bytes] = []
            size = 0
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S) as clock:
                    async for piece in _pieces(request, limit):
                        if size <= LARGE_BODY < size + len(piece):
                            clock.reschedule(None)  # the client does not answer for the wait for a place
                            await held.enter_async_context(self._large)
                            clock.reschedule(asyncio.get_running_loop().time() + BODY_TIMEOUT_S)
                        size += len(piece)
                        if size > limit:
                            raise _too_large(limit)
                        pieces.append(piece)
            except TimeoutError:
                wanted = f"all of it within {BODY_TIMEOUT_S:.0f} s"
                raise ApiError(408, Problem("body", "a body that arrives too slowly", wanted)) from None
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            yield body


def _pieces(request: Request, limit: int) -> AsyncIterator[bytes]:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return request.stream()
    if encoding in ("gzip", "x-gzip"):
        return _inflate(request.stream(), limit)
    raise ApiError(415, Problem(_ENCODING, repr(encoding), "gzip or none"), _ENCODING)


async def _inflate(stream: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    inflater = isal_zlib.decompressobj(wbits=_GZIP)
    received = 0
    async for data in stream:
        received += len(data)
        if received > limit:
            raise _too_large(limit)
        while data:
            if inflater.eof:  # gzip allows several members, one after another
                inflater = isal_zlib.decompressobj(wbits=_GZIP)
            try:
                piece = inflater.decompress(data, _PIECE)
            except _GZIP_ERROR as error:
                raise ApiError(400, Problem("body", str(error), "gzip"), _ENCODING) from None
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if piece:
                yield piece
                if data:
                    await asyncio.sleep(0)  # a bomb inflates for long: let others have their turn
    if received and not inflater.eof:
        raise ApiError(400, Problem("body", "a part of a gzip file", "all of it"), _ENCODING)


def _too_large(limit: int) -> ApiError:
    fix = f"send less, send groups in MessagePack (which may be {JSON_SHARE} times as long), or raise --max-body-mb"
    return ApiError(413, Problem("body", wanted=f"{limit / (1 << 20):g} MiB or less", fix=fix))


# Answers


def respond(request: Request, message: object, status: int = 200) -> Response:
    """Return a message of the wire in the form that the client asks for, gzipped from `GZIP_MINIMUM` on."""
    content_type = wire.MSGPACK if prefers_msgpack(request.headers.get("accept")) else wire.JSON
    body = wire.encode(message, content_type)
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if len(body) >= GZIP_MINIMUM and _accepts_gzip(request):
        deflater = isal_zlib.compressobj(1, wbits=_GZIP)
        body = deflater.compress(body) + deflater.flush()
        headers[_ENCODING] = "gzip"
    return Response(body, status, headers)


def stream(request: Request, pieces: Iterable[bytes], content_type: str) -> Response:
    """Return a long answer piece by piece: other requests have their turn between two of them. JSON is gzipped."""
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    deflater = None
    if content_type == wire.JSON and _accepts_gzip(request):
        headers[_ENCODING] = "gzip"
        deflater = isal_zlib.compressobj(1, wbits=_GZIP)
    return StreamingResponse(_in_turns(pieces, deflater), headers=headers)


async def _in_turns(pieces: Iterable[bytes], deflater: Any) -> AsyncIterator[bytes]:
    """Yield the pieces in portions that take about `TURN_S`, compressed if there is a deflater."""
    gathered: list[bytes] = []
    size, began = 0, time.perf_counter()
    for piece in pieces:
        for start in range(0, len(piece), _PIECE):  # longer ones would be copied several times on their way out
            part = piece[start : start + _PIECE]
            gathered.append(deflater.compress(part) if deflater else part)
            size += len(gathered[-1])
            if size >= _PIECE or time.perf_counter() - began >= TURN_S:
                yield b"".join(gathered)
                await asyncio.sleep(0)
                gathered.clear()
                size, began = 0, time.perf_counter()
    yield b"".join([*gathered, deflater.flush() if deflater else b""])


def _accepts_gzip(request: Request) -> bool:
    """Return whether the client takes gzip (`gzip;q=0` says that it does not)."""
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", parameters)
    return False


def prefers_msgpack(accept: str | None) -> bool:
    """Return whether an `Accept` header names MessagePack, and not JSON before it."""
    named = [part.partition(";")[0].strip() for part in (accept or "").lower().split(",")]
    return next((is_msgpack(each) for each in named if each == wire.JSON or is_msgpack(each)), False)


def packed_batch(payloads: Sequence[bytes], fields: dict[str, object]) -> Iterator[bytes]:
    """Yield `wire.PackedBatch`, a piece per group as it is kept; `fields` are the others of the message."""
    yield msgspec.msgpack.encode({**fields, "batch": []})[:-1] + b"\xdd" + len(payloads).to_bytes(4, "big")
    yield from payloads


def json_batch(payloads: Sequence[bytes], fields: dict[str, object]) -> Iterator[bytes]:
    """Yield `wire.Batch`, a piece per group."""
    yield msgspec.json.encode({**fields, "batch": []})[:-2]
    for i, payload in enumerate(payloads):
        yield b"," * (i > 0)
        yield from json_group(payload)
    yield b"]}"


def json_group(payload: bytes) -> Iterator[bytes]:
    """Yield a group in JSON with the original's 14 keys, and ours where the environment sent them.

    A piece has one sequence's numbers or messages: all of a group of 45 MiB take 2.5 s.
    """
    group = msgspec.msgpack.decode(payload, type=UnreadGroup)
    head = b"{"
    for name in wire.ScoredData.__struct_fields__:
        value = getattr(group, name)
        if value is None and name in ("policy_versions", "routed_experts"):
            continue
        head += b'"%s":' % name.encode()
        if value is None or name not in (*wire.PER_TOKEN, *ENCODED_ROWS):
            yield head + msgspec.json.encode(value)
        else:
            head += b"["
            kind = wire.PER_TOKEN.get(name)
            for row in wire.rows(value, kind, group.lengths) if kind else map(msgspec.msgpack.decode, value):
                yield head + msgspec.json.encode(row)
                head = b","
            yield b"]"
        head = b","
    yield b"}"


# Waiting


class Waiters:
    """Requests that wait for a change. Call it from one event loop; nothing runs while they wait."""

    def __init__(self) -> None:
        self._change = 0
        self._changed = asyncio.Event()
        self.ended = False

    def tell(self, change: int) -> None:
        """Have all of them look again, if `change` is another number than last time."""
        if change != self._change:
            self._change = change
            self._wake()

    def end(self) -> None:
        """Let nobody wait any more: the server ends."""
        self.ended = True
        self._wake()

    async def until(self, request: Request, ready: Callable[[], bool], seconds: float) -> None:
        """Return once `ready` says so, when `seconds` are over, or when the server ends; raise ClientDisconnect."""

        async def waited() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not self.ended and not ready():
                        await self._changed.wait()
            return True

        if await unless_disconnected(request, waited()) is None:
            raise ClientDisconnect

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # for who waits after this change
