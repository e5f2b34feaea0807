"""Options of a trainer of several processes, and what each of them then holds. Imports no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from grpo_trainer.config.bridge import Broadcast, CheckpointRestart, SharedVllm
from grpo_trainer.config.options import Section, option

if TYPE_CHECKING:
    from grpo_trainer.config.train import TrainConfig

BUCKET_BYTES = 256 << 20
"""Size of the buffers in which gradients of several processes are summed."""


class DistributedConfig(Section):
    """Several trainer processes."""

    trainer_rank: int | None = option(
        None, help="Rank of this process, from 0 (default: RANK, as torchrun sets it).", ge=0
    )
    world_size: int | None = option(
        None,
        help="Number of trainer processes, one for each GPU; each takes a share of every batch (default: "
        "WORLD_SIZE, or 1).",
        ge=1,
    )
    sharding: Literal["auto", "none", "full"] = option(
        "auto",
        help="none: each process holds all weights, gradients and optimizer states. full: each holds a shard (FSDP2). "
        "auto: full in the modes none and broadcast, except with a reference model. In shared_vllm only "
        "the optimizer states are sharded.",
    )
    init_method: str | None = option(
        None, help="Rendezvous address, e.g. tcp://127.0.0.1:29500 (default: MASTER_ADDR and MASTER_PORT)."
    )

    @property
    def rank(self) -> int:
        """This process's number: by the options, else by torchrun's environment variables."""
        return int(os.environ.get("RANK", 0)) if self.trainer_rank is None else self.trainer_rank

    @property
    def processes(self) -> int:
        """Trainer processes, likewise."""
        return int(os.environ.get("WORLD_SIZE", 1)) if self.world_size is None else self.world_size


def wants_parts(config: TrainConfig) -> bool:
    """Whether each of several processes is to hold a part of the weights, if that can be (`why_whole`)."""
    asked = config.distributed.sharding
    return asked == "full" or (asked == "auto" and isinstance(config.bridge, CheckpointRestart | Broadcast))


def shards_update(config: TrainConfig) -> bool:
    """Whether each of several processes holds all weights, in its server's memory, and a part of the states."""
    return isinstance(config.bridge, SharedVllm) and not shards_weights(config)


def shards_weights(config: TrainConfig) -> bool:
    """Whether each of several processes holds a shard of each weight, in the memory of its worker of one server."""
    return isinstance(config.bridge, SharedVllm) and config.vllm.tensor_parallel_size > 1


def why_whole(config: TrainConfig) -> str | None:
    """What speaks against cutting the weights over the processes, if anything does."""
    if not isinstance(config.bridge, CheckpointRestart | Broadcast):
        return f"belongs to --weight-bridge-mode none and broadcast, but the mode is {config.bridge.mode}"
    if config.loss.needs_reference:
        return "can't hold a reference (--kl-beta, --log-kl)"
    return None
