"""The ways all weights reach a server: one class for each `--broadcast-transport`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_common.errors import Problem
from grpo_trainer.errors import BridgeError
from grpo_trainer.files import write_bytes
from grpo_trainer.launch.places import LOOPBACK
from grpo_trainer.weights.buckets import Buckets
from grpo_trainer.weights.ipc import gpu_uuid, handle_of, unmappable
from vllm_server.protocol import BridgeInfo, DiskSource, GlooSource, WeightTransport, machine_id
from vllm_server.protocol.gloo import GlooGroup, address_towards, make_store
from vllm_server.protocol.weights import CudaIpcSource, IpcView, Source


@dataclass(frozen=True)
class Way:
    """What senders are made from.

    Attributes:
        url: the server's.
        info: what the server says of itself.
        folder: for files; of this server alone.
        buckets: how the weights travel.
        stored: the weights.
    """

    url: str
    info: BridgeInfo
    folder: Path
    buckets: Buckets
    stored: Mapping[str, Tensor]


class WeightSender(Protocol):
    """One way to one server.

    Attributes:
        source: what the server is told: where the weights come from.
        is_ahead: whether a version is complete before the server is asked to take it; else it is sent meanwhile.
    """

    name: WeightTransport
    is_ahead: bool

    @property
    def source(self) -> Source: ...

    def join(self) -> None:
        """Meet the server's workers, which are opening the channel at the same time."""
        ...

    def send(self, buckets: Iterator[Tensor]) -> None:
        """Send a version's buckets, each a flat tensor in main memory that is valid until the next is asked for."""
        ...

    def close(self) -> None: ...


class NotInPlaceError(BridgeError):
    """The weights lie in memory otherwise than a checkpoint has them."""


class IpcSender:
    """Lets the server map the trainer's parameters, so that nothing is packed or sent.

    Raises:
        NotInPlaceError: a tensor of the checkpoint is no part of a parameter's memory.
    """

    name: WeightTransport = "cuda_ipc"
    is_ahead = True

    def __init__(self, way: Way) -> None:
        self._device = next(iter(way.stored.values())).device
        numbers: dict[int, int] = {}
        storages, tensors = [], {}
        for name, parameter in way.stored.items():
            storage = parameter.untyped_storage()
            if storage.data_ptr() not in numbers:
                numbers[storage.data_ptr()] = len(storages)
                storages.append(handle_of(storage))
            for final, part in way.buckets.plain(name, parameter.detach()).items():
                if part.untyped_storage().data_ptr() != storage.data_ptr():
                    raise NotInPlaceError(
                        "transformers converts it for a checkpoint, so its memory can't be read in place",
                        field="--broadcast-transport",
                        got=f"cuda_ipc for {final}",
                        fix="use --broadcast-transport gloo",
                    )
                tensors[final] = IpcView(
                    storage=numbers[storage.data_ptr()],
                    offset=int(part.storage_offset()),
                    shape=list(part.shape),
                    stride=list(part.stride()),
                    dtype=str(part.dtype).removeprefix("torch."),
                )
        self.source = CudaIpcSource(gpu_uuid=gpu_of(way.stored), storages=storages, tensors=tensors)

    def join(self) -> None: ...

    def send(self, buckets: Iterator[Tensor]) -> None:
        """Wait until the parameters are written: the server's process can't wait for our stream."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None: ...


class GlooSender:
    """Rank 0 of a Gloo group with the server's workers."""

    name: WeightTransport = "gloo"
    is_ahead = False

    def __init__(self, way: Way) -> None:
        at, workers = urlsplit(way.url), len(way.info.workers)
        host = address_towards(at.hostname, at.port) if at.hostname and at.port else LOOPBACK
        self._store = make_store(host, 1 + workers)
        self.source = GlooSource(host=host, port=self._store.port, world_size=1 + workers)
        self._group: GlooGroup | None = None

    def join(self) -> None:
        asked = self.source
        try:
            self._group = GlooGroup(asked.host, asked.port, 0, asked.world_size, self._store)
        except RuntimeError as error:
            raise _failed("the server's workers did not join", self.name, error) from error

    def send(self, buckets: Iterator[Tensor]) -> None:
        assert self._group is not None, "join comes first"
        try:
            for bucket_E in buckets:
                self._group.broadcast(bucket_E.view(torch.uint8))
        except RuntimeError as error:
            raise _failed("a worker of the server has ended, or did not receive in time", self.name, error) from error

    def close(self) -> None:
        self._group = None


class FolderSender:
    """Writes each version into a folder that the server sees, over the one before."""

    name: WeightTransport = "disk"
    is_ahead = True

    def __init__(self, way: Way) -> None:
        self._folder = way.folder.absolute()
        self._headers = way.buckets.headers
        self.source = DiskSource(folder=str(self._folder))

    def join(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def send(self, buckets: Iterator[Tensor]) -> None:
        self.join()  # someone may have deleted it
        for number, bucket_E in enumerate(buckets):
            content = b"".join((self._headers[number], bucket_E.view(torch.uint8).numpy().data))
            write_bytes(self._folder / f"{number}.safetensors", content)

    def close(self) -> None:
        """Delete the files: the server has its own copy of what it serves."""
        shutil.rmtree(self._folder, ignore_errors=True)


SENDERS: dict[WeightTransport, Callable[[Way], WeightSender]] = {
    "cuda_ipc": IpcSender,
    "gloo": GlooSender,
    "disk": FolderSender,
}
"""From the fastest to the slowest: `auto` is the first without an obstacle."""


def gpu_of(stored: Mapping[str, Tensor]) -> str:
    """Return the UUID of the GPU that has the weights; empty on a CPU, and if they are sharded over processes."""
    first = next(iter(stored.values()))
    return "" if isinstance(first, DTensor) else gpu_uuid(first.device)


def obstacle(transport: WeightTransport, gpu: str, machine: str, info: BridgeInfo) -> Problem | None:
    """Return why a transport can't work here; None if there is no known reason.

    Args:
        gpu: UUID of the GPU with the trainer's weights, or empty; see `gpu_of`.
        machine: the trainer's `machine_id()`.
    """
    if transport != "cuda_ipc":
        return None
    if not gpu:
        return Problem("trainer", "weights on a CPU, or sharded over processes", "weights on one GPU")
    return unmappable(gpu, machine, info)


def open_sender(asked: Literal["auto", WeightTransport], way: Way) -> WeightSender:
    """Return the sender for `--broadcast-transport`.

    Raises:
        BridgeError: the transport that was asked for can't work here.
    """
    gpu, machine = gpu_of(way.stored), machine_id()
    if asked == "auto":
        for each in SENDERS:
            if obstacle(each, gpu, machine, way.info) is None:
                with suppress(NotInPlaceError):
                    return SENDERS[each](way)
        raise AssertionError("gloo has no obstacle")
    if (problem := obstacle(asked, gpu, machine, way.info)) is not None:
        summary = f"--broadcast-transport {asked} can't reach the server"
        raise BridgeError.of([replace(problem, summary=summary, fix="use --broadcast-transport auto")])
    return SENDERS[asked](way)


def _failed(summary: str, transport: WeightTransport, error: Exception) -> BridgeError:
    return BridgeError(
        summary,
        field="--broadcast-transport",
        got=f"{transport}: {str(error).strip().partition(chr(10))[0]}",
        fix="see the server's log; --resume auto continues",
    )
