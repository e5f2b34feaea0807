"""The interface of transports, their requirements, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from grpo_common.errors import Problem
from grpo_trainer.errors import BridgeError
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.packed import PackedAdapter
from vllm_server.protocol import BridgeInfo, LoraLoadResponse, Transport, machine_id

log = logging.getLogger(__name__)

ORDER: tuple[Transport, ...] = ("cuda_ipc", "nccl", "memory", "disk")
"""From the fastest to the slowest; each works in more setups than the ones before it."""


@dataclass(frozen=True)
class Sent:
    """A publish that the server has answered.

    Attributes:
        pack_seconds: time to make the adapter ready to send (in GPU memory, in a file, …).
    """

    answer: LoraLoadResponse
    pack_seconds: float


class AdapterTransport(Protocol):
    """An open connection by which adapters reach the server."""

    name: Transport

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        """Publish the adapter's present values under a name."""
        ...

    def close(self) -> None:
        """Free the resources of this transport, here and in the server."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where trainer and server run, as far as transports depend on it.

    Attributes:
        gpu_uuid: the trainer's GPU; empty on a CPU.
        machine: the trainer's `machine_id()`.
    """

    gpu_uuid: str
    machine: str
    info: BridgeInfo


def layout(packed: PackedAdapter, info: BridgeInfo) -> Layout:
    """Return the layout of this process and the server."""
    device = packed.buffer_E.device
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return Layout(uuid, machine_id(), info)


def obstacle(transport: Transport, where: Layout) -> Problem | None:
    """Return why a transport can't work here; None if there is no known reason."""
    if transport in ("memory", "disk"):
        return None
    if not where.gpu_uuid:
        return Problem("trainer", "a CPU", "a GPU")
    workers = where.info.workers
    if any(not worker.gpu_uuid for worker in workers):
        return Problem("server", "a CPU", "a GPU")
    if transport == "cuda_ipc":
        if where.machine != where.info.machine:
            return Problem("server", f"machine {where.info.machine}", f"{where.machine}, the trainer's")
        for worker in workers:
            if where.gpu_uuid not in worker.visible_gpus:
                visible = ", ".join(worker.visible_gpus) or "none"
                return Problem(f"CUDA_VISIBLE_DEVICES of the server's worker {worker.rank}", visible, where.gpu_uuid)
    elif any(worker.gpu_uuid == where.gpu_uuid for worker in workers):
        wanted = "another GPU than the trainer's"
        return Problem("server", f"GPU {where.gpu_uuid}", wanted, summary="NCCL takes one rank a GPU")
    return None


def open_transport(
    wanted: Transport | None, packed: PackedAdapter, server: ServerClient, info: BridgeInfo, root: Path, keep_files: int
) -> AdapterTransport:
    """Open the wanted transport, or the fastest that works here, and log which and why.

    Args:
        wanted: None for the fastest.
        root: folder for `disk`, which the server may read.
        keep_files: number of versions whose files `disk` keeps.

    Raises:
        BridgeError: the wanted transport, or every transport, can't work here.
    """
    where = layout(packed, info)
    reasons: list[Problem] = []
    for name in ORDER if wanted is None else (wanted,):
        reason = obstacle(name, where)
        if reason is None:
            try:
                opened = OPENERS[name](packed, server, info, root, keep_files)
            except RuntimeError as error:  # from the server, CUDA or NCCL; the next transport may work
                reason = error
            else:
                because = f" ({'; '.join(map(str, reasons))})" if reasons else ""
                log.info("adapters go to the server by %s%s", name, because)
                return opened
        reasons.append(Problem(f"not {name}", summary=str(reason)))
    fix = "use --lora-transport auto, which takes the fastest that works" if wanted else ""
    raise BridgeError.of(
        [Problem("--lora-transport", wanted or "auto", fix=fix, summary="adapters can't go to the server"), *reasons]
    )


def _cuda_ipc(packed: PackedAdapter, server: ServerClient, info: BridgeInfo, root: Path, keep: int) -> AdapterTransport:
    from grpo_trainer.weights.transports.cuda_ipc import CudaIpc

    return CudaIpc(packed, server)


def _nccl(packed: PackedAdapter, server: ServerClient, info: BridgeInfo, root: Path, keep: int) -> AdapterTransport:
    from grpo_trainer.weights.transports.nccl import Nccl

    return Nccl(packed, server, 1 + len(info.workers))


def _memory(packed: PackedAdapter, server: ServerClient, info: BridgeInfo, root: Path, keep: int) -> AdapterTransport:
    from grpo_trainer.weights.transports.memory import Memory

    return Memory(packed, server)


def _disk(packed: PackedAdapter, server: ServerClient, info: BridgeInfo, root: Path, keep: int) -> AdapterTransport:
    from grpo_trainer.weights.transports.disk import Disk

    return Disk(packed, server, root, info.lora_name, keep)


OPENERS: dict[Transport, Callable[[PackedAdapter, ServerClient, BridgeInfo, Path, int], AdapterTransport]] = {
    "cuda_ipc": _cuda_ipc,
    "nccl": _nccl,
    "memory": _memory,
    "disk": _disk,
}
