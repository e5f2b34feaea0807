"""The ways an adapter reaches the engine: a folder, a request body or a channel. Each is checked here first."""

import asyncio
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from vllm_server.adapters import allowed_path, check_config, check_file, check_folder, check_header
from vllm_server.errors import ServeError
from vllm_server.protocol import ChannelRequest, LoraLoadRequest, Transport
from vllm_server.protocol.flat import decode_header


@dataclass(frozen=True)
class Delivery:
    """One adapter to install.

    Attributes:
        origin: where it comes from, as users see it: a folder, or `memory://…`, `cuda_ipc://…`, `nccl://…`.
        config: its adapter_config.json.
        file: the safetensors file that the engine reads; empty for a channel.
        channel: the open channel that the engine receives from; empty for a file.
    """

    transport: Transport
    origin: str
    config: dict[str, Any]
    file: str = ""
    channel: str = ""

    @property
    def said_by(self) -> str:
        """Return the part of the request that names the adapter; errors refer to it."""
        return {"disk": "adapter_path", "memory": "body"}.get(self.transport, "channel")


class ChannelEngine(Protocol):
    """The engine's methods that channels use."""

    async def open_channel(self, name: str, request: ChannelRequest) -> None: ...
    async def close_channel(self, name: str) -> None: ...


async def from_folder(adapter_path: str, roots: tuple[Path, ...], max_rank: int) -> Delivery:
    """Return the delivery of an adapter in a folder.

    Raises:
        ServeError: 403, 404 or 422; see `adapters`.
    """

    def check() -> Delivery:
        path = allowed_path(adapter_path, roots)
        config, weights = check_folder(path, roots, max_rank=max_rank)
        return Delivery("disk", str(path), config, file=str(weights))

    return await asyncio.to_thread(check)  # a disk may be slow


def from_body(file: str, max_rank: int) -> Delivery:
    """Return the delivery of a safetensors body in the memory file `file`; its metadata holds the configuration.

    Raises:
        ServeError: 422, the body is damaged or not servable.
    """
    config = check_file(Path(file), max_rank=max_rank)
    return Delivery("memory", f"memory://{uuid4().hex[:8]}", config, file=file)


@dataclass
class Channels:
    """The open channel, if there is one. A server has one trainer, so a new channel replaces the previous one."""

    engine: ChannelEngine
    _open: dict[str, ChannelRequest] = field(default_factory=dict)

    async def open(self, request: ChannelRequest, max_rank: int) -> str:
        """Open the channel in the engine; return its name.

        Raises:
            ServeError: 422, the adapter is not servable, or the engine does not support this transport.
        """
        try:
            header = decode_header(b64decode(request.header, validate=True))
        except ValueError as error:
            raise ServeError(
                422, "header", got=error, wanted="the header of a safetensors file in base64", fix="encode it"
            ) from error
        check_config(request.adapter_config, max_rank=max_rank)
        check_header(header, request.adapter_config["r"])
        if request.nbytes != header.nbytes:
            raise ServeError(
                422,
                "nbytes",
                got=request.nbytes,
                wanted=f"{header.nbytes}, as the header says",
                fix="say how many bytes of data one publish has",
            )
        for name in list(self._open):
            await self.close(name)
        name = uuid4().hex[:8]
        await self.engine.open_channel(name, request)
        self._open[name] = request
        return name

    async def close(self, name: str) -> None:
        """Close the channel. A channel that is not open needs no closing."""
        if self._open.pop(name, None) is not None:
            await self.engine.close_channel(name)

    def delivery(self, name: str) -> Delivery:
        """Return the delivery of the adapter in the channel.

        Raises:
            ServeError: 404, the channel is not open.
        """
        request = self._open.get(name)
        if request is None:
            raise ServeError(
                404,
                "channel",
                got=name,
                wanted="an open channel of POST /lora/channel",
                fix="open it again: the server was restarted, or another trainer has opened one",
            )
        kind: Transport = request.__struct_config__.tag  # type: ignore[assignment]  # "cuda_ipc" or "nccl"
        return Delivery(kind, f"{kind}://{name}/{uuid4().hex[:8]}", request.adapter_config, channel=name)


def delivered_by(request: LoraLoadRequest, body: str | None) -> str:
    """Return which way a request uses: "body", "channel" or "folder".

    Raises:
        ServeError: 422, the request names none or several.
    """
    said = [
        way
        for way, value in (("body", body), ("channel", request.channel), ("folder", request.adapter_path))
        if value is not None
    ]
    if len(said) != 1:
        raise ServeError(
            422,
            "adapter_path",
            got=" and ".join(said) or "no adapter",
            wanted="one of adapter_path, channel, or a body of safetensors",
            fix="say where the adapter is",
        )
    return said[0]
