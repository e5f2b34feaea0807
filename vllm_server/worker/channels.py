"""The workers' ends of the trainer's channels (`grpo_trainer/weights/channels.py`): how a bucket arrives."""

from __future__ import annotations

import mmap
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_server.protocol.channels import (
    ChannelRequest,
    CudaIpcSpec,
    FolderSpec,
    GroupSpec,
    MainMemorySpec,
    MappedTensor,
    Spec,
)
from vllm_server.protocol.file_parts import PART_BYTES, PartMemory, PartThreads, page_lock
from vllm_server.protocol.flat import decode_header, read_header, with_version
from vllm_server.protocol.group import Group as Ranks
from vllm_server.worker.packed import Layout, PackedAdapter, layout_of


class Channel(Protocol):
    """An open channel."""

    def fill(self, version: int, number: int, buffer_E: Tensor | None) -> Tensor:
        """Receive a bucket of a version into a buffer on any device, and return the tensor that has it.

        Args:
            buffer_E: None for a channel whose own memory has the bucket; the next version overwrites it.

        Raises:
            RuntimeError, ValueError, OSError: it did not arrive, or is not what was agreed.
        """
        ...

    def close(self) -> None: ...


def open_end(
    spec: Spec, headers: Sequence[bytes], layouts: Sequence[Layout], device: torch.device, rank: int
) -> Channel:
    """Open this worker's end of a channel; `device` is where the buffers are.

    Raise a RuntimeError or ValueError if the trainer can't be reached in this way.
    """
    match spec:
        case CudaIpcSpec():
            return CudaIpc(spec, layouts, device)
        case MainMemorySpec():
            return MainMemory(spec, layouts, device)
        case GroupSpec():
            return Group(spec, device, rank)
        case FolderSpec():
            return Folder(spec, headers, device)


class AdapterChannel:
    """An open channel of adapters; opening it raises as `open_end`."""

    staging_bytes = 0

    def __init__(self, request: ChannelRequest, device: torch.device, rank: int) -> None:
        assert request.adapter_config is not None, "else it carries all weights"
        headers = [b64decode(header) for header in request.buckets]
        layout = self._layout = layout_of(headers[0], settings_of(request.adapter_config))
        self._buffer_E: Tensor | None = None
        if not isinstance(request.spec, CudaIpcSpec):  # which has the trainer's
            self._buffer_E = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self._end = open_end(request.spec, headers, [layout], device, rank)

    def receive(self) -> PackedAdapter:
        """Return the adapter that the trainer sends now, or has packed last. It packs the next one after our answer.

        A GroupError says that it did not arrive in time; the channel is unusable then.
        """
        return PackedAdapter(self._layout, self._end.fill(0, 0, self._buffer_E), lasting=True)

    def close(self) -> None:
        self._end.close()


def settings_of(config: Mapping[str, Any]) -> str:
    """Return the settings that change how an adapter's tensors are used, as text."""
    return f"r{config['r']} alpha{config['lora_alpha']} rslora{bool(config.get('use_rslora'))}"


# ----------------------------------------------------------------------------------------------------------------------
# Memory of the trainer that this worker maps.


def gpu_uuid(index: int) -> str:
    """Return a GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(index).uuid)


class Mapped:
    """Copies buckets from mapped memory. A ValueError says that a tensor of them is missing or has another shape."""

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], tensors: Mapping[str, MappedTensor], layouts: Sequence[Layout]
    ) -> None:
        self._layouts = layouts
        self._theirs: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            storage = storages[tensor.storage]
            empty = torch.empty(0, dtype=getattr(torch, tensor.dtype), device=storage.device)
            self._theirs[name] = empty.set_(storage, tensor.offset, tensor.shape, tensor.stride)  # pyright: ignore
        for name, place in ((name, place) for layout in layouts for name, place in layout.places.items()):
            if name not in self._theirs or tuple(self._theirs[name].shape) != tuple(place.shape):
                raise ValueError(f"no memory was named for {name} with the shape {tuple(place.shape)}")

    def fill(self, version: int, number: int, buffer_E: Tensor | None) -> Tensor:
        """Copy a bucket into a buffer, cast to the buffer's dtype. The trainer does not write meanwhile."""
        assert buffer_E is not None, "a bucket's tensors are apart"
        places = self._layouts[number].places
        targets = [buffer_E[place.offset : place.end].view(place.shape) for place in places.values()]
        sources = [self._theirs[name] for name in places]
        torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore
        return buffer_E

    def close(self) -> None:
        """Do nothing: the mapping ends with its last reference, which a copy in progress may have."""


