"""Where a worker takes the weights of a version from: a class for each source."""

from __future__ import annotations

import mmap
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_server.protocol import CudaIpcSource, DiskSource, GlooSource, MainMemorySource, MappedTensor, NcclSource
from vllm_server.protocol.file_parts import PART_BYTES, PartMemory, PartThreads
from vllm_server.protocol.flat import decode_header, read_header, with_version
from vllm_server.protocol.gloo import GlooGroup
from vllm_server.protocol.nccl import Communicator
from vllm_server.protocol.page_lock import page_lock
from vllm_server.worker.packed import Layout
from vllm_server.worker.transports import mapped, visible_index

# ----------------------------------------------------------------------------------------------------------------------
# Weights in the trainer's memory that a worker has mapped: of the sources `cuda_ipc` and `main_memory`.


class MappedWeights:
    """Copies buckets from mapped memory.

    Args:
        storages: the mapped memory.
        tensors: where each tensor of the buckets is.
        layouts: of the buckets.

    Raises:
        ValueError: a tensor of a bucket is missing or has another shape.
    """

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

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Copy a bucket into a buffer, cast to the buffer's dtype. The trainer does not write meanwhile."""
        places = self._layouts[number].places
        targets = [buffer_E[place.offset : place.end].view(place.shape) for place in places.values()]
        sources = [self._theirs[name] for name in places]
        torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore

    def close(self) -> None:
        """Do nothing: the mapping ends with its last reference, which a copy in progress may have."""


# ----------------------------------------------------------------------------------------------------------------------
# Source `cuda_ipc`: the trainer's own parameters, mapped once and copied from GPU memory to GPU memory.


class ParameterMap(MappedWeights):
    """Holds the mapping of the trainer's parameters.

    Args:
        layouts: of the buckets.

    Raises:
        ValueError: this process does not see the trainer's GPU; or see `MappedWeights`.
    """

    def __init__(self, source: CudaIpcSource, layouts: Sequence[Layout]) -> None:
        index = visible_index(source.gpu_uuid)
        super().__init__([mapped(handle, index) for handle in source.storages], source.tensors, layouts)


# ----------------------------------------------------------------------------------------------------------------------
# Source `main_memory`: the trainer's main memory, mapped once and copied from there.


class MemoryMap(MappedWeights):
    """Holds the mapping of the trainer's memory.

    Args:
        layouts: of the buckets.
        device: of the buffers. For a GPU the memory is page-locked.

    Attributes:
        is_locked: whether it is page-locked.

    Raises:
        ValueError: this process does not see the memory; or see `MappedWeights`.
    """

    def __init__(self, source: MainMemorySource, layouts: Sequence[Layout], device: torch.device) -> None:
        memory_B = _mapped(source)
        self.is_locked = device.type == "cuda" and page_lock(memory_B)
        super().__init__([torch.from_numpy(memory_B).untyped_storage()], source.tensors, layouts)


def _mapped(source: MainMemorySource) -> NDArray[np.uint8]:
    try:
        # In another container the same path may lead elsewhere; the name has a random part.
        if str(Path(source.path).readlink()) != f"/memfd:{source.name} (deleted)":
            raise ValueError("it is something else")
        file = os.open(source.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(file, source.nbytes)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"this worker does not see the trainer's main memory at {source.path}: {error}") from error
    return np.frombuffer(mapping, np.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Source `disk`: each bucket is a safetensors file in a folder that trainer and server see.


class FolderReader:
    """Reads the buckets of a version from its subfolder of `DiskSource.folder`.

    Args:
        headers: the agreed header of each bucket. Another one in a file means that the file is another trainer's, or of
            another version: a network disk may show a file's old content.
        device: where the buffers are.
    """

    def __init__(self, source: DiskSource, headers: Sequence[bytes], device: torch.device) -> None:
        self._folder = Path(source.folder)
        self._headers = headers
        self._threads = PartThreads(device)

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Read a bucket into a buffer; some threads copy parts to a GPU while others read.

        Raises:
            ValueError: the file is not what was agreed, or ends early.
            OSError: it can't be read.
        """
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

    def close(self) -> None:
        self._threads.close()


# ----------------------------------------------------------------------------------------------------------------------
# Source `gloo`: the trainer broadcasts each bucket to all workers, from main memory to main memory.


class GlooReceiver:
    """One rank of the group: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        RuntimeError: the group could not be formed in time.
    """

    def __init__(self, source: GlooSource, worker_rank: int) -> None:
        self._group = GlooGroup(source.host, source.port, 1 + worker_rank, source.world_size)

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Receive a bucket into a buffer on any device, by way of main memory. Buckets come in order.

        Raises:
            RuntimeError: it did not arrive in time; the group is unusable then.
        """
        here_E = buffer_E if buffer_E.device.type == "cpu" else torch.empty_like(buffer_E, device="cpu")
        self._group.broadcast(here_E.view(torch.uint8))
        if here_E is not buffer_E:
            buffer_E.copy_(here_E)

    def close(self) -> None:
        """Do nothing: the group ends with its last reference."""


# ----------------------------------------------------------------------------------------------------------------------
# Source `nccl`: the trainer broadcasts each bucket to all workers, from GPU memory to GPU memory.


class NcclReceiver:
    """One rank of the communicator: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        NcclError: the communicator could not be created, or the ranks could not connect, in time.
    """

    def __init__(self, source: NcclSource, device: torch.device, worker_rank: int) -> None:
        self._communicator = Communicator(b64decode(source.unique_id), 1 + worker_rank, source.world_size)
        self._receive(torch.empty(1, dtype=torch.uint8, device=device))  # the first broadcast connects the ranks

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Receive a bucket into a buffer on the GPU, on the current stream. Buckets come in order.

        Raises:
            NcclError: it did not arrive in time; the communicator is unusable then.
        """
        self._receive(buffer_E)

    def _receive(self, buffer_E: Tensor) -> None:
        stream = torch.cuda.current_stream(buffer_E.device)
        self._communicator.broadcast(buffer_E.data_ptr(), buffer_E.nbytes, root=0, stream=stream.cuda_stream)
        self._communicator.wait(stream.query)

    def close(self) -> None:
        """Leave the communicator. A bucket that is being received ends in an error."""
        self._communicator.close()
