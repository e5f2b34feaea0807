"""The GPUs of trainer and server: which memory a server can map (CUDA IPC), and whether NCCL can connect them."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from grpo_common.errors import Problem
from vllm_server.protocol import BridgeInfo, Transport, WeightTransport, machine_id


def gpu_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def handle_of(storage: torch.UntypedStorage) -> list[int | bool | str]:
    """Return the handle by which another process maps the storage, its bytes in base64."""
    return [b64encode(field).decode() if isinstance(field, bytes) else field for field in storage._share_cuda_()]


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
    def of(cls, tensor: torch.Tensor) -> TrainerPlace:
        return cls(gpu_uuid(tensor.device), machine_id(), isinstance(tensor, DTensor))


def obstacle(transport: Transport | WeightTransport, trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    """Return why a transport can't work here; None if there is no known reason."""
    if transport == "main_memory":
        return _not_beside(trainer, info)
    if transport not in ("cuda_ipc", "nccl"):
        return None
    if not trainer.gpu:
        return Problem("trainer", "a CPU", "a GPU")
    if any(not worker.gpu_uuid for worker in info.workers):
        return Problem("server", "a CPU", "a GPU")
    return _unmappable(trainer, info) if transport == "cuda_ipc" else _not_apart(trainer, info)


def _elsewhere(trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    if trainer.machine == info.machine:
        return None
    return Problem("server", f"machine {info.machine}", f"{trainer.machine}, the trainer's")


def _not_beside(trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    """Return why the server can't map main memory that has the trainer's weights."""
    if not trainer.sharded:
        return Problem("trainer", "weights in one process", "weights sharded over processes, and gathered")
    return _elsewhere(trainer, info)


def _unmappable(trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    """Return why the server can't map the memory of the trainer's GPU."""
    if trainer.sharded:
        return Problem("trainer", "weights sharded over processes", "weights on one GPU")
    if (problem := _elsewhere(trainer, info)) is not None:
        return problem
    for worker in info.workers:
        if trainer.gpu not in worker.visible_gpus:
            visible = ", ".join(worker.visible_gpus) or "none"
            return Problem(f"CUDA_VISIBLE_DEVICES of the server's worker {worker.rank}", visible, trainer.gpu)
    return None


def _not_apart(trainer: TrainerPlace, info: BridgeInfo) -> Problem | None:
    """Return why NCCL can't connect the trainer's GPU with those of the server's workers."""
    if any(worker.gpu_uuid == trainer.gpu for worker in info.workers):
        wanted = "another GPU than the trainer's"
        return Problem("server", f"GPU {trainer.gpu}", wanted, summary="NCCL takes one rank a GPU")
    return None
