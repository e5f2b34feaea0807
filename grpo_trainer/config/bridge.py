"""Options of the weight bridge: what is trained, how the server gets the new weights, which mode has which option."""

from __future__ import annotations

import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import field_validator

from grpo_trainer.config.options import Section, option
from grpo_trainer.config.values import Ranges, parse_ranges
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_LORA_NAME, LEGAL_LORA_RANKS, InFlight, Staging, Transport, WeightTransport

log = logging.getLogger(__name__)

SERVED_RANKS = ", ".join(map(str, LEGAL_LORA_RANKS))
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Mode = Literal["none", "shared_vllm", "broadcast", "lora_only", "lora_restart"]
MODES = MappingProxyType(
    {
        "none": "all weights, in files; vLLM restarts",
        "shared_vllm": "all weights; one copy for both",
        "broadcast": "all weights, sent to the server",
        "lora_only": "adapter, loaded while vLLM runs",
        "lora_restart": "adapter, merged at restarts",
    }
)
"""What each mode stands for."""
ADAPTER_MODES = ("lora_only", "lora_restart")
ALL_WEIGHTS_MODES = ("none", "shared_vllm", "broadcast")
MODE_OF = MappingProxyType(
    {
        "vllm_restart_interval": ("none", "lora_restart"),
        "train_layer_indices": ALL_WEIGHTS_MODES,
        "broadcast_transport": ("broadcast",),
        "broadcast_staging": ("broadcast",),
        "broadcast_root": ("broadcast",),
        "in_flight": ("shared_vllm", "broadcast"),
        "vllm_config_path": ("shared_vllm", "lora_only"),
        "single_copy": ("shared_vllm",),
        "master_weights": ("shared_vllm",),
        "lora_r": ADAPTER_MODES,
        "lora_alpha": ADAPTER_MODES,
        "lora_rslora": ADAPTER_MODES,
        "lora_dropout": ADAPTER_MODES,
        "lora_target_modules": ADAPTER_MODES,
        "lora_layer_indices": ADAPTER_MODES,
        "lora_adapter": ADAPTER_MODES,
        "lora_name": ADAPTER_MODES,
        "share_base": ("lora_only",),
        "lora_keep_versions": ("lora_only",),
        "lora_transport": ("lora_only",),
        "lora_root": ("lora_only",),
    }
)
"""The modes of each option that not every mode has. In another mode the option is refused, and its value means
nothing."""


