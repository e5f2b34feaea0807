"""Weights in the trainer's memory that a worker has mapped: of the sources `cuda_ipc` and `main_memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_server.protocol.weights import MappedTensor
from vllm_server.worker.packed import Layout


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
