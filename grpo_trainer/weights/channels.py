"""The ways by which an adapter or all weights reach a server's workers; `vllm_server/worker/channels.py` is their end.

| transport | class | adapters | all weights |
|---|---|---|---|
| cuda_ipc | `CudaIpc` | workers map the packed adapter | workers map the parameters |
| main_memory | `MainMemory` | - | workers map the memory in which sharded weights are gathered |
| nccl, gloo | `Group` | one broadcast | a broadcast of each bucket |
| disk | `AdapterFiles`, `ModelFiles` | a PEFT checkpoint for each version | a file for each bucket |
| memory | `Body` | the body of the request | - |
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_common.errors import Problem
from grpo_trainer import background
from grpo_trainer.errors import BridgeError, LostError, ServerError
from grpo_trainer.files import folders_named, remove_remains, whole_folder, write_bytes
from grpo_trainer.launch.places import LOOPBACK
from grpo_trainer.locked_memory import LockedMemory
from grpo_trainer.model.lora import CONFIG_FILE, WEIGHTS_FILE
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.layout import AdapterLayout, ModelLayout
from vllm_server.protocol import BridgeInfo, machine_id
from vllm_server.protocol.channels import (
    ChannelRequest,
    CudaIpcSpec,
    FolderSpec,
    MainMemorySpec,
    MappedTensor,
    Spec,
    Staging,
    Transport,
    WeightTransport,
)
from vllm_server.protocol.file_parts import PartMemory, PartThreads, memory_of, write_at
from vllm_server.protocol.flat import with_version
from vllm_server.protocol.group import BROADCAST_SECONDS, GroupError, address_towards, meeting
from vllm_server.protocol.group import Group as Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")
Name = Transport | WeightTransport

REASON_SECONDS = 3.0
"""How long the server has to say why a connection was lost."""
ADAPTER_SECONDS = 120.0
"""Time limit of an adapter's broadcast by Gloo: longer than a server waits for a free slot."""
WRITING = "writing"
"""Name of the subfolder of a version of all weights that is not complete."""


@dataclass(frozen=True)
class Gathered:
    """Where sharded weights are gathered, in main memory."""

    memory: LockedMemory
    """Servers may be able to map it."""
    tensors: Mapping[str, Tensor]
    """The weights there, by the model's names."""


@dataclass(frozen=True)
class Way:
    """What a channel to one server is made from."""

    layout: AdapterLayout | ModelLayout
    info: BridgeInfo
    """What the server says of itself."""
    url: str
    folder: Path
    """For files: of an adapter one below the server's --lora-root, of all weights a folder of this server alone."""
    keep: int = 1
    """Versions of an adapter whose files are kept."""
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    """All weights, by the model's names; of an adapter nothing."""
    gathered: Gathered | None = None
    """Where they are gathered; None: they are not sharded."""

    @property
    def flag(self) -> str:
        return "--lora-transport" if isinstance(self.layout, AdapterLayout) else "--broadcast-transport"

    @property
    def first(self) -> Tensor:
        """A tensor that is where all are."""
        return self.layout.buffer_E if isinstance(self.layout, AdapterLayout) else next(iter(self.stored.values()))


# ----------------------------------------------------------------------------------------------------------------------
# Where a channel works.


def gpu_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@dataclass(frozen=True)
class TrainerPlace:
    """Where the trainer's tensors are, as far as channels depend on it."""

    gpu: str
    """UUID of this process's GPU; empty if they are on a CPU."""
    machine: str
    """The trainer's `machine_id()`."""
    sharded: bool = False
    """Over several processes."""

    @classmethod
    def of(cls, tensor: Tensor) -> TrainerPlace:
        return cls(gpu_uuid(tensor.device), machine_id(), isinstance(tensor, DTensor))


