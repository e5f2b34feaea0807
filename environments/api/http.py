"""HTTP at the rim: bodies read within bounds, answers gzipped, errors that say what is wrong."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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
TURN_S = 0.005
"""How long one request may work before others have their turn."""
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
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    async for piece in _pieces(request, limit):
                        if size <= LARGE_BODY < size + len(piece):
                            await held.enter_async_context(self._large)
                        size += len(piece)
                        if size > limit:
                            raise _too_large(limit)
                        see(piece)
                        pieces.append(piece)
            except TimeoutError:
                raise ApiError(408, Problem("body", wanted=f"all of it within {BODY_TIMEOUT_S:.0f} s")) from None
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
    inflater = gzip_inflater()
    received = 0
    async for data in stream:
        received += len(data)
        if received > limit:
            raise _too_large(limit)
        while data:
            if inflater.eof:  # gzip allows several members, one after another
                inflater = gzip_inflater()
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
    if len(body) >= GZIP_MINIMUM and accepts_gzip(request):
        body = gzipped(body)
        headers["Content-Encoding"] = "gzip"
    return Response(body, status, headers)


def stream(request: Request, pieces: Iterable[bytes], content_type: str, compress: bool) -> Response:
    """A long answer piece by piece: other requests have their turn between two of them."""
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if compress and accepts_gzip(request):
        headers["Content-Encoding"] = "gzip"
        return StreamingResponse(_joined(pieces, gzip_deflater()), headers=headers)
    return StreamingResponse(_joined(pieces), headers=headers)


async def _joined(pieces: Iterable[bytes], deflater: Any = None) -> AsyncIterator[bytes]:
    """Pieces joined to what a turn of the event loop may take, compressed if there is a deflater."""
    gathered: list[bytes] = []
    size = 0
    began = time.perf_counter()
    for piece in _cut(pieces):
        if deflater is not None:
            piece = deflater.compress(piece)
        gathered.append(piece)
        size += len(piece)
        if size >= _PIECE or time.perf_counter() - began >= TURN_S:
            yield b"".join(gathered)
            await asyncio.sleep(0)
            gathered.clear()
            size = 0
            began = time.perf_counter()
    if deflater is not None:
        gathered.append(deflater.flush())
    yield b"".join(gathered)


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same with no piece longer than `_PIECE`: each is copied several times on its way out."""
    for piece in pieces:
        if len(piece) <= _PIECE:
            yield piece
        else:
            yield from (piece[start : start + _PIECE] for start in range(0, len(piece), _PIECE))


def accepts_gzip(request: Request) -> bool:
    """Whether the client takes gzip (`gzip;q=0` says that it does not)."""
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def gzip_inflater() -> Any:
    """A `zlib.decompressobj` for one gzip member. ISA-L is three to five times as fast as zlib."""
    return isal_zlib.decompressobj(wbits=_GZIP)


def gzip_deflater() -> Any:
    """A `zlib.compressobj` that is quick rather than thorough: numbers in text gain little by more searching."""
    return isal_zlib.compressobj(1, wbits=_GZIP)


def gzipped(body: bytes) -> bytes:
    """`body` as gzip."""
    deflater = gzip_deflater()
    return deflater.compress(body) + deflater.flush()
