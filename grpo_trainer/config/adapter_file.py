"""A PEFT LoRA checkpoint to start from: what it is, read without torch, so that a wrong one is refused early."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_common.errors import Problem
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import LEGAL_LORA_RANKS, servable_rank
from vllm_server.protocol.adapter_config import refusals
from vllm_server.protocol.flat import decode_header, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class AdapterFile:
    """A servable LoRA checkpoint.

    Attributes:
        r, alpha, rslora: its rank and its scale: alpha / r, or alpha / sqrt(r) with rslora.
        modules: names of the adapted modules within the base model.
        layers: numbers of the layers that it is restricted to; None: no restriction.
        base_model: what it says it was trained on.
    """

    path: Path
    r: int
    alpha: float
    rslora: bool
    modules: tuple[str, ...]
    layers: tuple[int, ...] | None
    base_model: str | None

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Last parts of the modules' names, sorted."""
        return tuple(sorted({module.rpartition(".")[2] for module in self.modules}))


def read_adapter(path: Path) -> AdapterFile:
    """What the checkpoint in a folder is.

    Raises:
        ConfigError: there is none, it is damaged, or vLLM could not serve it; the message names every reason.
    """
    config = _read_config(path)
    if refused := refusals(config, LEGAL_LORA_RANKS[-1]):
        raise ConfigError.of(
            [
                Problem(f"--lora-adapter {path}: {each.field}", each.got, each.wanted, each.fix, "vLLM can't serve it")
                for each in refused
            ]
        )
    if config["r"] not in LEGAL_LORA_RANKS:
        raise ConfigError(
            "vLLM can't serve it",
            field=f"--lora-adapter {path}: r",
            got=config["r"],
            wanted=f"one of {', '.join(map(str, LEGAL_LORA_RANKS))}",
            fix=f"train one of rank {servable_rank(config['r'])}",
        )
    modules = tuple(sorted({_module(name) for name in _tensor_names(path)}))
    layers = sorted({number for module in modules if (number := layer_number(module)) is not None})
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


def layer_number(module: str) -> int | None:
    """The layer that a module lies in: the first number in its name."""
    found = re.search(r"\.(\d+)\.", module)
    return int(found[1]) if found else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            "no adapter there",
            field="--lora-adapter",
            got=path,
            wanted=f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}",
        ) from None
    except ValueError as error:
        raise _damaged(path / CONFIG_FILE, f"no JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha", 0), (int, float)):
        raise ConfigError(
            field=f"--lora-adapter {path}",
            got=f"another {CONFIG_FILE} than PEFT's",
            wanted="an adapter of PEFT's",
            fix="save it by save_pretrained()",
        )
    return {"lora_alpha": 8, **config}  # PEFT's own default


def _tensor_names(path: Path) -> list[str]:
    """Of what is in the weights' file; only its header is read."""
    try:
        with (path / WEIGHTS_FILE).open("rb") as stream:
            names = [span.name for span in decode_header(read_header(stream)).spans]
    except FileNotFoundError:
        raise ConfigError(
            field=f"--lora-adapter {path}",
            got=f"no {WEIGHTS_FILE}",
            wanted=f"{CONFIG_FILE} and {WEIGHTS_FILE}",
            fix="save it by save_pretrained(folder, safe_serialization=True)",
        ) from None
    except ValueError as error:
        raise _damaged(path / WEIGHTS_FILE, f"a damaged file ({error})") from None
    if strange := [name for name in names if not re.search(r"\.lora_[AB]\.weight$", name)]:
        raise ConfigError(
            "vLLM serves adapters on embeddings for some architectures only",
            field=f"--lora-adapter {path}",
            got=strange[0],
            wanted="only lora_A and lora_B of linear modules",
        )
    if not names:
        raise _damaged(path / WEIGHTS_FILE, "no tensors")
    return names


def _damaged(file: Path, got: str) -> ConfigError:
    return ConfigError(field=f"--lora-adapter {file}", got=got, wanted="a file of PEFT's", fix="save it again")


def _module(tensor: str) -> str:
    """`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` as `model.layers.0.self_attn.q_proj`."""
    return re.sub(r"\.lora_[AB]\.weight$", "", tensor.removeprefix("base_model.model."))
