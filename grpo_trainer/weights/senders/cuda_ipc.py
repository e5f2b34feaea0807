"""Transport `cuda_ipc`: the server maps the trainer's parameters, so that nothing is packed or sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_trainer.weights.gpus import gpu_uuid, handle_of
from grpo_trainer.weights.senders.sender import Way, in_place, mapped_tensor
from vllm_server.protocol import CudaIpcSource, WeightTransport


class IpcSender:
    """Lets the server map the trainer's parameters.

    Raises:
        NotInPlaceError: a tensor of the checkpoint is no part of a parameter's memory.
    """

    name: WeightTransport = "cuda_ipc"
    is_ahead = True

    def __init__(self, way: Way) -> None:
        self._device = next(iter(way.stored.values())).device
        numbers: dict[int, int] = {}
        storages, tensors = [], {}
        for each in in_place(way.buckets, way.stored, self.name):
            storage = each.stored.untyped_storage()
            if storage.data_ptr() not in numbers:
                numbers[storage.data_ptr()] = len(storages)
                storages.append(handle_of(storage))
            number = numbers[storage.data_ptr()]
            tensors[each.name] = mapped_tensor(each.part, number, int(each.part.storage_offset()))
        self.source = CudaIpcSource(gpu_uuid=gpu_uuid(self._device), storages=storages, tensors=tensors)

    def join(self) -> None: ...

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        """Wait until the parameters are written: the server's process can't wait for our stream."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None: ...
