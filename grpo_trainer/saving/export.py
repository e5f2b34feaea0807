"""`grpo export`: write a checkpoint as a folder that plain transformers or PEFT load, without the trainer's state."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_common.model_files import TOKENIZER_CONFIG_FILE, make_readable
from grpo_common.models import from_anywhere
from grpo_trainer.config.bridge import CONFIG_FILE, WEIGHTS_FILE
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.files import whole_folder, write_bytes
from grpo_trainer.model.export import export_model, stored_tensors, write_tokenizer
from grpo_trainer.model.load import NoTokenizerError, read_config, read_tokenizer
from grpo_trainer.model.lora import readable_settings, wrap_with
from grpo_trainer.model.quantised import is_read, quantised_by
from grpo_trainer.model.text_part import load_causal_lm
from grpo_trainer.parallel.shard_states import STATES_FOLDER
from grpo_trainer.policy import MODEL_CONFIG_FILE, AllWeights
from grpo_trainer.saving.checkpoint import TENSORS_FILE
from grpo_trainer.saving.manifest import STATE_FILE, DamagedError, check_files, read_state, saved_checkpoints
from vllm_server.protocol import refusals

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `grpo export`."""

    checkpoint: Path
    """A checkpoint, or a folder of checkpoints, of which the newest is exported."""
    output: Path | None = None
    """A new or empty folder; None: a folder next to the checkpoint."""
    merge: bool = False
    """Write the base model with the adapter merged into it."""
    dtype: str | None = None
    """Of the written weights; None: the checkpoint's, or for a merged model the base model's."""
    base: str | None = None
    """The adapter's base model; None: the one that its configuration names."""


def export_checkpoint(options: ExportOptions, say: Callable[[str], None] = log.info) -> Path:
    """Write the folder, completely or not at all, and return its path; `say` tells which of several is the newest.

    Raises:
        ConfigError: there is no checkpoint, it is damaged, it can't be merged, or the output folder is not empty.
    """
    path = _find(options.checkpoint, say)
    prefix = "merged" if options.merge else "exported"
    output = options.output or path.with_name(f"{prefix}_{path.name}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            "exists already", field="OUTPUT", got=output, wanted="a new folder", fix="remove it, or choose another"
        )
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    is_adapter = (path / CONFIG_FILE).is_file()
    if not is_adapter and path.resolve() in output.resolve().parents:  # the folder would be copied into itself
        raise ConfigError("lies in the checkpoint", field="OUTPUT", got=output, wanted="a folder outside of it")
    if options.merge and not is_adapter:
        raise ConfigError(field="--merge", got=f"{path}, {AllWeights.kind}", wanted="an adapter", fix="leave it out")
    with whole_folder(output) as folder:
        if options.merge:
            _merge(path, options.base, dtype, folder)
        elif is_adapter:
            _copy_adapter(path, options.base, dtype, folder)
        else:
            _copy_model(path, dtype, folder)
    return output


def _find(path: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint to export, after verifying its checksums."""
    if not any((path / marker).is_file() for marker in (CONFIG_FILE, MODEL_CONFIG_FILE)):
        found = [one.path for folder in (path, path / "checkpoints") for one in saved_checkpoints(folder)]
        if not found:
            raise ConfigError(
                field=str(path),
                got="no checkpoint",
                wanted=f"a folder with {CONFIG_FILE} or {MODEL_CONFIG_FILE}, or a folder of such folders",
            )
        path = found[-1]
        say(f"the newest checkpoint is {path}")
    if (path / STATE_FILE).is_file():
        try:
            check_files(read_state(path))
        except DamagedError as damage:
            raise ConfigError(
                "the checkpoint is damaged",
                field=str(path / damage.field),
                got=damage.got,
                wanted=damage.wanted,
                fix="export another checkpoint",
            ) from None
    return path


def _merge(path: Path, base: str | None, dtype: torch.dtype | None, folder: Path) -> None:
    """Write the base model with each adapted matrix as W + scaling * B A, computed in fp32 and then rounded."""
    settings = json.loads((path / CONFIG_FILE).read_text())
    if refused := refusals(settings, max_rank=1 << 20):
        why = "no plain LoRA adapter"
        raise ConfigError.of([replace(each, field=f"--merge {path}: {each.field}", summary=why) for each in refused])
    name = _base_name(path, settings, base)
    try:
        found = read_config(name)
    except ModelError as error:
        raise ConfigError(
            f"the base model can't be read: {error.summary}",
            field="--merge",
            got=name,
            wanted="a base model",
            fix="name where it is now with --model-name",
        ) from None
    if not is_read(found) and (method := quantised_by(found)) is not None:
        raise ConfigError(
            f"an adapter can't be merged into the weights of {name}",
            field="--merge",
            got=f"weights quantised by {method}",
            wanted="weights in 16 or 32 bits",
            fix="name the model that they were made of with --model-name, or leave --merge out",
        )
    model = load_causal_lm(name, dtype="auto")
    written = dtype or model.dtype
    export_model(wrap_with(model, path), _tokenizer(path, name), folder, written)


def _copy_adapter(path: Path, base: str | None, dtype: torch.dtype | None, folder: Path) -> None:
    settings = json.loads((path / CONFIG_FILE).read_text())
    name = _base_name(path, settings, base)
    settings["base_model_name_or_path"] = name
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in load_file(path / WEIGHTS_FILE).items()}
    write_bytes(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    write_bytes(folder / CONFIG_FILE, json.dumps(readable_settings(settings), indent=2).encode())
    if (tokenizer := _tokenizer(path, name)) is not None:
        write_tokenizer(tokenizer, folder)


def _copy_model(path: Path, dtype: torch.dtype | None, folder: Path) -> None:
    """Copy the files; for another dtype, round the exact trained weights and not the already rounded ones."""
    if dtype is None:
        for file in path.iterdir():
            if file.name not in (STATE_FILE, TENSORS_FILE, STATES_FOLDER):
                shutil.copytree(file, folder / file.name) if file.is_dir() else shutil.copy2(file, folder)
        make_readable(folder)  # an earlier version may have written the checkpoint
        return
    model = load_causal_lm(path, dtype="auto")
    assert isinstance(model, PreTrainedModel)
    stored = {name: tensor for name, (_, tensor) in stored_tensors(model).items()}
    if (path / TENSORS_FILE).is_file():
        stored |= torch.load(path / TENSORS_FILE, map_location="cpu", weights_only=True, mmap=True).get("weights", {})
    export_model(model, _tokenizer(path, None), folder, dtype, tensors=stored)


def _base_name(path: Path, settings: dict[str, Any], base: str | None) -> str:
    """The base model's name as it means the same in every folder; a relative path may start where the run was."""
    name = base or settings.get("base_model_name_or_path")
    if not name:
        raise ConfigError(
            field=str(path), got=f"no base model in {CONFIG_FILE}", wanted="one", fix="give it with --model-name"
        )
    return from_anywhere(name, path.resolve().parents)


def _tokenizer(path: Path, base: str | None) -> PreTrainedTokenizerBase | None:
    """Return the checkpoint's tokenizer, or else the base model's; None: neither has one."""
    place = str(path) if (path / TOKENIZER_CONFIG_FILE).is_file() else base
    try:
        return read_tokenizer(place) if place else None
    except NoTokenizerError as error:
        log.warning("exporting without a tokenizer: %s", error)
        return None
