"""Transport `cuda_ipc`: the server maps the trainer's parameters, so that nothing is packed or sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.gpus import gpu_uuid, handle_of
from grpo_trainer.weights.senders.sender import Way
from vllm_server.protocol import WeightTransport
from vllm_server.protocol.weights import CudaIpcSource, IpcView


class NotInPlaceError(BridgeError):
    """The weights lie in memory otherwise than a checkpoint has them."""


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
        self.source = CudaIpcSource(gpu_uuid=gpu_uuid(self._device), storages=storages, tensors=tensors)

    def join(self) -> None: ...

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        """Wait until the parameters are written: the server's process can't wait for our stream."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None: ...
