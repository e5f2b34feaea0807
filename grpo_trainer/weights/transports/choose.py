"""The choice of a transport: the order in which they are tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from grpo_common.errors import Problem
from grpo_trainer.errors import BridgeError
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.gpus import TrainerPlace, obstacle
from grpo_trainer.weights.packed import PackedAdapter
from grpo_trainer.weights.transports.cuda_ipc import CudaIpc
from grpo_trainer.weights.transports.disk import Disk
from grpo_trainer.weights.transports.memory import Memory
from grpo_trainer.weights.transports.nccl import Nccl
from grpo_trainer.weights.transports.transport import AdapterTransport
from vllm_server.protocol import BridgeInfo, Transport

log = logging.getLogger(__name__)

Open = Callable[[PackedAdapter, ServerClient, BridgeInfo, Path, int], AdapterTransport]
"""Takes the adapter, the server, what it says of itself, and the folder and number of versions of `disk`."""

OPENERS: dict[Transport, Open] = {
    "cuda_ipc": lambda packed, server, info, root, keep: CudaIpc(packed, server),
    "nccl": lambda packed, server, info, root, keep: Nccl(packed, server, 1 + len(info.workers)),
    "memory": lambda packed, server, info, root, keep: Memory(packed, server),
    "disk": lambda packed, server, info, root, keep: Disk(packed, server, root, info.lora_name, keep),
}
"""From the fastest to the slowest; each works in more setups than the ones before it."""


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
    trainer = TrainerPlace.of(packed.buffer_E)
    reasons: list[Problem] = []
    for name in OPENERS if wanted is None else (wanted,):
        reason = obstacle(name, trainer, info)
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
