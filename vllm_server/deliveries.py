"""How an adapter comes to the engine: out of a folder, the body of a request, or a channel; checked here first."""

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
    """One adapter on its way.

    Attributes:
        origin: where it comes from, as users see it: a folder, or `memory://…`, `cuda_ipc://…`, `nccl://…`.
        config: its adapter_config.json.
        file: the safetensors file that the engine reads, or
        channel: the open channel that it receives from.
    """

    transport: Transport
    origin: str
    config: dict[str, Any]
    file: str = ""
    channel: str = ""

    @property
    def said_by(self) -> str:
        """The part of the request that named it: what an error is about."""
        return {"disk": "adapter_path", "memory": "body"}.get(self.transport, "channel")


class ChannelEngine(Protocol):
    """What channels need of the engine."""

    async def open_channel(self, name: str, request: ChannelRequest) -> None: ...
    async def close_channel(self, name: str) -> None: ...


async def from_folder(adapter_path: str, roots: tuple[Path, ...], max_rank: int) -> Delivery:
    """Raises ServeError: 403, 404 or 422; see `adapters`."""

    def check() -> Delivery:
        path = allowed_path(adapter_path, roots)
        config, weights = check_folder(path, roots, max_rank=max_rank)
        return Delivery("disk", str(path), config, file=str(weights))

    return await asyncio.to_thread(check)  # a disk may be slow


def from_body(file: str, max_rank: int) -> Delivery:
    """A safetensors body, kept in the memory file at `file`; its configuration is in its metadata.

    Raises:
        ServeError: 422, it is damaged or not servable.
    """
    config = check_file(Path(file), max_rank=max_rank)
    return Delivery("memory", f"memory://{uuid4().hex[:8]}", config, file=file)


@dataclass
class Channels:
    """The open channel, if there is one: a server has one trainer, so a new one takes the place of the last."""

    engine: ChannelEngine
    _open: dict[str, ChannelRequest] = field(default_factory=dict)

    async def open(self, request: ChannelRequest, max_rank: int) -> str:
        """Have the engine map or join it; its name.

        Raises:
            ServeError: 422, the adapter is not servable, or the engine cannot take this transport.
        """
        try:
            header = decode_header(b64decode(request.header, validate=True))
        except ValueError as error:
            raise ServeError(
                422, "header", got=error, wanted="the header of a safetensors file in base64", fix="encode it so"
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
        """Let go of it; one that is not open is closed already."""
        if self._open.pop(name, None) is not None:
            await self.engine.close_channel(name)

    def delivery(self, name: str) -> Delivery:
        """What lies in it.

        Raises:
            ServeError: 404, it is not open.
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
    """Which of the three ways a request says: "body", "channel" or "folder".

    Raises:
        ServeError: 422, none or more than one.
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
