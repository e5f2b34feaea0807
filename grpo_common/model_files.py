"""Make the files that transformers 5 writes readable for versions before it, and for the tools that are built on them.

transformers 5 renamed keys of `config.json` and `tokenizer_config.json`. An older reader skips a key that it does not
know and takes its default: a model whose `rope_theta` is missing computes other answers, without a word. Here the keys
of transformers 4 are written beside the new ones. transformers 5 and vLLM read both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from grpo_common.models import CONFIG_FILE, find_folder

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
TOKENIZER_FILES: Final = (
    *("tokenizer.json", TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json", "tiktoken.model"),
)
"""Files and folders of a tokenizer, whatever its kind."""

_TYPE: Final = {"rope_type": "default"}
_RENAMED: Final = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""Type of model -> a key of transformers 5 and its name in transformers 4. Found by comparing what both write for all
causal models with default settings."""
_NEOX: Final = ("rotary_emb_base", "rotary_pct")
_ROPE_NAMES: Final[Mapping[str, tuple[str, str]]] = {"gpt_neox": _NEOX, "gpt_neox_japanese": _NEOX}
"""Type of model -> its keys in transformers 4 for `rope_theta` and `partial_rotary_factor`, where they differ."""
_LOCAL_THETA: Final = {"gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq", "olmo3": None}
"""Type of model with one RoPE for each type of layer -> the key of transformers 4 for the base in sliding layers; None:
that of the full layers. Scaling is that of the full layers."""


def copy_tokenizer(model: str | Path, folder: Path) -> bool:
    """Copy the files of a model's tokenizer byte for byte; return False if none is on this machine.

    Raise an OSError if a file can't be copied.
    """
    source = find_folder(str(model)) if str(model) else None
    found = [path for name in TOKENIZER_FILES if source and (path := source / name).exists()]
    if not any(path.is_file() and path.name != TOKENIZER_CONFIG_FILE for path in found):
        return False
    for path in found:
        target = folder / path.name
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target)
    return True


def make_readable(folder: Path) -> None:
    """Add the keys of transformers 4 to the `config.json` and `tokenizer_config.json` that a folder has.

    Raise an OSError if a file can't be read or written.
    """
    for name, readable in ((CONFIG_FILE, readable_config), (TOKENIZER_CONFIG_FILE, readable_tokenizer_config)):
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        if (changed := readable(config)) != config:
            path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def readable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with the keys of transformers 4 for what transformers 5 has renamed: the dtype,
    rotary embeddings, the number of experts.

    Embeddings that transformers 4 has no keys for stay as they are.
    """
    changed = {
        name: readable_config(value) if isinstance(value, dict) and "model_type" in value else value
        for name, value in config.items()
    }
    if (dtype := config.get("dtype")) is not None:
        changed["torch_dtype"] = dtype
    model_type = str(config.get("model_type", ""))
    changed |= {old: config[new] for new, old in _RENAMED.get(model_type, {}).items() if new in config}
    if rope := config.get("rope_parameters"):
        changed |= _flat_rope(model_type, rope)
    return changed


def _flat_rope(model_type: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    theta_name, rotary_name = _ROPE_NAMES.get(model_type, ("rope_theta", "partial_rotary_factor"))
    flat: dict[str, Any] = {}
    if any(isinstance(value, dict) for value in rope.values()):  # one for each type of layer
        full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
        if model_type not in _LOCAL_THETA or not full or not sliding or _scaling(sliding):
            return {}
        local = _LOCAL_THETA[model_type]
        if local is not None:
            flat[local] = sliding["rope_theta"]
        elif sliding["rope_theta"] != full["rope_theta"]:
            return {}
        rope = full
    if "rope_theta" in rope:
        flat[theta_name] = rope["rope_theta"]
    if rope.get("partial_rotary_factor") is not None:
        flat[rotary_name] = rope["partial_rotary_factor"]
    if not (scaling := _scaling(rope)):
        return flat | {"rope_scaling": None}  # some models of transformers 4 scale by default
    if model_type == "phi3":  # its three keys are the only ones that transformers 4 accepts
        if _without(scaling, "type", "rope_type", "short_factor", "long_factor", "original_max_position_embeddings"):
            return {}
        scaling = {"type": rope["rope_type"], "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    return flat | {"rope_scaling": scaling}


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers 4 calls `rope_scaling`; empty: nothing is scaled."""
    scaling = _without(rope, "rope_theta", "partial_rotary_factor")
    return {} if scaling == _TYPE else scaling


def _without(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


def readable_tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's configuration with the names of transformers 4; one that it has written stays as it is."""
    changed = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 reads this name, too
    if isinstance(extra := config.get("extra_special_tokens"), list):
        known = config.get("additional_special_tokens") or []
        changed["additional_special_tokens"] = known + [token for token in extra if token not in known]
        del changed["extra_special_tokens"]
    if "backend" in config:  # transformers 5 has written it: its default is False, that of transformers 4 True
        changed.setdefault("clean_up_tokenization_spaces", False)
    return changed