class CudaIpc(Mapped):
    """Holds the mapping of the trainer's GPU memory, and copies from GPU memory to GPU memory.

    CUDA must be initialised in this process before a handle is opened. The worker's own tensors ensure that. A
    ValueError says that this process does not see the trainer's GPU; or see `Mapped`.
    """

    def __init__(self, spec: CudaIpcSpec, layouts: Sequence[Layout], device: torch.device) -> None:
        visible = {gpu_uuid(index): index for index in range(torch.cuda.device_count())}
        if spec.gpu_uuid not in visible:
            raise ValueError(f"the trainer's GPU {spec.gpu_uuid}, while this worker sees {', '.join(visible)}")
        index, storages = visible[spec.gpu_uuid], []
        for handle in spec.storages:
            _, *rest = (b64decode(field) if isinstance(field, str) else field for field in handle)
            storages.append(torch.UntypedStorage._new_shared_cuda(index, *rest))
        self._whole: list[Tensor] = []  # buckets that are in one piece
        if spec.tensors:
            super().__init__(storages, spec.tensors, layouts)
            return
        for storage, layout in zip(storages, layouts, strict=True):
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            nbytes = layout.numel * layout.dtype.itemsize
            self._whole.append(empty.set_(storage, 0, (nbytes,), (1,)).view(layout.dtype))  # pyright: ignore
        # From another GPU one large copy is faster than hundreds of small ones.
        self._own = [None if each.device == device else torch.empty_like(each, device=device) for each in self._whole]

    def fill(self, version: int, number: int, buffer_E: Tensor | None) -> Tensor:
        if not self._whole:
            return super().fill(version, number, buffer_E)
        theirs_E, own_E = self._whole[number], buffer_E if buffer_E is not None else self._own[number]
        if own_E is None:
            return theirs_E
        own_E.copy_(theirs_E, non_blocking=True)
        return own_E


class MainMemory(Mapped):
    """Holds the mapping of the trainer's main memory. For a GPU it is page-locked.

    A ValueError says that this process does not see the memory; or see `Mapped`.
    """

    def __init__(self, spec: MainMemorySpec, layouts: Sequence[Layout], device: torch.device) -> None:
        memory_B = _mapped(spec)
        self.is_locked = device.type == "cuda" and page_lock(memory_B)
        super().__init__([torch.from_numpy(memory_B).untyped_storage()], spec.tensors, layouts)


