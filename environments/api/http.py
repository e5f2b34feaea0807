"""HTTP bodies: those of requests are read within bounds, those of answers are encoded and gzipped.

gzip is ISA-L's: a JSON group takes 0.3 ms to compress, and 1.8 ms by zlib's fastest level, which Starlette's middleware
would use.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from isal import isal_zlib
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from environments.api import wire
from environments.api.records import ApiError
from grpo_common.errors import Problem

GZIP_MINIMUM = 1000
"""Answers of this many bytes or more are gzipped for clients that accept it."""
JSON_SHARE = 4
"""A body of JSON may have this part of what one of MessagePack may. No other request is answered while one group of a
body is decoded: a millisecond for 100 kB of JSON, and for 10 MB of MessagePack."""
LARGE_BODY = 1 << 20
LARGE_BODIES_AT_ONCE = 4
BODY_TIMEOUT_S = 60.0
"""A body of up to `LARGE_BODY` bytes must arrive within this time, and so must the beginning of a larger one."""
LARGE_BODY_GRACE_S = 10.0
LEAST_RATE = 256 << 10
"""Bytes a second that must arrive of a larger body, apart from the seconds of grace: it takes the place of others."""
TURN_S = 0.005
"""How long one request may work before others have their turn."""
_IN_TIME = f"1 MiB within {BODY_TIMEOUT_S:.0f} s, and then {LEAST_RATE >> 10} KiB a second"
_PIECE = 256 << 10
_ENCODING = "Content-Encoding"
_GZIP = 31  # zlib's way to say: gzip, with its header and trailer
GZIP_ERROR: Any = isal_zlib.error


class BodyReader:
    """Reads request bodies: of MessagePack no larger than `limit`, compressed or not, and few large ones at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._large = asyncio.Semaphore(LARGE_BODIES_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, request: Request, see: Callable[[bytes], None] = lambda piece: None) -> AsyncIterator[bytes]:
        """The decompressed body, for as long as it is held.

        Args:
            see: gets each piece as it arrives; raises to refuse the rest.

        Raises:
            ApiError: too large (413), not gzip or cut short (400), another encoding (415), too slow (408).
        """
        limit = self.limit if wire.is_msgpack(request.headers.get("content-type")) else self.limit // JSON_SHARE
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
                            clock.reschedule(asyncio.get_running_loop().time() + LARGE_BODY_GRACE_S)
                        size += len(piece)
                        if size > limit:
                            raise _too_large(limit)
                        if size > LARGE_BODY:
                            clock.reschedule((clock.when() or 0.0) + len(piece) / LEAST_RATE)
                        see(piece)
                        pieces.append(piece)
            except TimeoutError:
                raise ApiError(408, Problem("body", "a body that arrives too slowly", _IN_TIME)) from None
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
            except GZIP_ERROR as error:
                raise ApiError(400, Problem("body", str(error), "gzip"), _ENCODING) from None
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if piece:
                yield piece
                if data:
                    await asyncio.sleep(0)  # a bomb inflates for long: let others have their turn
    if received and not inflater.eof:
        raise ApiError(400, Problem("body", "a part of a gzip file", "all of it"), _ENCODING)


def _too_large(limit: int) -> ApiError:
    fix = f"send less, send MessagePack (which may be {JSON_SHARE} times as long as JSON), or raise --max-body-mb"
    return ApiError(413, Problem("body", wanted=f"{limit / (1 << 20):g} MiB or less", fix=fix))


def respond(request: Request, message: object, status: int = 200) -> Response:
    """A message of the wire in the form that the client asks for, gzipped where that is worth it."""
    content_type = wire.MSGPACK if wire.prefers_msgpack(request.headers.get("accept")) else wire.JSON
    return respond_bytes(request, wire.encode(message, content_type), content_type, status)


def respond_bytes(request: Request, body: bytes, content_type: str, status: int = 200) -> Response:
    """Bytes as an answer, gzipped from `GZIP_MINIMUM` on."""
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if len(body) >= GZIP_MINIMUM and _accepts_gzip(request):
        deflater = isal_zlib.compressobj(1, wbits=_GZIP)
        body = deflater.compress(body) + deflater.flush()
        headers[_ENCODING] = "gzip"
    return Response(body, status, headers)


def stream(request: Request, pieces: Iterable[bytes], content_type: str, compress: bool) -> Response:
    """A long answer piece by piece: other requests have their turn between two of them."""
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if compress and _accepts_gzip(request):
        headers[_ENCODING] = "gzip"
        return StreamingResponse(_in_turns(pieces, isal_zlib.compressobj(1, wbits=_GZIP)), headers=headers)
    return StreamingResponse(_in_turns(pieces), headers=headers)


async def _in_turns(pieces: Iterable[bytes], deflater: Any = None) -> AsyncIterator[bytes]:
    """The pieces in portions that take about `TURN_S`, compressed if there is a deflater."""
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
    """Whether the client takes gzip (`gzip;q=0` says that it does not)."""
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
