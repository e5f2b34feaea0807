"""A model's sizes and files, without loading a weight: its config.json, and tensors by the headers of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_common.models import CONFIG_FILE, config_parts, find_folder
from grpo_trainer.errors import ModelError
from vllm_server.protocol.flat import decode_header, read_header

INDEX_FILE = "model.safetensors.index.json"
SAVE_AGAIN = "save or download the model again"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model."""

    hidden: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    """Experts in each layer; 0: a plain MLP."""
    active_experts: int = 0
    biases: bool = False
    """Whether q, k and v have one each, as Qwen2's."""
    positions: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json (of several parts, the text model's). The `ModelError` of a missing size names it."""
        text = {key: value for part in config_parts(config) for key, value in part.items()}
        hidden, heads = _first(text, "hidden_size", "n_embd"), _first(text, "num_attention_heads", "n_head")
        experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", default=0)
        inner = _first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        return cls(
            hidden=hidden,
            intermediate=(_first(text, "moe_intermediate_size", default=inner) if experts else inner),
            layers=_first(text, "num_hidden_layers", "n_layer"),
            heads=heads,
            kv_heads=_first(text, "num_key_value_heads", default=heads),
            head_dim=_first(text, "head_dim", default=hidden // heads),
            vocab=_first(text, "vocab_size"),
            tied=bool(text.get("tie_word_embeddings", True)),
            experts=experts,
            active_experts=_first(text, "num_experts_per_tok", default=0),
            biases=str(text.get("model_type")).startswith("qwen2"),
            positions=_first(text, "max_position_embeddings", "n_positions", default=0) or None,
        )

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer."""
        attention = 2 * self.hidden * self.q_width + 2 * self.hidden * self.kv_width
        biases = self.q_width + 2 * self.kv_width if self.biases else 0
        mlp = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.hidden * self.experts
        return attention + biases + mlp + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding and of the output layer, one where they are tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def active_intermediate(self) -> int:
        """Width of the MLP that a token passes."""
        return self.intermediate * max(self.active_experts, 1)

    @property
    def module_widths(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linear modules."""
        return {
            "q_proj": (self.hidden, self.q_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.q_width, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def adapter_parameters(self, rank: int, modules: tuple[str, ...], layers: int | None = None) -> int:
        """Elements of a LoRA adapter: `rank * (in + out)` for each module; of `layers` layers, all by default."""
        widths = [sum(widths) for name, widths in self.module_widths.items() if name in modules]
        return rank * sum(widths) * (self.layers if layers is None else layers)

    def slot_parameters(self, rank: int, parts: int = 1) -> int:
        """Elements of a layer's place for an adapter in vLLM, in one of the `parts` of a tensor-parallel server.

        There is one for every linear module and every expert, whatever the adapter changes. Every module has a side of
        the width `hidden`, which no part divides.
        """
        experts, of_mlp = max(self.experts, 1), ("gate_proj", "up_proj", "down_proj")
        widths = {name: self.hidden + (sum(each) - self.hidden) // parts for name, each in self.module_widths.items()}
        return rank * sum(width * (experts if name in of_mlp else 1) for name, width in widths.items())


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(value := config.get(name), int):
            return value
    if default is None:
        raise ModelError(field="config.json", got=f"no {names[0]}", wanted="a model's sizes")
    return default


def read_shape(folder: Path, config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of a model; those that its config.json omits are the defaults of transformers' class.

    Conditional models (`text_config`) often omit sizes, and even a size that can be derived may have another default.

    Raises:
        ModelError: a size is neither there nor known to transformers.
    """
    is_conditional = len(config_parts(config)) > 1
    try:
        if not is_conditional:
            return ModelShape.from_config(config)
    except ModelError:
        pass
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config().to_dict()
    except Exception:  # transformers does not know it, or can't read it: the check `decoder-only` says why
        defaults = {}
    text = {key: value for part in (defaults, *config_parts(config)) for key, value in part.items()}
    return ModelShape.from_config({key: value for key, value in text.items() if key != "text_config"})


def shape_of(name: str) -> ModelShape | None:
    """Return the sizes of a model on this machine; None: it is not here, or its config.json can't be read."""
    folder = find_folder(name)
    try:
        return read_shape(folder, json.loads((folder / CONFIG_FILE).read_text())) if folder else None
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class ModelFiles:
    """What a model's folder holds."""

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of its tensors, by name; empty where it has none in safetensors."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a vocabulary: `tokenizer_config.json` alone has none."""
        return any((self.folder / name).is_file() for name in VOCABULARIES)


def read_model(folder: Path) -> ModelFiles:
    """Read configuration and headers.

    Raises:
        ModelError: a file is missing, can't be read, or is cut off; its `field` names the file.
    """
    config = _json(folder / CONFIG_FILE)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        try:
            with path.open("rb") as file:
                header = decode_header(read_header(file))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        whole = header.size + header.nbytes
        if (size := path.stat().st_size) < whole:
            raise ModelError(field=str(path), got=f"{size:,} bytes", wanted=f"all {whole:,} bytes", fix=SAVE_AGAIN)
        shapes |= {span.name: span.shape for span in header.spans}
    if not shapes and not list(folder.glob("*.bin")):
        raise ModelError(field=str(folder), got="no *.safetensors", wanted="a model's weights", fix=SAVE_AGAIN)
    return ModelFiles(folder, config, shapes)


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or all there are."""
    if not (folder / INDEX_FILE).exists():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(_json(folder / INDEX_FILE).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelError(
            f"{missing[0]} is missing",
            field=str(folder),
            got=f"{len(names) - len(missing)} of {len(names)} weight files",
            wanted="all of them",
            fix=SAVE_AGAIN,
        )
    return [folder / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(field=str(path), got="no such file", wanted="a saved model's file", fix=SAVE_AGAIN) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(found, dict):
        raise ModelError(field=str(path), got=type(found).__name__, wanted="a JSON object", fix=SAVE_AGAIN)
    return found


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(field=str(path), got=str(error), wanted="a whole file", fix=SAVE_AGAIN)
