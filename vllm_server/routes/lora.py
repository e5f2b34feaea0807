"""`/lora/…`: publish a version, withdraw a version, list versions."""

import logging

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm_server.errors import ServeError
from vllm_server.http import json_response, passing_on, read_body
from vllm_server.protocol import (
    SAFETENSORS_MEDIA_TYPE,
    ChannelCloseRequest,
    ChannelRequest,
    LoraLoadRequest,
    LoraUnloadRequest,
)
from vllm_server.server import PolicyServer

logger = logging.getLogger("vllm.grpo.publisher")  # below "vllm": vLLM's handler and format


async def load(request: Request) -> Response:
    """Publish the adapter of a `LoraLoadRequest`, or the one in the body, even if the client disconnects meanwhile."""
    publisher = PolicyServer.of(request).publisher
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != SAFETENSORS_MEDIA_TYPE:
        return json_response(await publisher.load(await _from_json(request, kind)))
    length = request.headers.get("content-length", "")
    try:
        async with publisher.bodies.holding(request.stream(), int(length) if length.isdecimal() else None) as file:
            return json_response(await publisher.load(_from_query(request), file))
    except ClientDisconnect:
        logger.warning("An adapter broke off on its way here: nothing of it is published")
        raise


async def _from_json(request: Request, kind: str) -> LoraLoadRequest:
    """Return the request in a JSON body, whatever its content type.

    A body that is neither JSON nor declared as JSON may be an adapter with a wrong content type, so the error names
    both types.
    """
    try:
        return await read_body(request, LoraLoadRequest)
    except ServeError as error:
        if kind in ("", "application/json"):
            raise
        raise ServeError(
            422, "content-type", got=f"{kind} ({error.got})", wanted=f"application/json or {SAFETENSORS_MEDIA_TYPE}",
            fix="set the content type to that of the body",
        ) from error  # fmt: skip


def _from_query(request: Request) -> LoraLoadRequest:
    try:
        return msgspec.convert(dict(request.query_params), LoraLoadRequest, strict=False)
    except msgspec.ValidationError as error:
        raise ServeError(
            422, "query", got=error, wanted="adapter_name, version and activate", fix="correct it"
        ) from error


# These do what the messages' docstrings say.
open_channel = passing_on(
    ChannelRequest,  # pyright: ignore[reportArgumentType]  # a union
    lambda request: PolicyServer.of(request).publisher.open_channel,
)
close_channel = passing_on(ChannelCloseRequest, lambda request: PolicyServer.of(request).publisher.close_channel)
unload = passing_on(LoraUnloadRequest, lambda request: PolicyServer.of(request).publisher.unload)


async def status(request: Request) -> Response:
    """Return the versions that the engine holds, as `LoraStatus`."""
    return json_response(PolicyServer.of(request).lora_status())
