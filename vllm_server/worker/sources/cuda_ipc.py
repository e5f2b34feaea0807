"""Source `cuda_ipc`: the trainer's own parameters, mapped once and copied from GPU memory to GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_server.protocol.weights import CudaIpcSource
from vllm_server.worker.packed import Layout
from vllm_server.worker.transports.cuda_ipc import mapped, visible_index


class ParameterMap:
    """Holds the mapping of the trainer's parameters.

    Args:
        layouts: of the buckets.

    Raises:
        ValueError: this process does not see the trainer's GPU, or a tensor of a bucket is missing.
    """

    def __init__(self, source: CudaIpcSource, layouts: Sequence[Layout]) -> None:
        index = visible_index(source.gpu_uuid)
        storages = [mapped(handle, index) for handle in source.storages]
        self._layouts = layouts
        self._theirs: dict[str, Tensor] = {}
        for name, view in source.tensors.items():
            storage = storages[view.storage]
            empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
            self._theirs[name] = empty.set_(storage, view.offset, view.shape, view.stride)  # pyright: ignore
        if missing := [name for layout in layouts for name in layout.places if name not in self._theirs]:
            raise ValueError(f"no memory was named for {missing[0]} ({len(missing)} in all)")

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Copy a bucket into a buffer, cast to the buffer's dtype. The trainer does not write meanwhile."""
        places = self._layouts[number].places
        targets = [buffer_E[place.offset : place.end].view(place.shape) for place in places.values()]
        torch._foreach_copy_(targets, [self._theirs[name] for name in places])  # pyright: ignore

    def close(self) -> None:
        """Do nothing: the mapping ends with its last reference, which a copy in progress may have."""
