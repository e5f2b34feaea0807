"""Options of the weight bridge: what is trained, how the server gets the new weights, which mode has which option."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import field_validator

from grpo_common.errors import Problem
from grpo_trainer.config.options import Ranges, Section, option, warn
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_LORA_NAME, LEGAL_LORA_RANKS, InFlight, refusals, servable_rank
from vllm_server.protocol.channels import Staging, Transport, WeightTransport
from vllm_server.protocol.flat import decode_header, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ADAPTER_FLAG = "--lora-adapter"

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
MODE_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("lora_r", "lora_alpha", "lora_rslora", "lora_dropout", "lora_target_modules"), ADAPTER_MODES),
        **dict.fromkeys(("lora_layer_indices", "lora_adapter", "lora_name"), ADAPTER_MODES),
        **dict.fromkeys(("share_base", "lora_keep_versions", "lora_transport", "lora_root"), ("lora_only",)),
        **dict.fromkeys(("broadcast_transport", "broadcast_staging", "broadcast_root"), ("broadcast",)),
        **dict.fromkeys(("single_copy", "master_weights"), ("shared_vllm",)),
        "in_flight": ("shared_vllm", "broadcast"),
        "vllm_config_path": ("shared_vllm", "lora_only"),
        "vllm_restart_interval": ("none", "lora_restart"),
        "train_layer_indices": ALL_WEIGHTS_MODES,
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
    a broadcast between GPUs; gloo: a broadcast between main memories; auto: the fastest that works."""
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
            warn("--lora-dropout: got %g, taken as 0: the server samples without dropout", value)
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
        return self.lora_layer_indices if self.trains_adapter else self.train_layer_indices

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


# An adapter to start from: a PEFT checkpoint, read without torch, so that a wrong one is refused early -----------


@dataclass(frozen=True)
class AdapterFile:
    """A servable LoRA checkpoint."""

    path: Path
    r: int
    alpha: float
    rslora: bool
    """The scale is alpha / r, or alpha / sqrt(r) with rslora."""
    modules: tuple[str, ...]
    """Names of the adapted modules within the base model."""
    layers: tuple[int, ...] | None
    """Numbers of the layers that it is restricted to; None: no restriction."""
    base_model: str | None
    """What it says it was trained on."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Last parts of the modules' names, sorted."""
        return tuple(sorted({module.rpartition(".")[2] for module in self.modules}))

    @property
    def options(self) -> dict[str, Any]:
        """The options that it decides, by their names."""
        return {
            "lora_r": self.r,
            "lora_alpha": self.alpha,
            "lora_rslora": self.rslora,
            "lora_target_modules": list(self.target_modules),
            "lora_layer_indices": None if self.layers is None else list(self.layers),
        }


def read_adapter(path: Path) -> AdapterFile:
    """Read the checkpoint in a folder.

    Raises:
        ConfigError: it is missing or damaged; or vLLM could not serve it, with every reason.
    """
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        wanted = f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise ConfigError("no adapter there", field=ADAPTER_FLAG, got=path, wanted=wanted) from None
    except ValueError as error:
        raise _damaged(path / CONFIG_FILE, f"no JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha", 0), (int, float)):
        raise _damaged(path / CONFIG_FILE, "another file than PEFT's")
    config = {"lora_alpha": 8, **config}  # PEFT's own default
    where, why = f"{ADAPTER_FLAG} {path}", "vLLM can't serve it"
    if refused := refusals(config, LEGAL_LORA_RANKS[-1]):
        raise ConfigError.of([Problem(f"{where}: {r.field}", r.got, r.wanted, r.fix, why) for r in refused])
    if config["r"] not in LEGAL_LORA_RANKS:
        fix = f"train one of rank {servable_rank(config['r'])}"
        raise ConfigError(why, field=f"{where}: r", got=config["r"], wanted=f"one of {SERVED_RANKS}", fix=fix)
    names = (tensor.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for tensor in _tensor_names(path))
    modules = tuple(sorted({*names}))
    layers = sorted({int(found[1]) for module in modules if (found := re.search(r"\.(\d+)\.", module))})
    restricted = config.get("layers_to_transform") is not None or layers != list(range(len(layers)))
    return AdapterFile(
        path=path,
        r=config["r"],
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        modules=modules,
        layers=tuple(layers) if restricted else None,
        base_model=config.get("base_model_name_or_path"),
    )


def _tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in the weights' file; only its header is read."""
    file = path / WEIGHTS_FILE
    try:
        with file.open("rb") as stream:
            names = [span.name for span in decode_header(read_header(stream)).spans]
    except FileNotFoundError:
        fix = "save it by save_pretrained(folder, safe_serialization=True)"
        wanted = f"{CONFIG_FILE} and {WEIGHTS_FILE}"
        raise ConfigError(field=f"{ADAPTER_FLAG} {path}", got=f"no {WEIGHTS_FILE}", wanted=wanted, fix=fix) from None
    except ValueError as error:
        raise _damaged(file, f"a damaged file ({error})") from None
    if strange := [name for name in names if not re.search(r"\.lora_[AB]\.weight$", name)]:
        why = "vLLM serves adapters on embeddings for some architectures only"
        wanted = "only lora_A and lora_B of linear modules"
        raise ConfigError(why, field=f"{ADAPTER_FLAG} {path}", got=strange[0], wanted=wanted)
    if not names:
        raise _damaged(file, "no tensors")
    return names


def _damaged(file: Path, got: str) -> ConfigError:
    return ConfigError(
        field=f"{ADAPTER_FLAG} {file}", got=got, wanted="a file of PEFT's", fix="save it by save_pretrained()"
    )
