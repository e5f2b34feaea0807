"""Options of the weight bridges: what is trained, and how the server gets the new weights.

One class for each `--weight-bridge-mode`; an illegal combination can't be built.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from grpo_trainer.config.options import Section, option
from grpo_trainer.config.values import Ranges, parse_ranges
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_LORA_NAME, LEGAL_LORA_RANKS, InFlight, Staging, Transport, WeightTransport

SERVED_RANKS = ", ".join(map(str, LEGAL_LORA_RANKS))
log = logging.getLogger(__name__)

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraOptions(Section):
    """LoRA."""

    r: int = option(16, help="Rank of the adapter.", flags=("--lora-r", "--lora-rank"))
    alpha: float = option(32.0, help="Scale the adapter by alpha / r.", flags=("--lora-alpha",), gt=0)
    rslora: bool = option(False, help="Rank-stabilised LoRA: scale by alpha / sqrt(r).", flags=("--lora-rslora",))
    dropout: float = option(
        0.0,
        help="Accepted, without effect: the server samples without dropout, so adapters train without it.",
        flags=("--lora-dropout",),
        ge=0,
        lt=1,
    )
    target_modules: tuple[str, ...] = option(
        ALL_LINEAR, help="Modules with an adapter, comma-separated.", flags=("--lora-target-modules",)
    )
    layers: Ranges | None = option(
        None,
        help="Layers with an adapter, from 0: numbers and ranges such as 0-3,28-31 (default: all).",
        flags=("--lora-layer-indices",),
    )
    adapter: Path | None = option(
        None,
        help="Start from this PEFT LoRA checkpoint, which sets rank, alpha, rslora, modules and layers.",
        flags=("--lora-adapter",),
    )
    name: str = option(DEFAULT_LORA_NAME, help="Versions are served as NAME-v1, NAME-v2, …", flags=("--lora-name",))

    @field_validator("r")
    @classmethod
    def _served_rank(cls, value: int) -> int:
        if value not in LEGAL_LORA_RANKS:
            fitting = next((rank for rank in LEGAL_LORA_RANKS if rank >= value), LEGAL_LORA_RANKS[-1])
            raise ConfigError(wanted=f"a rank that vLLM serves: {SERVED_RANKS}", fix=f"use {fitting}")
        return value

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value:
            log.warning("--lora-dropout: got %g, taken as 0: the server samples without dropout", value)
        return 0.0

    @field_validator("target_modules", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        if not names:
            raise ConfigError(got="no names", wanted="at least one module name, such as q_proj,v_proj")
        return names

    @property
    def layer_indices(self) -> tuple[int, ...] | None:
        """The layers with an adapter, ascending; None: all."""
        return None if self.layers is None else parse_ranges(self.layers)


class ProofOptions(Section):
    """Weight bridge."""

    proof: bool = option(True, help="Before training, prove that the server generates with the trainer's weights.")


class RestartOptions(ProofOptions):
    """The trainer starts vLLM itself, and again on newer weights."""

    vllm_restart_interval: int = option(3, help="Restart vLLM on the newest weights every N steps.", ge=1)


MODE_HELP = (
    "Weight bridge: what is trained, and how new weights reach vLLM (default: lora_only in `grpo run`, none in "
    "`grpo train`)."
)
MODE_FLAGS = ("--weight-bridge-mode",)


class AllWeightsOptions(Section):
    """All weights are trained, or those of some layers."""

    train_layers: Ranges | None = option(
        None,
        help="Train only these layers, counted from 0: numbers and ranges such as 20-31 (default: the whole model).",
        flags=("--train-layer-indices",),
    )

    @property
    def layer_indices(self) -> tuple[int, ...] | None:
        """The layers that are trained, ascending; None: all of the model."""
        return None if self.train_layers is None else parse_ranges(self.train_layers)


class InFlightOptions(Section):
    """The weights of a running server change."""

    in_flight: InFlight = option(
        "keep",
        help="Requests in flight during an update. keep: they continue with their KV cache. recompute: their KV "
        "cache is first computed again with the new weights. abort: they end early.",
    )


class SharedServer(Section):
    """The trainer's model lies in the memory of a server that runs with --shared-weights."""

    config_path: Path | None = option(
        None,
        help="Path of the server's vllm_bridge_config.json (default: the path that the server reports).",
        flags=("--vllm-config-path",),
    )


