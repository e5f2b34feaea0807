"""Publish a version: check the adapter, load it into the engine, route requests to it, remove old versions.

Publishes run one at a time. Generation continues meanwhile: an in-flight request finishes on the version that it began
with, and requests that arrive after the load get the new one.
"""

import asyncio
import importlib
import logging
import mmap
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from grpo_common.trace import stage
from vllm_server import seams
from vllm_server.adapters import WEIGHTS_FILE, check_file, check_folder, understood
from vllm_server.channels import Channels, require_lora
from vllm_server.errors import ServeError
from vllm_server.policy import PolicyRegistry, Version
from vllm_server.protocol import LoraLoadRequest, LoraLoadResponse, LoraUnloadRequest, LoraUnloadResponse
from vllm_server.protocol.channels import Transport, WeightTransport
from vllm_server.seams import Engine

# ----------------------------------------------------------------------------------------------------------------------
# Keep request bodies in memory files, which the engine's processes read without another copy.


class MemoryFile:
    """A file without a name and not on disk; other processes of the same user open it by `path`."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("adapter")
        os.ftruncate(self._descriptor, 1 << 20)
        self.memory = mmap.mmap(self._descriptor, 1 << 20)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the file; processes that have it open can still read it."""
        self.memory.close()
        os.close(self._descriptor)


