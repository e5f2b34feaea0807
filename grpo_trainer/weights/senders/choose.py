"""The choice of a way for all weights: the order in which they are tried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.gpus import TrainerPlace, obstacle
from grpo_trainer.weights.senders.cuda_ipc import IpcSender
from grpo_trainer.weights.senders.disk import FolderSender
from grpo_trainer.weights.senders.gloo import GlooSender
from grpo_trainer.weights.senders.main_memory import MemorySender
from grpo_trainer.weights.senders.nccl import NcclSender
from grpo_trainer.weights.senders.sender import NotInPlaceError, Way, WeightSender
from vllm_server.protocol import WeightTransport
from vllm_server.protocol.nccl import NcclError

log = logging.getLogger(__name__)

SENDERS: dict[WeightTransport, Callable[[Way], WeightSender]] = {
    "nccl": NcclSender,
    "cuda_ipc": IpcSender,
    "main_memory": MemorySender,
    "gloo": GlooSender,
    "disk": FolderSender,
}

AUTOMATIC: tuple[WeightTransport, ...] = ("main_memory", "nccl", "cuda_ipc", "gloo")
"""What `auto` tries, in this order. `main_memory` has an obstacle if the weights are not sharded, or the server is on
another machine. Otherwise it copies least: sharded weights are gathered in main memory for each transport. `nccl` has
an obstacle if trainer and server share a GPU. `gloo` has none."""


def senders(asked: Literal["auto", WeightTransport], way: Way) -> Iterator[WeightSender]:
    """Yield senders for `--broadcast-transport`: one for a named transport, for `auto` the fastest, then the next.

    Ask for the next one only if the server can't be reached by the one before. `disk` is never tried unasked, because
    nothing shows beforehand that the server sees the folder.

    Raises:
        BridgeError: the transport that was asked for can't work here.
    """
    trainer = TrainerPlace.of(next(iter(way.stored.values())))
    if asked == "auto":
        for each in AUTOMATIC:
            if obstacle(each, trainer, way.info) is None:
                try:
                    sender = SENDERS[each](way)
                except (NotInPlaceError, NcclError) as error:
                    log.info("weights don't go to the server by %s: %s", each, error)
                else:
                    yield sender
        return
    if (problem := obstacle(asked, trainer, way.info)) is not None:
        summary = f"--broadcast-transport {asked} can't reach the server"
        raise BridgeError.of([replace(problem, summary=summary, fix="use --broadcast-transport auto")])
    yield SENDERS[asked](way)
