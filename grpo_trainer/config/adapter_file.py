"""A PEFT LoRA checkpoint to start from: what it is, read without torch, so that a wrong one is refused early."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_common.errors import Problem
from grpo_trainer.config.values import format_ranges
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import LEGAL_LORA_RANKS, servable_rank
from vllm_server.protocol.adapter_config import refusals
from vllm_server.protocol.flat import decode_header, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
FLAG = "--lora-adapter"


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
            "lora_layer_indices": None if self.layers is None else format_ranges(self.layers),
        }


def read_adapter(path: Path) -> AdapterFile:
    """Read the checkpoint in a folder.

    Raises:
        ConfigError: there is none, it is damaged, or vLLM could not serve it; the message names every reason.
    """
    config = _read_config(path)
    why = "vLLM can't serve it"
    if refused := refusals(config, LEGAL_LORA_RANKS[-1]):
        raise ConfigError.of([Problem(f"{FLAG} {path}: {r.field}", r.got, r.wanted, r.fix, why) for r in refused])
    if config["r"] not in LEGAL_LORA_RANKS:
        wanted, fix = (
            f"one of {', '.join(map(str, LEGAL_LORA_RANKS))}",
            f"train one of rank {servable_rank(config['r'])}",
        )
        raise ConfigError(why, field=f"{FLAG} {path}: r", got=config["r"], wanted=wanted, fix=fix)
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


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        wanted = f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise ConfigError("no adapter there", field=FLAG, got=path, wanted=wanted) from None
    except ValueError as error:
        raise _damaged(path / CONFIG_FILE, f"no JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha", 0), (int, float)):
        raise _damaged(path / CONFIG_FILE, "another file than PEFT's")
    return {"lora_alpha": 8, **config}  # PEFT's own default


def _tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in the weights' file; only its header is read."""
    file = path / WEIGHTS_FILE
    try:
        with file.open("rb") as stream:
            names = [span.name for span in decode_header(read_header(stream)).spans]
    except FileNotFoundError:
        fix, wanted = "save it by save_pretrained(folder, safe_serialization=True)", f"{CONFIG_FILE} and {WEIGHTS_FILE}"
        raise ConfigError(field=f"{FLAG} {path}", got=f"no {WEIGHTS_FILE}", wanted=wanted, fix=fix) from None
    except ValueError as error:
        raise _damaged(file, f"a damaged file ({error})") from None
    if strange := [name for name in names if not re.search(r"\.lora_[AB]\.weight$", name)]:
        why, wanted = (
            "vLLM serves adapters on embeddings for some architectures only",
            "only lora_A and lora_B of linear",
        )
        raise ConfigError(why, field=f"{FLAG} {path}", got=strange[0], wanted=f"{wanted} modules")
    if not names:
        raise _damaged(file, "no tensors")
    return names


def _damaged(file: Path, got: str) -> ConfigError:
    return ConfigError(field=f"{FLAG} {file}", got=got, wanted="a file of PEFT's", fix="save it by save_pretrained()")
