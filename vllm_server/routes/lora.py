"""`/lora/…`: publish a version, withdraw one, see which are there."""

from starlette.requests import Request
from starlette.responses import Response

from vllm_server.http import json_response, read_body
from vllm_server.protocol import LoraLoadRequest, LoraUnloadRequest
from vllm_server.server import PolicyServer


async def load(request: Request) -> Response:
    """Publish the adapter of a `LoraLoadRequest`; not cut short if the client leaves."""
    asked = await read_body(request, LoraLoadRequest)
    return json_response(await PolicyServer.of(request).publisher.load(asked))


async def unload(request: Request) -> Response:
    """Withdraw the version of a `LoraUnloadRequest`."""
    asked = await read_body(request, LoraUnloadRequest)
    return json_response(await PolicyServer.of(request).publisher.unload(asked))


async def status(request: Request) -> Response:
    """The versions that the engine holds, as `LoraStatus`."""
    return json_response(PolicyServer.of(request).lora_status())
