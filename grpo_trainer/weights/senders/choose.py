"""The choice of a way for all weights: what each needs, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_common.errors import Problem
from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.gpus import gpu_uuid, not_apart, unmappable
from grpo_trainer.weights.senders.cuda_ipc import IpcSender, NotInPlaceError
from grpo_trainer.weights.senders.disk import FolderSender
from grpo_trainer.weights.senders.gloo import GlooSender
from grpo_trainer.weights.senders.nccl import NcclSender
from grpo_trainer.weights.senders.sender import Way, WeightSender
from vllm_server.protocol import BridgeInfo, WeightTransport, machine_id
from vllm_server.protocol.nccl import NcclError

SENDERS: dict[WeightTransport, Callable[[Way], WeightSender]] = {
    "nccl": NcclSender,
    "cuda_ipc": IpcSender,
    "gloo": GlooSender,
    "disk": FolderSender,
}

AUTOMATIC: tuple[WeightTransport, ...] = ("nccl", "cuda_ipc", "gloo")
"""What `auto` tries, in this order: `nccl` has an obstacle if trainer and server share a GPU, `gloo` has none."""


@dataclass(frozen=True)
class TrainerPlace:
    """Where the trainer's weights are, as far as transports depend on it.

    Attributes:
        gpu: UUID of this process's GPU; empty if the weights are on a CPU.
        machine: the trainer's `machine_id()`.
        sharded: over several processes.
    """

    gpu: str
    machine: str
    sharded: bool = False

    @classmethod
    def of(cls, stored: Mapping[str, Tensor]) -> TrainerPlace:
        first = next(iter(stored.values()))
        return cls(gpu_uuid(first.device), machine_id(), isinstance(first, DTensor))


def obstacle(transport: WeightTransport, trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    """Return why a transport can't work here; None if there is no known reason."""
    match transport:
        case "cuda_ipc":
            if not trainer.gpu or trainer.sharded:
                return Problem("trainer", "weights on a CPU, or sharded over processes", "weights on one GPU")
            return unmappable(trainer.gpu, trainer.machine, info)
        case "nccl":
            return not_apart(trainer.gpu, info)
        case "gloo" | "disk":
            return None


def senders(asked: Literal["auto", WeightTransport], way: Way) -> Iterator[WeightSender]:
    """Yield senders for `--broadcast-transport`: one for a named transport, for `auto` the fastest, then the next.

    Ask for the next one only if the server can't be reached by the one before. `disk` is never tried unasked, because
    nothing shows beforehand that the server sees the folder.

    Raises:
        BridgeError: the transport that was asked for can't work here.
    """
    trainer = TrainerPlace.of(way.stored)
    if asked == "auto":
        for each in AUTOMATIC:
            if obstacle(each, trainer, way.info) is None:
                with suppress(NotInPlaceError, NcclError):
                    yield SENDERS[each](way)
        return
    if (problem := obstacle(asked, trainer, way.info)) is not None:
        summary = f"--broadcast-transport {asked} can't reach the server"
        raise BridgeError.of([replace(problem, summary=summary, fix="use --broadcast-transport auto")])
    yield SENDERS[asked](way)
