"""Transport `cuda_ipc`: map the trainer's packed adapter and copy it from GPU memory to GPU memory."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_server.protocol import CudaIpcChannel
from vllm_server.worker.packed import Layout, PackedAdapter, layout_of


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