def why_not(name: Name, trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    """Return why a channel can't work here; None if there is no known reason."""
    elsewhere = None
    if trainer.machine != info.machine:
        elsewhere = Problem("server", f"machine {info.machine}", f"{trainer.machine}, the trainer's")
    if name == "main_memory":
        if not trainer.sharded:
            return Problem("trainer", "weights in one process", "weights sharded over processes, and gathered")
        return elsewhere
    if name not in ("cuda_ipc", "nccl"):
        return None
    if not trainer.gpu:
        return Problem("trainer", "a CPU", "a GPU")
    if any(not worker.gpu_uuid for worker in info.workers):
        return Problem("server", "a CPU", "a GPU")
    if name == "nccl":
        if all(worker.gpu_uuid != trainer.gpu for worker in info.workers):
            return None
        wanted = "another GPU than the trainer's"
        return Problem("server", f"GPU {trainer.gpu}", wanted, summary="NCCL takes one rank a GPU")
    if trainer.sharded:
        return Problem("trainer", "weights sharded over processes", "weights on one GPU")
    if elsewhere is not None:
        return elsewhere
    for worker in info.workers:
        if trainer.gpu not in worker.visible_gpus:
            visible = ", ".join(worker.visible_gpus) or "none"
            return Problem(f"CUDA_VISIBLE_DEVICES of the server's worker {worker.rank}", visible, trainer.gpu)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The interface.


class Channel:
    """An open way to one server."""

    name: Name
    spec: Spec | None = None  # what the workers open; None: nothing, each request names a folder or has the bytes
    is_ahead = True  # a version is on its way before the server is asked to take it; else it is sent meanwhile
    is_lost = False  # nothing can be sent by it any more, and another one is to be opened
    id: str | None = None  # the server's name of the open channel
    staging_bytes = 0  # memory that each worker has set aside for staging; 0: versions are not staged

    def join(self, refused: Callable[[], None]) -> None:
        """Meet the workers, which are opening the channel at the same time. `refused` raises if the server refused."""

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> str | memoryview | None:
        """Send all weights, `stored` by the model's names, as `version`; or the adapter, to be published as `name`.

        Returns:
            For an adapter, what the request has: a folder, a body, or None for this channel.

        Raises:
            BridgeError: they can't be sent in this way, or the connection is lost.
            OSError: a file could not be written; with `filename`.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Finish the sending of an adapter that the server has published."""

    def failed(self) -> bool:
        """Finish the sending of an adapter that was not published; return whether to try again."""
        return False

    def close(self) -> None:
        """Free the resources of this process."""


def together(work: Callable[[Callable[[], None]], object], ask: Callable[[], T]) -> T:
    """Do our part of an exchange in a thread while the server is asked to do its own; return its answer.

    `work` gets a function that raises if the server has refused.

    Raises:
        BridgeError, ServerError: of the side that fails first. The other then ends by its time limit.
    """
    theirs = background.begin(ask)

    def refused() -> None:
        if theirs.done():
            theirs.result()

    ours = background.begin(lambda: work(refused))
    either: list[Future[Any]] = [ours, theirs]
    wait(either, return_when=FIRST_COMPLETED)
    if ours.done() and isinstance(ours.exception(), BridgeError):
        wait([theirs], REASON_SECONDS)  # the connection is lost; the server may know why
        either.reverse()
    for first in either:
        if first.done():
            first.result()  # raises what it failed with
    ours.result()
    return theirs.result()


def lost(way: Way, name: Name, error: Exception, summary: str = "", fix: str = "") -> LostError:
    """Return the error of a connection that broke, or was not made."""
    return LostError(
        summary or "a worker of the server has ended, or did not receive in time",
        field=way.flag,
        got=f"{name}: {str(error).strip().partition(chr(10))[0]}",
        fix=fix or "see the server's log; --resume auto continues",
    )


# ----------------------------------------------------------------------------------------------------------------------
# Memory of the trainer that the workers map: nothing is sent.


def handle_of(storage: torch.UntypedStorage) -> list[int | bool | str]:
    """Return the handle by which another process maps the storage, its bytes in base64."""
    return [b64encode(field).decode() if isinstance(field, bytes) else field for field in storage._share_cuda_()]


def in_place(
    layout: ModelLayout, stored: Mapping[str, Tensor], transport: WeightTransport
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each tensor of a checkpoint: its name, its values, and the stored tensor whose memory has them.

    Raises:
        BridgeError: a tensor of the checkpoint is no part of a stored one.
    """
    for name, tensor in stored.items():
        for final, part in layout.plain(name, tensor.detach()).items():
            if part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                raise BridgeError(
                    "transformers converts it for a checkpoint, so its memory can't be read in place",
                    field="--broadcast-transport",
                    got=f"{transport} for {final}",
                    fix="use --broadcast-transport gloo",
                )
            yield final, part, tensor


def _mapped(part: Tensor, storage: int, offset: int) -> MappedTensor:
    dtype = str(part.dtype).removeprefix("torch.")
    return MappedTensor(storage=storage, offset=offset, shape=list(part.shape), stride=list(part.stride()), dtype=dtype)


class CudaIpc(Channel):
    """The workers map the packed adapter, or the trainer's parameters, and copy from GPU memory to GPU memory.

    Raises:
        BridgeError: a tensor of the checkpoint is no part of a parameter's memory.
    """

    name: Name = "cuda_ipc"

    def __init__(self, way: Way) -> None:
        self._layout, self._device = way.layout, way.first.device
        storages, tensors = [], {}
        if isinstance(self._layout, AdapterLayout):
            storages.append(handle_of(self._layout.buffer_E.untyped_storage()))
        else:
            numbers: dict[int, int] = {}
            for name, part, stored in in_place(self._layout, way.stored, "cuda_ipc"):
                storage = stored.untyped_storage()
                if storage.data_ptr() not in numbers:
                    numbers[storage.data_ptr()] = len(storages)
                    storages.append(handle_of(storage))
                tensors[name] = _mapped(part, numbers[storage.data_ptr()], int(part.storage_offset()))
        self.spec = CudaIpcSpec(gpu_uuid=gpu_uuid(self._device), storages=storages, tensors=tensors)

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> None:
        """Wait until the memory is written: the server's process can't wait for our stream."""
        if isinstance(self._layout, AdapterLayout):
            torch.cuda.current_stream(self._layout.pack().device).synchronize()
        else:
            torch.cuda.synchronize(self._device)


class MainMemory(Channel):
    """The workers map the main memory in which sharded weights are gathered.

    Raises:
        BridgeError: a tensor of the checkpoint is no part of a gathered one, or no process can map this memory.
    """

    name: Name = "main_memory"

    def __init__(self, way: Way) -> None:
        gathered = way.gathered
        assert gathered is not None and isinstance(way.layout, ModelLayout), "`why_not` says so"
        memory, tensors = gathered.memory, {}
        if not memory.path:
            raise BridgeError(
                "this system gives no memory that processes can share",
                field="--broadcast-transport",
                got=f"{self.name}, and memfd_create failed",
                fix="use --broadcast-transport gloo",
            )
        for name, part, _ in in_place(way.layout, gathered.tensors, "main_memory"):
            place = (part.data_ptr() - memory.address) if part.numel() else 0
            tensors[name] = _mapped(part, 0, place // part.dtype.itemsize)
        self.spec = MainMemorySpec(name=memory.name, path=memory.path, nbytes=len(memory), tensors=tensors)

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> None:
        """Do nothing: the weights were gathered where the workers read them."""


# ----------------------------------------------------------------------------------------------------------------------
# A broadcast to all workers.


class Group(Channel):
    """Rank 0 of a group with the server's workers: by NCCL between GPUs, by Gloo between main memories.

    An adapter's one broadcast is on its way when the server is asked; all weights are sent, bucket by bucket, while the
    server is asked for them. By NCCL, weights that are sharded over processes arrive in rank 0's main memory, and go to
    its GPU bucket by bucket.

    Raises:
        NcclError: this process has no NCCL.
        ServerError: the server does not listen any more.
    """

    def __init__(self, way: Way, backend: Literal["nccl", "gloo"]) -> None:
        self.name: Name = backend
        self._way, self._layout = way, way.layout
        self.is_ahead = isinstance(way.layout, AdapterLayout)
        self._device = way.first.device
        if backend == "nccl":
            # A slow server must not hold up what others are sent. An adapter is on its way for a moment only.
            new = torch.cuda.current_stream if self.is_ahead else torch.cuda.Stream
            self._stream: torch.cuda.Stream = new(self._device)
        at, host = urlsplit(way.url), LOOPBACK
        if backend == "gloo" and at.hostname and at.port:
            try:
                host = address_towards(at.hostname, at.port)
            except OSError as error:
                raise ServerError("the inference server is gone", field=way.url, got=error) from None
        self.spec, store = meeting(backend, 1 + len(way.info.workers), host)
        seconds = ADAPTER_SECONDS if self.is_ahead else BROADCAST_SECONDS
        self._make = functools.partial(Ranks, self.spec, 0, self._device, store, seconds)
        self._ranks: Ranks | None = None
        self._buffer_E: Tensor | None = None
        self._sending: Future[None] | None = None

    def join(self, refused: Callable[[], None]) -> None:
        """Make the group, and connect the ranks by a first broadcast, while another channel can be tried."""
        try:
            if self.name == "nccl":
                with torch.cuda.stream(self._stream):  # a thread starts on the first GPU
                    self._ranks = self._make(abandoned=refused)
            else:
                self._ranks = self._make()
        except (BridgeError, ServerError):  # by `refused`
            raise
        except RuntimeError as error:
            other = "memory" if self.is_ahead else "gloo"
            fix = f"set NCCL_DEBUG=INFO to see why, or use {self._way.flag} {other}" if self.name == "nccl" else ""
            raise lost(self._way, self.name, error, "the server's workers did not join", fix) from error

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> None:
        ranks, layout = self._ranks, self._layout
        if ranks is None:
            raise LostError("the group is gone after a failure", field=self._way.flag, got=self.name)
        try:
            if isinstance(layout, AdapterLayout) and self.name == "nccl":
                with torch.cuda.stream(self._stream):
                    ranks.broadcast(layout.pack())  # it ends when the workers have received
            elif isinstance(layout, AdapterLayout):
                bytes_B = layout.pack_file()[len(layout.headers[0]) :]
                self._sending = background.begin(lambda: ranks.broadcast(bytes_B))
            elif self.name == "nccl":
                self._send_between_gpus(ranks, layout, stored)
            else:
                if self._buffer_E is None:
                    on_gpu = torch.cuda.is_available()  # page-locked memory is several times faster to copy into
                    self._buffer_E = torch.empty(layout.largest, dtype=layout.dtype, pin_memory=on_gpu)
                for number in range(len(layout)):
                    ranks.broadcast(layout.pack(number, stored, self._buffer_E))
        except GroupError as error:
            raise lost(self._way, self.name, error) from error

    def _send_between_gpus(self, ranks: Ranks, layout: ModelLayout, stored: Mapping[str, Tensor]) -> None:
        """Enqueue each bucket while the one before is sent: its packing, into the same memory, and its broadcast.

        Packing from main memory waits for the stream without a limit, so the bucket before is waited for first.
        """
        stream = self._stream
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))  # the optimizer's
            try:
                with torch.cuda.stream(torch.cuda.default_stream(self._device)):  # so that training can use it again
                    buffer_E = torch.empty(layout.largest, dtype=layout.dtype, device=self._device)
                buffer_E.record_stream(stream)
                before, gathered = None, next(iter(stored.values())).device.type == "cpu"
                for number in range(len(layout)):
                    if gathered and before is not None:
                        ranks.wait(before.query)
                    ranks.broadcast(layout.pack(number, stored, buffer_E))
                    if before is not None:
                        ranks.wait(before.query)  # its time limit is that of one bucket
                    before = stream.record_event()
                ranks.wait(stream.query)
            except BaseException:
                ranks.abort()  # the workers wait for buckets that will not come
                raise

    def settle(self) -> None:
        assert self._ranks is not None
        try:
            if self._sending is not None:
                self._sending.result()
            else:
                self._ranks.wait(self._stream.query)
        except GroupError as error:
            raise lost(self._way, self.name, error) from error

    def failed(self) -> bool:
        """Leave the group. Workers that were not asked to receive would take this broadcast for the next one."""
        self.is_lost = True
        self.close()
        return False

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.abort()
        self._ranks = None


# ----------------------------------------------------------------------------------------------------------------------
# Files.


class ModelFiles(Channel):
    """Writes each version into a subfolder that gets the version's number when it is complete.

    The files are those of the version before, written over: their memory and their place on the disk are there already,
    and the folder never has two versions.
    """

    name: Name = "disk"

    def __init__(self, way: Way) -> None:
        assert isinstance(way.layout, ModelLayout)
        self._layout = way.layout
        self._folder = way.folder.absolute()
        self._threads = PartThreads(way.first.device)
        self._written: int | None = None
        self.spec = FolderSpec(folder=str(self._folder))

    def join(self, refused: Callable[[], None]) -> None:
        """Remove what a killed trainer has left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> None:
        """Write a version; several threads write a bucket each."""
        writing = self._folder / WRITING
        with suppress(FileNotFoundError):  # the first version, or someone has deleted it
            (self._folder / str(self._written)).rename(writing)
        writing.mkdir(parents=True, exist_ok=True)

        @torch.no_grad()
        def write(memory: PartMemory, number: int) -> None:
            path, header = writing / f"{number}.safetensors", with_version(self._layout.headers[number], version)
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    write_at(file, header, 0)
                    for span, part in self._layout.parts(number, stored):
                        memory.write(file, len(header) + span.start, part, self._layout.dtype)
                finally:
                    os.close(file)
            except OSError as error:
                error.filename = str(path)
                raise

        self._threads.each(write, range(len(self._layout)))
        writing.rename(self._folder / str(version))
        self._written = version

    def close(self) -> None:
        """Delete the files: the server has its own copy of what it serves."""
        self._threads.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class AdapterFiles(Channel):
    """Writes each version as a PEFT checkpoint, in the standard format of adapters, into a folder with its name.

    The files of the newest `Way.keep` versions are kept, also those of an earlier trainer: the server may serve them.
    """

    name: Name = "disk"

    def __init__(self, way: Way) -> None:
        assert isinstance(way.layout, AdapterLayout)
        self._layout, self._root, self._keep = way.layout, way.folder, way.keep
        self._path: Path | None = None
        # Names of versions, and of adapters of a proof.
        ours = rf"{re.escape(way.info.lora_name)}-(?:v\d+|proof-[a-z]+-[0-9a-f]{{8}})"
        remove_remains(self._root, ours)
        self._folders = deque(folders_named(self._root, ours, containing=WEIGHTS_FILE))

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> str:
        path = self._path = self._root / name
        with whole_folder(path) as folder:
            write_bytes(folder / WEIGHTS_FILE, memory_of(self._layout.pack_file()))
            write_bytes(folder / CONFIG_FILE, json.dumps(self._layout.settings, indent=2).encode())
        if path in self._folders:  # a resumed trainer sends its version again
            self._folders.remove(path)
        self._folders.append(path)
        return str(path.absolute())

    def settle(self) -> None:
        """Delete the folders of old versions."""
        self._drop_deleted()
        while len(self._folders) > self._keep:
            folder = self._folders.popleft()
            try:
                shutil.rmtree(folder)
            except OSError as error:  # best effort: a leftover folder only costs disk space
                log.warning("could not delete %s: %s", folder, error)

    def failed(self) -> bool:
        """Return whether someone has deleted the folder during the write or the load."""
        if self._path is None or self._path.is_dir():
            return False
        self._drop_deleted()
        return True

    def _drop_deleted(self) -> None:
        deleted = [folder for folder in self._folders if not folder.is_dir()]
        if deleted:
            log.warning(
                "%s: deleted by another program. The server keeps the versions it has loaded",
                ", ".join(str(folder) for folder in deleted),
            )
        self._folders = deque(folder for folder in self._folders if folder not in deleted)


class Body(Channel):
    """The adapter is the body of the request that publishes it: no files, and the server may be on another host."""

    name: Name = "memory"

    def __init__(self, way: Way) -> None:
        assert isinstance(way.layout, AdapterLayout)
        self._layout = way.layout

    def send(self, version: int, stored: Mapping[str, Tensor], name: str = "") -> memoryview:
        return memory_of(self._layout.pack_file())


# ----------------------------------------------------------------------------------------------------------------------
# Opening one.

CHANNELS: dict[Name, Callable[[Way], Channel]] = {
    "main_memory": MainMemory,
    "nccl": lambda way: Group(way, "nccl"),
    "cuda_ipc": CudaIpc,
    "memory": Body,
    "gloo": lambda way: Group(way, "gloo"),
    "disk": lambda way: (AdapterFiles if isinstance(way.layout, AdapterLayout) else ModelFiles)(way),
}
"""In the order in which `auto` tries them; each works in more setups than those before it. `main_memory` copies least:
sharded weights are gathered in main memory for every channel."""

AUTOMATIC = tuple(name for name in CHANNELS if name != "disk")
"""`auto` never tries `disk`, because nothing shows beforehand that the server sees the folder."""


def open_channel(wanted: Name | Literal["auto"], way: Way, server: ServerClient, staging: Staging = "auto") -> Channel:
    """Open the wanted channel, or the first that works here, and log which and why.

    Raises:
        ServerError: the server refused the last channel that was tried, or is gone.
        BridgeError: the wanted channel, or every channel, can't work here.
    """
    trainer = TrainerPlace.of(way.first)
    of_option = get_args(Transport if isinstance(way.layout, AdapterLayout) else WeightTransport)
    names: Any = filter(of_option.__contains__, AUTOMATIC) if wanted == "auto" else [wanted]
    reasons: list[Problem] = []
    error: Exception | None = None
    for name in names:
        reason: Problem | Exception | None = why_not(name, trainer, way.info)
        if reason is None:
            if error is not None:
                log.warning("trying %s, because the server was not reached: %s", name, error)
                server.close_channel("")  # answered when the workers no longer wait for the one before
            try:
                channel = _opened(name, way, server, staging)
            except RuntimeError as failed:  # of the server, CUDA, NCCL or Gloo; the next channel may work
                reason = error = failed
            else:
                log.info(
                    "%s go to the server by %s: %.2f GB in %d buckets, %s%s",
                    *("adapters" if isinstance(way.layout, AdapterLayout) else "weights", name),
                    *(way.layout.nbytes / 1e9, len(way.layout)),
                    f"staged in {channel.staging_bytes / 1e9:.2f} GB" if channel.staging_bytes else "not staged",
                    f" ({'; '.join(map(str, reasons))})" if reasons else "",
                )
                return channel
        reasons.append(Problem(f"not {name}", summary=str(reason)))
    if isinstance(error, ServerError):
        raise error
    fix = f"use {way.flag} auto, which takes the fastest that works" if wanted != "auto" else ""
    kind = LostError if isinstance(error, LostError) else BridgeError
    raise kind.of([Problem(way.flag, wanted, fix=fix, summary="weights can't go to the server"), *reasons])


def _opened(name: Name, way: Way, server: ServerClient, staging: Staging) -> Channel:
    channel = CHANNELS[name](way)
    if channel.spec is None:
        return channel
    layout = way.layout
    request = ChannelRequest(
        boot_id=way.info.boot_id,
        spec=channel.spec,
        buckets=[b64encode(header).decode() for header in layout.headers],
        adapter_config=layout.settings if isinstance(layout, AdapterLayout) else None,
        staging=staging,
    )
    try:
        opened = together(channel.join, lambda: server.open_channel(request))
    except BaseException:
        channel.close()
        raise
    channel.id, channel.staging_bytes = opened.channel, opened.staging_bytes
    return channel