class CheckpointRestart(AllWeightsOptions, RestartOptions):
    """Weight bridge."""

    means: ClassVar[str] = "all weights, in files; vLLM restarts"
    mode: Literal["none"] = option("none", help=MODE_HELP, flags=MODE_FLAGS)


class SharedVllm(AllWeightsOptions, SharedServer, InFlightOptions, ProofOptions):
    """Shared weights."""

    means: ClassVar[str] = "all weights; one copy for both"
    mode: Literal["shared_vllm"] = option("shared_vllm", help=MODE_HELP, flags=MODE_FLAGS)
    single_copy: bool = option(False, help="The same as --weight-bridge-mode shared_vllm.")
    master_weights: bool = option(
        False, help="Keep an fp32 copy of the trained weights (4 bytes each) instead of stochastic rounding."
    )


class Broadcast(AllWeightsOptions, InFlightOptions, ProofOptions):
    """Weight bridge."""

    means: ClassVar[str] = "all weights, sent to the server"
    mode: Literal["broadcast"] = option("broadcast", help=MODE_HELP, flags=MODE_FLAGS)
    transport: Literal["auto", WeightTransport] = option(
        "auto",
        help="How all weights reach the server. cuda_ipc: shared GPU memory; nccl: a broadcast between GPUs; "
        "main_memory: the server maps sharded weights where they are gathered; gloo: a broadcast between main "
        "memories; disk: a folder that both see; auto: the fastest that works.",
        flags=("--broadcast-transport",),
    )
    staging: Staging = option(
        "auto",
        help="Receive weights into a second buffer while the server generates, so that generation pauses only for a "
        "copy; auto: on if the server's GPU has room for the buffer, and is no trainer process's GPU.",
        flags=("--broadcast-staging",),
    )
    root: Path | None = option(
        None,
        help="Folder for the weights of --broadcast-transport disk: on a disk that the servers see, or in /dev/shm "
        "(default: in --log-dir).",
        flags=("--broadcast-root",),
    )


class LoraOnly(LoraOptions, SharedServer, ProofOptions):
    """LoRA."""

    means: ClassVar[str] = "adapter, loaded while vLLM runs"
    mode: Literal["lora_only"] = option("lora_only", help=MODE_HELP, flags=MODE_FLAGS)
    share_base: bool = option(
        False,
        help="Use the server's base weights instead of a second copy. It needs a server on the same GPU, started with "
        "--shared-weights.",
    )
    keep_versions: int | None = option(
        None,
        help="Adapter versions that stay loaded in the server (default: --max-staleness + 2 if it is set, else 4).",
        flags=("--lora-keep-versions",),
        ge=2,
    )
    transport: Literal["auto", Transport] = option(
        "auto",
        help="How an adapter reaches the server. disk: a folder; memory: the request's body; cuda_ipc: shared GPU "
        "memory; nccl: a broadcast between GPUs; auto: the fastest that works.",
        flags=("--lora-transport",),
    )
    lora_root: Path | None = option(
        None,
        help="Folder for the adapters of --lora-transport disk, e.g. in /dev/shm (default: in --log-dir).",
    )


class LoraRestart(LoraOptions, RestartOptions):
    """LoRA."""

    means: ClassVar[str] = "adapter, merged at restarts"
    mode: Literal["lora_restart"] = option("lora_restart", help=MODE_HELP, flags=MODE_FLAGS)


BridgeConfig = Annotated[
    CheckpointRestart | SharedVllm | Broadcast | LoraOnly | LoraRestart, Field(discriminator="mode")
]
