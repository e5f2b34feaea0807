"""Transport `main_memory`: the server maps the main memory in which sharded weights are gathered."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from grpo_trainer.weights.senders.sender import NotInPlaceError, Way, in_place, mapped_tensor
from vllm_server.protocol import MainMemorySource, WeightTransport


class MemorySender:
    """Lets the server map the gathered weights.

    Raises:
        NotInPlaceError: a tensor of the checkpoint is no part of a gathered one, or no process can map this memory.
    """

    name: WeightTransport = "main_memory"
    is_ahead = True

    def __init__(self, way: Way) -> None:
        gathered = way.gathered
        assert gathered is not None, "weights of one process are an obstacle"
        memory, tensors = gathered.memory, {}
        if not memory.path:
            raise NotInPlaceError(
                "this system gives no memory that processes can share",
                field="--broadcast-transport",
                got=f"{self.name}, and memfd_create failed",
                fix="use --broadcast-transport gloo",
            )
        for each in in_place(way.buckets, gathered.tensors, self.name):
            place = (each.part.data_ptr() - memory.address) if each.part.numel() else 0
            tensors[each.name] = mapped_tensor(each.part, 0, place // each.part.dtype.itemsize)
        self.source = MainMemorySource(name=memory.name, path=memory.path, nbytes=len(memory), tensors=tensors)

    def join(self) -> None: ...

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        """Do nothing: the weights were gathered where the server reads them."""

    def close(self) -> None: ...