def _mapped(spec: MainMemorySpec) -> NDArray[np.uint8]:
    try:
        # In another container the same path may lead elsewhere; the name has a random part.
        if str(Path(spec.path).readlink()) != f"/memfd:{spec.name} (deleted)":
            raise ValueError("it is something else")
        file = os.open(spec.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(file, spec.nbytes)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"this worker does not see the trainer's main memory at {spec.path}: {error}") from error
    return np.frombuffer(mapping, np.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# A broadcast of the trainer to all workers.


class Group:
    """One rank of the group: 1 + the worker's rank, since the trainer is rank 0.

    A GroupError or RuntimeError says that the group could not be formed in time.
    """

    def __init__(self, spec: GroupSpec, device: torch.device, rank: int) -> None:
        self._ranks = Ranks(spec, 1 + rank, device)

    def fill(self, version: int, number: int, buffer_E: Tensor | None) -> Tensor:
        """Receive a bucket into a buffer. By NCCL it is on a GPU; by Gloo it is on any device. Buckets come in order.

        A GroupError says that it did not arrive in time; the group is unusable then.
        """
        assert buffer_E is not None, "a group has no memory"
        if self._ranks.backend == "nccl":
            self._ranks.broadcast(buffer_E)
            self._ranks.wait(torch.cuda.current_stream(buffer_E.device).query)
            return buffer_E
        here_E = buffer_E if buffer_E.device.type == "cpu" else torch.empty_like(buffer_E, device="cpu")
        self._ranks.broadcast(here_E)
        if here_E is not buffer_E:
            buffer_E.copy_(here_E)
        return buffer_E

    def close(self) -> None:
        """Leave the group. A bucket that is being received by NCCL ends in an error; one by Gloo, with the trainer."""
        self._ranks.abort()


# ----------------------------------------------------------------------------------------------------------------------
# Files: of all weights in an agreed folder; of an adapter where a request says, on a disk or in memory.


class Folder:
    """Reads the buckets of a version from its subfolder of `FolderSpec.folder`.

    Another header than the agreed one means that a file is another trainer's, or of another version: a network disk may
    show a file's old content.
    """

    def __init__(self, spec: FolderSpec, headers: Sequence[bytes], device: torch.device) -> None:
        self._folder = Path(spec.folder)
        self._headers = headers
        self._threads = PartThreads(device)

    def fill(self, version: int, number: int, buffer_E: Tensor | None) -> Tensor:
        """Read a bucket into a buffer; some threads copy parts to a GPU while others read.

        Raise a ValueError if the file is not what was agreed, or ends early, and an OSError if it can't be read.
        """
        assert buffer_E is not None, "a folder has no memory"
        path = self._folder / str(version) / f"{number}.safetensors"
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise ValueError(f"{path}: no regular file")
        if buffer_E.device.type == "cuda":
            torch.cuda.current_stream(buffer_E.device).synchronize()  # it may still copy the buffer's last content
        data_B = buffer_E.view(torch.uint8)
        wanted = decode_header(with_version(self._headers[number], version))
        with path.open("rb") as file:
            found = decode_header(read_header(file))
            if (found.spans, found.metadata) != (wanted.spans, wanted.metadata):
                raise ValueError(f"{path}: another version, or other tensors than the channel was opened with")
            begin, handle = found.size, file.fileno()

            def read(memory: PartMemory, start: int) -> None:
                memory.read(handle, begin + start, data_B[start : start + PART_BYTES])

            try:
                self._threads.each(read, range(0, len(data_B), PART_BYTES))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        return buffer_E

    def close(self) -> None:
        self._threads.close()


class AdapterFiles:
    """Reads files of adapters of one layout into the same memory, one after the other.

    A file is read in one piece into pinned memory and copied from there to the GPU: mapping it costs more, in page
    faults.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[bytes, str] | None = None
        self._layout: Layout
        self._host_E = self._device_E = torch.empty(0)

    def read(self, path: Path, settings: str) -> PackedAdapter:
        """Return the file's adapter, which is valid until the next read. Raise a ValueError if the file is damaged."""
        with path.open("rb") as stream:
            header = read_header(stream)
            if self._known != (header, settings):
                layout = layout_of(header, settings)
                on_gpu = self._device.type == "cuda"
                self._host_E = torch.empty(layout.numel, dtype=layout.dtype, pin_memory=on_gpu)
                self._device_E = torch.empty_like(self._host_E, device=self._device) if on_gpu else self._host_E
                self._layout, self._known = layout, (header, settings)
            target = self._host_E.view(torch.uint8).numpy().data
            if (got := stream.readinto(target)) != len(target):
                raise ValueError(f"a file that ends early ({got} of {len(target)} bytes)")
        if self._device_E is not self._host_E:
            self._device_E.copy_(self._host_E, non_blocking=True)
        return PackedAdapter(self._layout, self._device_E, lasting=True)
