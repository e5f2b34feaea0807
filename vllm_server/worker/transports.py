"""How a worker takes an adapter from the trainer: a class for each transport (`grpo_trainer/weights/transports`)."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_server.protocol import CudaIpcChannel, NcclChannel
from vllm_server.protocol.flat import read_header
from vllm_server.protocol.nccl import Communicator
from vllm_server.worker.packed import Layout, PackedAdapter, layout_of

# ----------------------------------------------------------------------------------------------------------------------
# Transport `cuda_ipc`: map the trainer's packed adapter and copy it from GPU memory to GPU memory.


def gpu_uuid(index: int) -> str:
    """Return a GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(index).uuid)


def visible_index(uuid: str) -> int:
    """Return the number of the trainer's GPU among those that this process sees.

    Raises:
        ValueError: this process does not see it.
    """
    visible = {gpu_uuid(index): index for index in range(torch.cuda.device_count())}
    if uuid not in visible:
        raise ValueError(f"the trainer's GPU {uuid}, while this worker sees {', '.join(visible)}")
    return visible[uuid]


def mapped(handle: Sequence[int | bool | str], index: int) -> torch.UntypedStorage:
    """Return the trainer's storage, mapped from its handle.

    CUDA must be initialised in this process before a handle is opened. The worker's own tensors ensure that.

    Args:
        index: number of its GPU; see `visible_index`.
    """
    _, *rest = (b64decode(field) if isinstance(field, str) else field for field in handle)
    return torch.UntypedStorage._new_shared_cuda(index, *rest)


class CudaIpcReceiver:
    """Holds the mapping of the trainer's buffer.

    Raises:
        ValueError: this process does not see the trainer's GPU.
    """

    def __init__(self, channel: CudaIpcChannel, settings: str, device: torch.device) -> None:
        storage = mapped(channel.handle, visible_index(channel.gpu_uuid))
        self._layout: Layout = layout_of(b64decode(channel.header), settings)
        bytes_B = torch.empty(0, dtype=torch.uint8, device=storage.device)
        bytes_B.set_(storage, 0, (channel.nbytes,), (1,))  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._theirs_E: Tensor = bytes_B.view(self._layout.dtype)
        # From another GPU one large copy is faster than hundreds of small ones.
        self._own_E = None if storage.device == device else torch.empty_like(self._theirs_E, device=device)

    def receive(self) -> PackedAdapter:
        """Return the adapter that the trainer packed last. The trainer packs the next one only after our answer."""
        if self._own_E is None:
            return PackedAdapter(self._layout, self._theirs_E, lasting=True)
        self._own_E.copy_(self._theirs_E, non_blocking=True)
        return PackedAdapter(self._layout, self._own_E, lasting=True)

    def close(self) -> None:
        """Unmap the trainer's memory (it stays mapped while a view exists)."""
        del self._theirs_E, self._own_E


# ----------------------------------------------------------------------------------------------------------------------
# Transports `disk` and `memory`: the worker reads a safetensors file, on a disk or in memory.


class FileReader:
    """Reads files of one layout into the same memory, one after the other.

    A file is read in one piece into pinned memory and copied from there to the GPU: mapping it costs more, in page
    faults.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[bytes, str] | None = None
        self._layout: Layout | None = None
        self._host_E = torch.empty(0)
        self._device_E = self._host_E

    def read(self, path: Path, settings: str) -> PackedAdapter:
        """Return the file's adapter, which is valid until the next read.

        Raises:
            ValueError: the file is damaged; the message says how.
        """
        with path.open("rb") as stream:
            layout = self._layout_of(read_header(stream), settings)
            target = self._host_E.view(torch.uint8).numpy().data
            if (got := stream.readinto(target)) != len(target):
                raise ValueError(f"a file that ends early ({got} of {len(target)} bytes)")
        if self._device_E is not self._host_E:
            self._device_E.copy_(self._host_E, non_blocking=True)
        return PackedAdapter(layout, self._device_E, lasting=True)

    def _layout_of(self, header: bytes, settings: str) -> Layout:
        if self._layout is None or self._known != (header, settings):
            layout = layout_of(header, settings)
            on_gpu = self._device.type == "cuda"
            self._host_E = torch.empty(layout.numel, dtype=layout.dtype, pin_memory=on_gpu)
            self._device_E: Tensor = torch.empty_like(self._host_E, device=self._device) if on_gpu else self._host_E
            self._layout, self._known = layout, (header, settings)
        return self._layout


# ----------------------------------------------------------------------------------------------------------------------
# Transport `nccl`: the trainer broadcasts its packed adapter to every worker, over NVLink, PCIe or the network.


class NcclReceiver:
    """One rank of the communicator: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        NcclError: the communicator could not be created in time.
    """

    def __init__(self, channel: NcclChannel, settings: str, device: torch.device, worker_rank: int) -> None:
        self._layout = layout_of(b64decode(channel.header), settings)
        self._buffer_E = torch.empty(self._layout.numel, dtype=self._layout.dtype, device=device)
        self._communicator = Communicator(b64decode(channel.unique_id), 1 + worker_rank, channel.world_size)
        self._receive()  # the first broadcast connects the ranks, and takes longest

    def receive(self) -> PackedAdapter:
        """Return the adapter that the trainer broadcasts now.

        Raises:
            NcclError: it did not arrive in time; the communicator is unusable then.
        """
        self._receive()
        return PackedAdapter(self._layout, self._buffer_E, lasting=True)

    def _receive(self) -> None:
        stream = torch.cuda.current_stream()
        nbytes = self._buffer_E.numel() * self._buffer_E.element_size()
        self._communicator.broadcast(self._buffer_E.data_ptr(), nbytes, root=0, stream=stream.cuda_stream)
        self._communicator.wait(stream.query)

    def close(self) -> None:
        """Leave the communicator."""
        self._communicator.close()