@dataclass
class Bodies:
    """Files for bodies. The last file is reused: allocating new pages costs more than copying the body into them."""

    _idle: list[MemoryFile] = field(default_factory=list)

    @asynccontextmanager
    async def holding(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
        """Yield the path of a file that has exactly these bytes while the block runs.

        Raise a ServeError, 422, if there are none.
        """
        file = self._idle.pop() if self._idle else MemoryFile()
        try:
            end = 0
            async for piece in pieces:
                start, end = end, end + len(piece)
                if end > len(file.memory):
                    file.memory.resize(max(end, 2 * len(file.memory)))
                file.memory[start:end] = piece
            if not end:
                raise ServeError(422, WEIGHTS_FILE, "0 bytes", "a whole safetensors file", "send it")
            if end < len(file.memory):
                file.memory.resize(end)  # drop the rest of an earlier, longer body
            yield file.path
        finally:
            if self._idle:
                file.close()
            else:
                self._idle.append(file)


# ----------------------------------------------------------------------------------------------------------------------
# The ways an adapter reaches the engine: a folder, a request body or a channel. Each is checked here first.


@dataclass(frozen=True)
class Delivery:
    """One adapter to install."""

    transport: Transport | WeightTransport  # the value of `--lora-transport`
    origin: str  # as users see it: a folder, or `memory://…`, `cuda_ipc://…`, `nccl://…`
    config: dict[str, Any]  # its adapter_config.json
    file: str = ""  # the safetensors file that the engine reads; empty for a channel
    channel: str = ""  # the open channel that the engine receives from; empty for a file

    @property
    def said_by(self) -> str:
        """The part of the request that names the adapter; errors refer to it."""
        return {"disk": "adapter_path", "memory": "body"}.get(self.transport, "channel")


async def delivered(
    request: LoraLoadRequest, body: str | None, channels: Channels, roots: tuple[Path, ...]
) -> Delivery:
    """Return how an adapter is delivered, after a check of what can be seen of it.

    `body` is the memory file that has the request's body of safetensors; its metadata holds the configuration.

    Raises:
        ServeError: 422, the request names no way or several, or the adapter is damaged or not servable; 404, the
            channel is not open; 403, 404 or 422 for a folder, see `adapters`.
    """
    ways = {"body": body, "channel": request.channel, "folder": request.adapter_path}
    said = [way for way, value in ways.items() if value is not None]
    if len(said) != 1:
        wanted = "one of adapter_path, channel, or a body of safetensors"
        got = " and ".join(said) or "no adapter"
        raise ServeError(422, "adapter_path", got, wanted, "say where the adapter is")
    max_rank, unique = require_lora(channels.max_rank), uuid4().hex[:8]
    if body is not None:
        return Delivery("memory", f"memory://{unique}", check_file(Path(body), max_rank=max_rank), file=body)
    if (name := request.channel) is not None:
        opened = channels.request(name, adapters=True)
        kind, config = opened.transport, opened.adapter_config or {}
        return Delivery(kind, f"{kind}://{name}/{unique}", config, channel=name)
    check = partial(check_folder, request.adapter_path or "", roots, max_rank=max_rank)
    path, config, weights = await asyncio.to_thread(check)  # a disk may be slow
    return Delivery("disk", str(path), config, file=str(weights))


logger = logging.getLogger("vllm.grpo.publisher")  # below "vllm": vLLM's handler and format

ROOM_TIMEOUT_S = 90.0  # shorter than the trainer's time-out, so that the trainer gets the reason


@dataclass(frozen=True)
class Installed:
    """The engine's report of an installed adapter: see `LoraLoadResponse`."""

    slot: int
    replayed: bool
    stall_seconds: float


@dataclass(frozen=True)
class Adapters:
    """The engine's adapters, and the table in which vLLM's /v1 routes find them by name.

    `models` is vLLM's OpenAIServingModels. Ids come from its counter, so adapters loaded by vLLM's own `--lora-modules`
    or load route never share an id with ours.
    """

    engine: Engine
    models: Any

    def __post_init__(self) -> None:
        for name in ("lora_requests", "lora_id_counter"):
            if not hasattr(self.models, name):
                raise seams.moved(f"OpenAIServingModels.{name}")

    def next_id(self) -> int:
        """Return an adapter id that this process has never used."""
        return self.models.lora_id_counter.inc(1)

    async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
        """Write the adapter into a slot of every worker, then register it for /v1.

        Raises:
            ServeError: 422, the adapter is not finite.
            Exception: any error of the engine. The adapter may be installed or not; `remove` it.
        """
        config = msgspec.json.encode(delivery.config).decode()
        where = {"file": delivery.file, "channel": delivery.channel}
        answers = await seams.call_workers(self.engine, "grpo_install_adapter", args=(adapter_id, config), kwargs=where)
        for answer in answers:
            if "field" in answer:
                wanted = "an adapter that is finite in the dtype in which it is served, multiplied by its scale as well"
                fix = "publish one of an earlier step; train with a lower learning rate or lora_alpha"
                raise ServeError(422, answer["field"], answer["refused"], wanted, fix)
            if "refused" in answer:
                raise RuntimeError(answer["refused"])
        # With pipeline parallelism a worker has only some layers. A module is unserved if no worker has a place for it.
        unserved = set.intersection(*(set(answer["unserved"]) for answer in answers))
        if unserved:
            raise RuntimeError(f"no place in this model for {', '.join(sorted(unserved)[:5])} ({len(unserved)} in all)")
        self.models.lora_requests[name] = self.request(name, adapter_id, delivery.origin)
        return Installed(
            slot=answers[0]["slot"],
            replayed=all(answer["replayed"] for answer in answers),
            stall_seconds=max(answer["seconds"] for answer in answers),
        )

    async def remove(self, name: str, adapter_id: int) -> None:
        """Free the adapter's slot and its place in the engine's cache. No in-flight request may use it."""
        self.models.lora_requests.pop(name, None)
        await self.engine.remove_lora(adapter_id)
        # vLLM's metric of running and waiting adapters keeps a series for each set of names there ever was.
        registry = importlib.import_module("prometheus_client").REGISTRY
        if (gauge := registry._names_to_collectors.get("vllm:lora_requests_info")) is not None:
            gauge.clear()

    def request(self, name: str, adapter_id: int, path: str) -> Any:
        """Return the `LoRARequest` of a request that this adapter answers."""
        kind = seams.require("vllm.lora.request", "LoRARequest")
        return kind(lora_name=name, lora_int_id=adapter_id, lora_path=path)


@dataclass
class Publisher:
    """Keeps the registry and the engine consistent."""

    registry: PolicyRegistry
    engine: Adapters
    channels: Channels
    roots: tuple[Path, ...]  # folders in which adapters may be
    room_timeout_s: float = ROOM_TIMEOUT_S
    fault: str | None = None
    """Why the state of the engine's adapters is unknown; None if it is known. A successful publish clears it."""
    last_update_time: float = 0.0
    bodies: Bodies = field(default_factory=Bodies)
    _answered: tuple[str | None, LoraLoadResponse | None] = (None, None)  # the last publish with a request id
    _request_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _sweeps: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def serving(self, model: str | None = None, policy_version: int | None = None) -> Iterator[Version]:
        """Yield the version that answers a request; the engine holds it while the block runs.

        Raise a ServeError: 404 no such version, 503 a publish failed half-way.
        """
        self.check_healthy()
        version = self.registry.resolve(model, policy_version)
        self.registry.begin(version)
        try:
            yield version
        finally:
            if self.registry.end(version):
                self._sweep_later()
            self._request_ended.set()

    def check_healthy(self) -> None:
        """Raise a ServeError, 503, after a publish failed half-way and until another succeeds."""
        if self.fault is not None:
            raise ServeError(503, "policy", self.fault, "adapters in a known state", "publish a version again")

    async def load(self, request: LoraLoadRequest, body: str | None = None) -> LoraLoadResponse:
        """Publish a version. After this returns, every new request (or only those that name it) gets it.

        Raises:
            ServeError: 403, 404, 409 or 422 for an error in the request or the adapter; 503 if in-flight requests kept
                every slot of the engine for too long.
        """
        async with self.channels.changing:  # a repeated request waits for the first one, then gets its answer
            named, answer = self._answered
            if answer is not None and named == request.request_id:
                return answer
            self.channels.fence.check_awake()
            delivery = await delivered(request, body, self.channels, self.roots)
            answer = await self._publish(request, delivery)
            if request.request_id is not None:
                self._answered = request.request_id, answer
            return answer

    async def _publish(self, request: LoraLoadRequest, delivery: Delivery) -> LoraLoadResponse:
        """Load the adapter and route requests to it. The caller holds `channels.changing`."""
        name, number = self.registry.name_for(request.adapter_name, request.version)
        origin, by_name_only = delivery.origin, not request.activate
        version = self.registry.reserve(
            name, number, adapter_id=self.engine.next_id(), path=origin, now=time.monotonic(), by_name_only=by_name_only
        )
        await self._make_room()
        start = time.perf_counter()
        with stage("load adapter", version=version.version, transport=delivery.transport):
            installed = await self._load_into_engine(version, delivery)
        seconds = time.perf_counter() - start
        version.slot = installed.slot
        self.registry.activate(version)
        self.fault = None
        self.last_update_time = time.time()
        unloaded = [old.name for old in self.registry.removable()]
        self._sweep_later()
        logger.info(
            "Hot-swapped adapter %s (version %d, id %d) by %s in %.1f ms, engine held %.2f ms%s",
            *(version.name, version.version, version.adapter_id, delivery.transport),
            *(seconds * 1e3, installed.stall_seconds * 1e3),
            f"; unloads {', '.join(unloaded)}" if unloaded else "",
        )
        return LoraLoadResponse(
            adapter_path=delivery.origin,
            adapter_name=version.name,
            adapter_id=version.adapter_id,
            load_count=self.registry.load_count,
            adapter_config=understood(delivery.config),
            policy_version=version.version,
            transport=delivery.transport,
            slot=installed.slot,
            replayed=installed.replayed,
            load_seconds=seconds,
            stall_seconds=installed.stall_seconds,
            unloaded=unloaded,
        )

    async def unload(self, request: LoraUnloadRequest) -> LoraUnloadResponse:
        """Withdraw a version; raise a ServeError, 404, if there is none. The engine frees it after its last request."""
        async with self.channels.changing:
            version = self.registry.retire(request.adapter_name)
            await self._sweep()
        draining = version is not None and version.in_flight > 0
        return LoraUnloadResponse(
            status="draining" if draining else "success",
            previous_adapter=version.path if version else None,
            previous_name=version.name if version else None,
            policy_version=self.registry.newest.version,
        )

    async def _load_into_engine(self, version: Version, delivery: Delivery) -> Installed:
        """Load the adapter. After a failure, remove any part that the engine has kept."""
        try:
            return await self.engine.add(version.name, version.adapter_id, delivery)
        except Exception as error:
            try:
                await self.engine.remove(version.name, version.adapter_id)
            except Exception as second:
                self.fault = f"loading {version.name} failed ({error}), and so did removing it ({second})"
                logger.exception("Publish failed half-way: %s", self.fault)
                self.check_healthy()
            if isinstance(error, ServeError):
                raise
            got, wanted = f"{version.path}: {error}", "an adapter that the engine can load"
            fix = "train it on this model, and only modules that vLLM serves for it (all linear layers are)"
            raise ServeError(422, delivery.said_by, got, wanted, fix) from error

    async def _make_room(self) -> None:
        """Wait until the engine can hold one more adapter without evicting one that has in-flight requests."""
        deadline = asyncio.get_running_loop().time() + self.room_timeout_s
        while not self.registry.make_room():
            self._request_ended.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._request_ended.wait()
            except TimeoutError:
                named = ", ".join(held.name for held in self.registry.versions if held.by_name_only)
                got = f"{self.registry.capacity} versions with requests in flight"
                fix, wanted = (
                    "publish less often, shorten max_tokens, or raise --max-loras",
                    "a free place for one more",
                )
                if named:
                    got, fix = f"{got} or held by name ({named})", f"unload those held by name, {fix}"
                raise ServeError(503, "adapter_path", got, wanted, fix) from None
        await self._sweep()
        if self._sweeps:  # the registry has dropped these versions, but the engine may still hold them
            await asyncio.gather(*self._sweeps)

    def _sweep_later(self) -> None:
        """Remove removable versions in the background."""
        sweep = asyncio.get_running_loop().create_task(self._sweep())
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)

    async def _sweep(self) -> None:
        """Remove removable versions from the engine. A failure is only logged."""
        gone = self.registry.removable()
        for version in gone:
            self.registry.remove(version)  # before the first await, so that no concurrent sweep removes it again
        for version in gone:
            try:
                await self.engine.remove(version.name, version.adapter_id)
            except Exception:
                logger.exception("Could not unload %s (id %d)", version.name, version.adapter_id)