class LoraOptions(Section):
    """LoRA."""

    lora_r: int = option(16, "--lora-rank")
    """Rank of the adapter."""
    lora_alpha: float = option(32.0, gt=0)
    """Scale the adapter by alpha / r."""
    lora_rslora: bool = option(False)
    """Rank-stabilised LoRA: scale by alpha / sqrt(r)."""
    lora_dropout: float = option(0.0, ge=0, lt=1)
    """Accepted, without effect: the server samples without dropout, so adapters train without it."""
    lora_target_modules: tuple[str, ...] = option(ALL_LINEAR)
    """Modules with an adapter, comma-separated."""
    lora_layer_indices: Ranges | None = option(None)
    """Layers with an adapter, from 0: numbers and ranges such as 0-3,28-31 (default: all)."""
    lora_adapter: Path | None = option(None)
    """Start from this PEFT LoRA checkpoint, which sets rank, alpha, rslora, modules and layers."""
    lora_name: str = option(DEFAULT_LORA_NAME)
    """Versions are served as NAME-v1, NAME-v2, …"""
    share_base: bool = option(False)
    """Use the server's base weights instead of a second copy. It needs a server on the same GPU, started with
    --shared-weights."""
    lora_keep_versions: int | None = option(None, ge=2)
    """Adapter versions that stay loaded in the server (default: --max-staleness + 2 if it is set, else 4)."""
    lora_transport: Literal["auto", Transport] = option("auto")
    """How an adapter reaches the server. disk: a folder; memory: the request's body; cuda_ipc: shared GPU memory; nccl:
    a broadcast between GPUs; auto: the fastest that works."""
    lora_root: Path | None = option(None)
    """Folder for the adapters of --lora-transport disk, e.g. in /dev/shm (default: in --log-dir)."""

    @field_validator("lora_r")
    @classmethod
    def _served_rank(cls, value: int) -> int:
        if value not in LEGAL_LORA_RANKS:
            fitting = next((rank for rank in LEGAL_LORA_RANKS if rank >= value), LEGAL_LORA_RANKS[-1])
            raise ConfigError(wanted=f"a rank that vLLM serves: {SERVED_RANKS}", fix=f"use {fitting}")
        return value

    @field_validator("lora_dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value:
            log.warning("--lora-dropout: got %g, taken as 0: the server samples without dropout", value)
        return 0.0

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        if not names:
            raise ConfigError(got="no names", wanted="at least one module name, such as q_proj,v_proj")
        return names


class SharedWeightsOptions(Section):
    """Shared weights."""

    in_flight: InFlight = option("keep")
    """Requests in flight during an update. keep: they continue with their KV cache. recompute: their KV cache is first
    computed again with the new weights. abort: they end early."""
    vllm_config_path: Path | None = option(None)
    """Path of the server's vllm_bridge_config.json (default: the path that the server reports)."""
    single_copy: bool = option(False)
    """The same as --weight-bridge-mode shared_vllm."""
    master_weights: bool = option(False)
    """Keep an fp32 copy of the trained weights (4 bytes each) instead of stochastic rounding."""


class BridgeConfig(SharedWeightsOptions, LoraOptions):
    """Weight bridge."""

    weight_bridge_mode: Mode = option("none", meanings=MODES)
    """Weight bridge: what is trained, and how new weights reach vLLM (default: lora_only in `grpo run`, none in `grpo
    train`)."""
    train_layer_indices: Ranges | None = option(None)
    """Train only these layers, counted from 0: numbers and ranges such as 20-31 (default: the whole model)."""
    proof: bool = option(True)
    """Before training, prove that the server generates with the trainer's weights."""
    vllm_restart_interval: int = option(3, ge=1)
    """Restart vLLM on the newest weights every N steps."""
    broadcast_transport: Literal["auto", WeightTransport] = option("auto")
    """How all weights reach the server. cuda_ipc: shared GPU memory; nccl: a broadcast between GPUs; main_memory: the
    server maps sharded weights where they are gathered; gloo: a broadcast between main memories; disk: a folder that
    both see; auto: the fastest that works."""
    broadcast_staging: Staging = option("auto")
    """Receive weights into a second buffer while the server generates, so that generation pauses only for a copy; auto:
    on if the server's GPU has room for the buffer, and is no trainer process's GPU."""
    broadcast_root: Path | None = option(None)
    """Folder for the weights of --broadcast-transport disk: on a disk that the servers see, or in /dev/shm (default: in
    --log-dir)."""

    @property
    def trains_adapter(self) -> bool:
        """Whether a LoRA adapter is trained; else all weights are, or those of some layers."""
        return self.weight_bridge_mode in ADAPTER_MODES

    @property
    def layer_indices(self) -> tuple[int, ...] | None:
        """The layers that are trained, or have an adapter, ascending; None: all."""
        layers = self.lora_layer_indices if self.trains_adapter else self.train_layer_indices
        return None if layers is None else parse_ranges(layers)

    @property
    def owns_server(self) -> bool:
        """Whether the trainer starts the inference server itself, and again on newer weights."""
        return self.weight_bridge_mode in ("none", "lora_restart")

    @property
    def versions_behind(self) -> int:
        """Versions that the newest samples may lag: a server that is restarted has new weights only then."""
        return self.vllm_restart_interval - 1 if self.owns_server else 0

    @property
    def shares_weights(self) -> bool:
        """Whether the trainer's model lies in the server's memory."""
        return self.weight_bridge_mode == "shared_vllm" or (self.weight_bridge_mode == "lora_only" and self.share_base)

    @property
    def servers_may_change(self) -> bool:
        """Whether servers may leave and join during a run: each server is updated alone, and shares no memory."""
        return self.weight_bridge_mode in ("lora_only", "broadcast") and not self.shares_weights
