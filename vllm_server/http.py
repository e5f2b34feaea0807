"""What all routes share: how a handler is registered, request bodies, answers and refusals."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_server.errors import ServeError, engine_is_dead
from vllm_server.seams import engine_dead_error
from vllm_server.server import PolicyServer

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]

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


ROUTES: list[Route] = []
"""This server's routes, in the order in which `route` was called."""


def route(method: str, path: str) -> Callable[[Handler], Handler]:
    """Make a function the handler of a route.

    The annotations of its parameters say what it gets: the `PolicyServer`, the `Request`, or the request's JSON body as
    any other type. Its result is the answer: a Response, nothing (an empty 200), or what is encoded as JSON. It refuses
    a request by raising a ServeError.
    """

    def register(handler: Handler) -> Handler:
        ROUTES.append(Route(path, endpoint(handler), methods=[method], name=handler.__name__))
        return handler

    return register


def endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler, see `route`, as Starlette takes it."""
    kinds = [kind for name, kind in get_type_hints(handler).items() if name != "return"]

    async def argument(request: Request, kind: Any) -> Any:
        if kind is PolicyServer:
            return request.app.state.policy_server
        return request if kind is Request else await read_body(request, kind)

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            result = await handler(*[await argument(request, kind) for kind in kinds])
            if isinstance(result, Response):
                return result
            return Response() if result is None else json_response(result)
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
