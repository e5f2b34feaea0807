"""Serve vLLM's own routes that generate with the newest version.

A request that names the served model (or none) gets the newest version: the middleware rewrites its `model`. The
answer's `model` and the header `x-policy-version` name that version.
"""

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_common.disconnects import replayed
from vllm_server.errors import ServeError
from vllm_server.http import error_response, parse_body
from vllm_server.policy import Lease
from vllm_server.protocol import VERSION_END_HEADER, VERSION_HEADER
from vllm_server.server import PolicyServer

_LOWEST_ERROR = 400

_ROUTED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"}
    | {"/v1/systemone", "/generative_scoring", "/inference/v1/generate", "/cohere/v2/chat"}
)
_NOT_SERVED = "/invocations"  # SageMaker's: takes its model from a header, and without it answers by the base model


class _Model(msgspec.Struct):
    model: str | None = None


class RouteToNewest:
    """ASGI middleware that holds the version until the whole answer, streamed or not, is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # --root-path
        if scope["type"] == "http" and path == _NOT_SERVED:
            refusal = ServeError(404, "path", got=_NOT_SERVED, wanted="a route with versions", fix="use /v1")
            return await error_response(refusal)(scope, receive, send)
        if scope["type"] != "http" or scope["method"] != "POST" or path not in _ROUTED:
            return await self.app(scope, receive, send)
        body = await _read(receive)
        app: Starlette = scope["app"]
        server: PolicyServer = app.state.policy_server
        try:
            # vLLM reads more than JSON, such as NaN. What is not read here it would answer by the model that it finds.
            fields, asked = parse_body(body, dict[str, msgspec.Raw]), parse_body(body, _Model).model
            if not server.registry.knows(asked):  # an adapter of vLLM's --lora-modules, or unknown
                return await self.app(scope, _replay(body, receive), send)
            async with server.serving(asked) as lease:
                name = msgspec.Raw(msgspec.json.encode(lease.version.name))
                body = msgspec.json.encode(fields | {"model": name})
                answer = _refusing(server, scope, receive, _telling(lease, send))
                await self.app(_with_length(scope, len(body)), _replay(body, receive), answer)
        except ServeError as error:
            await error_response(error)(scope, receive, send)


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _replay(body: bytes, receive: Receive) -> Receive:
    return replayed({"type": "http.request", "body": body, "more_body": False}, receive)


def _telling(lease: Lease, send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            said = {VERSION_HEADER: lease.began_with, VERSION_END_HEADER: lease.ended_with}
            ours = [(name.encode(), str(number).encode()) for name, number in said.items() if number is not None]
            message = {**message, "headers": [*message.get("headers", []), *ours]}
        await send(message)

    return add


def _refusing(server: PolicyServer, scope: Scope, receive: Receive, send: Send) -> Send:
    """Return a `send` that replaces vLLM's error by our refusal if the engine has failed or the weights are torn."""
    refused = False

    async def answer(message: Message) -> None:
        nonlocal refused
        if refused:
            return
        if message["type"] == "http.response.start" and message["status"] >= _LOWEST_ERROR:
            try:
                await server.check_engine()
                server.fence.check_healthy()
            except ServeError as error:
                refused = True
                await error_response(error)(scope, receive, send)
                return
        await send(message)

    return answer
