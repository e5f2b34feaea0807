"""What every way to a server has in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from grpo_trainer.errors import BridgeError
from grpo_trainer.locked_memory import LockedMemory
from grpo_trainer.weights.buckets import Buckets
from vllm_server.protocol import BridgeInfo, MappedTensor, Source, WeightTransport


class NotInPlaceError(BridgeError):
    """The weights lie in memory otherwise than a checkpoint has them."""


@dataclass(frozen=True)
class Gathered:
    """Where sharded weights are gathered, in main memory.

    Attributes:
        memory: the memory; servers may be able to map it.
        tensors: the weights there, by the model's names.
    """

    memory: LockedMemory
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Way:
    """What senders are made from.

    Attributes:
        url: the server's.
        info: what the server says of itself.
        folder: for files; of this server alone.
        buckets: how the weights travel.
        stored: the weights.
        gathered: where they are gathered; None: they are not sharded.
    """

    url: str
    info: BridgeInfo
    folder: Path
    buckets: Buckets
    stored: Mapping[str, Tensor]
    gathered: Gathered | None = None


@dataclass(frozen=True)
class InPlace:
    """A tensor of a checkpoint, its values, and the stored tensor that they are a part of."""

    name: str
    part: Tensor
    stored: Tensor


class WeightSender(Protocol):
    """One way to one server.

    Attributes:
        source: where the server takes the weights from.
        is_ahead: whether a version is complete before the server is asked to take it; else it is sent meanwhile.
    """

    name: WeightTransport
    is_ahead: bool

    @property
    def source(self) -> Source: ...

    def join(self) -> None:
        """Meet the server's workers, which are opening the channel at the same time."""
        ...

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        """Send the present weights, which are those of `version`.

        Args:
            stored: the weights by the model's names, each in its own shape and dtype.

        Raises:
            BridgeError: they can't be sent in this way, or the connection is lost.
        """
        ...

    def close(self) -> None: ...


def in_place(buckets: Buckets, stored: Mapping[str, Tensor], transport: WeightTransport) -> Iterator[InPlace]:
    """Yield each tensor of a checkpoint as the part of the stored tensor's memory that has it.

    Raises:
        NotInPlaceError: a tensor of the checkpoint is no part of a stored one.
    """
    for name, tensor in stored.items():
        for final, part in buckets.plain(name, tensor.detach()).items():
            if part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                raise NotInPlaceError(
                    "transformers converts it for a checkpoint, so its memory can't be read in place",
                    field="--broadcast-transport",
                    got=f"{transport} for {final}",
                    fix="use --broadcast-transport gloo",
                )
            yield InPlace(final, part, tensor)


def mapped_tensor(part: Tensor, storage: int, offset: int) -> MappedTensor:
    """Return where a tensor is: in the storage of this number, at this offset in elements."""
    dtype = str(part.dtype).removeprefix("torch.")
    return MappedTensor(storage=storage, offset=offset, shape=list(part.shape), stride=list(part.stride()), dtype=dtype)


def failed(
    summary: str,
    transport: WeightTransport,
    error: Exception,
    fix: str = "see the server's log; --resume auto continues",
) -> BridgeError:
    """Return the error of a transport that failed."""
    return BridgeError(
        summary,
        field="--broadcast-transport",
        got=f"{transport}: {str(error).strip().partition(chr(10))[0]}",
        fix=fix,
    )
