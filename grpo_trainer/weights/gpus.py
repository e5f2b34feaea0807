"""The GPUs of trainer and server: which memory a server can map (CUDA IPC), and whether NCCL can connect them."""

from __future__ import annotations

from base64 import b64encode

import torch

from grpo_common.errors import Problem
from vllm_server.protocol import BridgeInfo


def gpu_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def handle_of(storage: torch.UntypedStorage) -> list[int | bool | str]:
    """Return the handle by which another process maps the storage, its bytes in base64."""
    return [b64encode(field).decode() if isinstance(field, bytes) else field for field in storage._share_cuda_()]


def unmappable(gpu: str, machine: str, info: BridgeInfo) -> Problem | None:
    """Return why the server can't map memory of a GPU; None if there is no known reason.

    Args:
        gpu: UUID of the GPU.
        machine: the trainer's `machine_id()`.
    """
    if machine != info.machine:
        return Problem("server", f"machine {info.machine}", f"{machine}, the trainer's")
    for worker in info.workers:
        if gpu not in worker.visible_gpus:
            visible = ", ".join(worker.visible_gpus) or "none"
            return Problem(f"CUDA_VISIBLE_DEVICES of the server's worker {worker.rank}", visible, gpu)
    return None


def not_apart(gpu: str, info: BridgeInfo) -> Problem | None:
    """Return why NCCL can't connect a GPU with those of the server's workers; None if there is no known reason.

    Args:
        gpu: UUID of the trainer's GPU; empty on a CPU.
    """
    if not gpu:
        return Problem("trainer", "a CPU", "a GPU")
    if any(not worker.gpu_uuid for worker in info.workers):
        return Problem("server", "a CPU", "a GPU")
    if any(worker.gpu_uuid == gpu for worker in info.workers):
        return Problem("server", f"GPU {gpu}", "another GPU than the trainer's", summary="NCCL takes one rank a GPU")
    return None
