"""vLLM's own /v1 completion routes, on the newest version.

A request that names the served model (or none) is answered by the newest version: its `model` is rewritten
on the way in. The answer's `model` and the header `x-policy-version` say which that was.
"""

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_server.errors import ServeError
from vllm_server.http import error_response
from vllm_server.protocol import VERSION_HEADER
from vllm_server.publisher import Publisher

_ROUTED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})


class _Model(msgspec.Struct):
    model: str | None = None


class RouteToNewest:
    """ASGI middleware; holds the version until the whole answer, streamed or not, has gone out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _ROUTED:
            return await self.app(scope, receive, send)
        body = await _read(receive)
        try:
            asked = msgspec.json.decode(body, type=_Model).model
        except msgspec.DecodeError:
            asked = None  # vLLM says what is wrong with it
        app: Starlette = scope["app"]
        publisher: Publisher = app.state.policy_server.publisher
        if not publisher.registry.serves(asked):  # no version of ours: an adapter of vLLM's --lora-modules, or unknown
            return await self.app(scope, _replay(body, receive), send)
        try:
            with publisher.serving(asked) as version:
                body = _with_model(body, version.name)
                header = (VERSION_HEADER.encode(), str(version.version).encode())
                await self.app(_with_length(scope, len(body)), _replay(body, receive), _adding(header, send))
        except ServeError as error:
            await error_response(error)(scope, receive, send)


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_model(body: bytes, model: str) -> bytes:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return body
    return msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(model))})


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever the client really does next (leave, mostly)."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _adding(header: tuple[bytes, bytes], send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), header]}
        await send(message)

    return add
