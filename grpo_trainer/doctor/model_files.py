"""A model's folder, read without loading a weight: its configuration, and names and shapes from the files' headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_common.models import CONFIG_FILE
from grpo_trainer.errors import ModelError
from vllm_server.protocol.flat import decode_header, read_header

INDEX_FILE = "model.safetensors.index.json"
SAVE_AGAIN = "save or download the model again"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelFiles:
    """What a model's folder holds.

    Attributes:
        shapes: of its tensors, by name; empty where it has none in safetensors.
    """

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a vocabulary: `tokenizer_config.json` alone has none."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES[:3])


def read_model(folder: Path) -> ModelFiles:
    """Read configuration and headers.

    Raises:
        ModelError: a file is missing, can't be read, or is cut off; its `field` names the file.
    """
    config = _json(folder / CONFIG_FILE)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        shapes |= _shapes(path)
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


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            header = decode_header(read_header(file))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    whole = header.size + header.nbytes
    if (size := path.stat().st_size) < whole:
        raise ModelError(field=str(path), got=f"{size:,} bytes", wanted=f"all {whole:,} bytes", fix=SAVE_AGAIN)
    return {span.name: span.shape for span in header.spans}


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
