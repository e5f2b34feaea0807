"""The choice of a way for all weights: what each needs, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

SENDERS: dict[WeightTransport, Callable[[Way], WeightSender]] = {
    "cuda_ipc": IpcSender,
    "nccl": NcclSender,
    "gloo": GlooSender,
    "disk": FolderSender,
}
"""From the fastest to the slowest: `auto` is the first without an obstacle."""


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


def open_sender(asked: Literal["auto", WeightTransport], way: Way) -> WeightSender:
    """Return the sender for `--broadcast-transport`.

    Raises:
        BridgeError: the transport that was asked for can't work here.
    """
    trainer = TrainerPlace.of(way.stored)
    if asked == "auto":
        for each in SENDERS:
            if obstacle(each, trainer, way.info) is None:
                with suppress(NotInPlaceError):
                    return SENDERS[each](way)
        raise AssertionError("gloo has no obstacle")
    if (problem := obstacle(asked, trainer, way.info)) is not None:
        summary = f"--broadcast-transport {asked} can't reach the server"
        raise BridgeError.of([replace(problem, summary=summary, fix="use --broadcast-transport auto")])
    return SENDERS[asked](way)
