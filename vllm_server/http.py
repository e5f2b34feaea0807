"""HTTP in front of the engine: how a handler is registered, and what comes before vLLM's own routes.

vLLM's routes that generate answer by the newest version; those that change the engine are refused while a trainer
updates this server. A request that names the served model (or none) gets the newest version: its `model` is rewritten.
The answer's `model` and the header `x-policy-version` name that version.
"""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_common.http import replayed
from vllm_server.errors import ServeError, engine_is_dead
from vllm_server.policy import Lease
from vllm_server.protocol import VERSION_END_HEADER, VERSION_HEADER, parse_version
from vllm_server.seams import engine_dead_error
from vllm_server.server import PolicyServer

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]

NDJSON = "application/x-ndjson"

ROUTES: list[Route] = []
"""This server's routes, in the order in which `route` was called."""


def json_response(value: Any, status: int = 200) -> Response:
    """Return a struct (or anything that msgspec encodes) as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: ServeError) -> Response:
    return json_response(error.response(), error.status)


def parse_body(body: bytes, kind: type[T]) -> T:
    """Return a JSON body; an empty one counts as `{}`. Raise a ServeError, 422, if it is not JSON of that kind."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _misfit(f"a misfit ({error})") from error


def _misfit(got: str) -> ServeError:
    return ServeError(422, "body", got, "the JSON that docs/server.md describes", "correct it")


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
        return request if kind is Request else parse_body(await request.body(), kind)

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
            return Response(status_code=499)
        except RecursionError:  # from reading or writing deeply nested values of a body
            return error_response(_misfit("values nested too deeply"))

    return handle


# ----------------------------------------------------------------------------------------------------------------------
# Before vLLM's own routes.


GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"}
    | {"/v1/systemone", "/generative_scoring", "/inference/v1/generate", "/cohere/v2/chat"}
)
WITHOUT_VERSIONS = "/invocations"
"""SageMaker's: takes its model from a header, and without it answers by the base model."""

SCALING = "/scale_elastic_ep"
"""The engines that it would start would not have the trained weights; by itself vLLM's answers 500."""
CHANGING = frozenset(
    {"/pause", "/resume", "/sleep", "/wake_up", "/release_kv_cache_memory", "/reset_encoder_cache"}
    | {"/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/update_weight_version", "/weight_checker"}
    | {"/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"}
    | {"/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/fault_tolerance/apply"}
)
"""vLLM's routes, most of them of its development mode, that change the engine under a trainer."""

ADAPTERS = {"/v1/load_lora_adapter": "lora_name", "/v1/unload_lora_adapter": "lora_name", "/adapters": "name"}
"""vLLM's own routes for adapters, and the key of the name. With a version's name they would write other weights
into its slot, or take the name away. `DELETE /adapters/NAME` has it in the path."""


class _Model(msgspec.Struct):
    model: str | None = None


class BeforeVllm:
    """ASGI middleware around vLLM's application. It holds a version until the whole answer, also a stream, is sent."""

    def __init__(self, app: ASGIApp, server: PolicyServer) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # --root-path
        method = scope["method"] if scope["type"] == "http" else ""
        try:
            self._check(path, method)
            if method == "POST" and path in GENERATING:
                await self._by_newest(scope, receive, send)
                return
            if method == "POST" and path in ADAPTERS:
                body = await _read(receive)
                self._check_name(parse_body(body, dict[str, Any]).get(ADAPTERS[path]))
                receive = _replay(body, receive)
        except ServeError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, path: str, method: str) -> None:
        if not method:  # a websocket, or the application's start and end
            return
        if path == WITHOUT_VERSIONS:
            raise ServeError(404, "path", path, "a route with versions", "use /v1")
        if path == SCALING:
            wanted = "the number of engines that the server was started with"
            raise ServeError(409, path[1:], "another number", wanted, "start another: grpo servers add")
        if path.startswith("/adapters/"):
            self._check_name(path.removeprefix("/adapters/"))
        if path in CHANGING and method == "POST" and self.server.has_trainer:
            got, fix = "a change of the engine while a trainer updates it", "use routes below /bridge, or end the run"
            raise ServeError(409, path[1:], got, "a server without a trainer", fix)

    def _check_name(self, name: object) -> None:
        """Refuse the name of a version for one of vLLM's own adapters."""
        registry = self.server.registry
        if isinstance(name, str) and (registry.knows(name) or parse_version(name, registry.lora_name) is not None):
            raise ServeError(409, "adapter_name", name, "a name that no version has", "use the routes below /lora")

    async def _by_newest(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        # vLLM reads more than JSON, such as NaN. What is not read here it would answer by the model that it finds.
        fields, asked = parse_body(body, dict[str, msgspec.Raw]), parse_body(body, _Model).model
        if not self.server.registry.knows(asked):  # an adapter of vLLM's --lora-modules, or unknown
            await self.app(scope, _replay(body, receive), send)
            return
        async with self.server.serving(asked) as lease:
            name = msgspec.Raw(msgspec.json.encode(lease.version.name))
            body = msgspec.json.encode(fields | {"model": name})
            others = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
            scope = {**scope, "headers": [*others, (b"content-length", str(len(body)).encode())]}
            await self.app(scope, _replay(body, receive), self._answer(scope, receive, send, lease))

    def _answer(self, scope: Scope, receive: Receive, send: Send, lease: Lease) -> Send:
        """Return a `send` that adds the version's headers.

        It replaces vLLM's error by our refusal if the engine has failed or the weights are torn.
        """
        refused = False

        async def answer(message: Message) -> None:
            nonlocal refused
            if refused:
                return
            if message["type"] == "http.response.start" and message["status"] >= 400:
                try:
                    await self.server.check_engine()
                    self.server.fence.check_healthy()
                except ServeError as error:
                    refused = True
                    await error_response(error)(scope, receive, with_version)
                    return
            await with_version(message)

        async def with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                versions = {VERSION_HEADER: lease.began_with, VERSION_END_HEADER: lease.ended_with}
                ours = [(name.encode(), b"%d" % number) for name, number in versions.items() if number is not None]
                message = {**message, "headers": [*message.get("headers", []), *ours]}
            await send(message)

        return answer


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    return replayed({"type": "http.request", "body": body, "more_body": False}, receive)
