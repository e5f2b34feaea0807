"""What comes before vLLM's own routes: those that generate answer by the newest version, those that change the engine
are refused while a trainer updates this server.

A request that names the served model (or none) gets the newest version: its `model` is rewritten. The answer's `model`
and the header `x-policy-version` name that version.
"""

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_common.disconnects import replayed
from vllm_server.errors import ServeError
from vllm_server.http import error_response, parse_body
from vllm_server.policy import Lease
from vllm_server.protocol import VERSION_END_HEADER, VERSION_HEADER
from vllm_server.server import PolicyServer

_LOWEST_ERROR = 400

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


class _Model(msgspec.Struct):
    model: str | None = None


class BeforeVllm:
    """ASGI middleware around vLLM's application. It holds a version until the whole answer, also a stream, is sent."""

    def __init__(self, app: ASGIApp, server: PolicyServer) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # --root-path
        if scope["type"] == "http" and (refusal := self._refusal(path, scope["method"])) is not None:
            await error_response(refusal)(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and path in GENERATING:
            await self._by_newest(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, path: str, method: str) -> ServeError | None:
        if path == WITHOUT_VERSIONS:
            return ServeError(404, "path", got=path, wanted="a route with versions", fix="use /v1")
        if path == SCALING:
            wanted = "the number of engines that the server was started with"
            return ServeError(409, path[1:], got="another number", wanted=wanted, fix="start another: grpo servers add")
        if path in CHANGING and method == "POST" and self.server.has_trainer:
            got, wanted = "a change of the engine while a trainer updates it", "a server without a trainer"
            return ServeError(409, path[1:], got=got, wanted=wanted, fix="use the routes below /bridge, or end the run")
        return None

    async def _by_newest(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, body = self.server, await _read(receive)
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
