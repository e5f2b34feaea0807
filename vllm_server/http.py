"""What all routes share: request bodies, answers and refusals."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm_server.compat import engine_dead_error
from vllm_server.errors import ServeError, engine_is_dead

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

NDJSON = "application/x-ndjson"

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding JSON raises. A ValidationError is a DecodeError."""


def json_response(value: Any, status: int = 200) -> Response:
    """Return a struct (or anything that msgspec encodes) as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: ServeError) -> Response:
    """Return the answer to a request that raised the error."""
    return json_response(error.response(), error.status)


async def read_body(request: Request, kind: type[T]) -> T:
    """Return the request's JSON body; an empty one counts as `{}`.

    Raises:
        ServeError: 422, the body is not JSON or not of that kind.
    """
    return parse_body(await request.body(), kind)


def parse_body(body: bytes, kind: type[T]) -> T:
    """See `read_body`."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except UNREADABLE as error:
        raise ServeError(
            422, "body", got=f"a misfit ({error})", wanted="the JSON that docs/server.md describes", fix="correct it"
        ) from error


def passing_on(kind: type[T], method: Callable[[Request], Callable[[T], Awaitable[object]]]) -> Handler:
    """Return a handler that passes the body, a `kind`, on to a method of the server, and answers what that returns."""

    async def handle(request: Request) -> Response:
        return json_response(await method(request)(await read_body(request, kind)))

    return handle


def guarded(handler: Handler) -> Handler:
    """Return `handler` with its refusals answered here: vLLM's app does not accept further exception handlers."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ServeError as error:
            return error_response(error)
        except engine_dead_error():
            return error_response(engine_is_dead())
        except ClientDisconnect:  # in the middle of its body
            return Response(status_code=499)  # the client has disconnected
        except RecursionError:  # from reading or writing deeply nested values of a body
            return error_response(_TOO_DEEP)

    return handle


_TOO_DEEP = ServeError(
    422, "body", got="values nested too deeply", wanted="the JSON that docs/server.md describes", fix="correct it"
)
