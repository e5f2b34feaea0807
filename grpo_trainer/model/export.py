"""Export a model as a plain Hugging Face folder with its tokenizer, a LoRA adapter merged into a copy of its weights.

The export works tensor by tensor and file by file: besides the model it needs main memory for one weights file, and
device memory for one merged matrix. It only reads the model in memory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from grpo_common.model_files import copy_tokenizer, make_readable
from grpo_trainer.errors import ModelError
from grpo_trainer.files import write_bytes
from grpo_trainer.model.text_part import OWN_CONFIG, OtherParts, published, whole_config
from grpo_trainer.optim.steps import first_not_finite

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
"""Largest size of a weights file, except for a file with a single larger tensor."""

PEFT_PREFIX = "base_model.model."


def stored_tensors(model: PreTrainedModel | PeftModel) -> dict[str, tuple[str, Tensor]]:
    """Return a checkpoint's contents: name -> (name in `model`, tensor), tied weights once, under their first name.

    `base_model.model.model.layers.0.mlp.up_proj.base_layer.weight` of PEFT is `model.layers.0.mlp.up_proj.weight`.

    Raises:
        ModelError: weights are packed in fewer bits, or an adapted module shares its weights with another.
    """
    found: dict[str, tuple[str, Tensor]] = {}
    names: dict[int, str] = {}
    for own, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in own:
            continue
        name = own.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        if not tensor.is_floating_point():
            raise ModelError(
                "can't be written for the server", field=name, got=tensor.dtype, wanted="floats", fix="use lora_only"
            )
        if (first := names.setdefault(id(tensor), name)) == name:
            found[name] = (own, tensor)
        elif any(".base_layer." in adapted for adapted in (own, found[first][0])):
            raise ModelError(
                "merging an adapter into one of two modules with tied weights would untie them",
                field="--lora-target-modules",
                got=f"{name} and {first}",
                fix="leave both out",
            )
    return found


def own_rows(tensor: DTensor) -> slice:
    """Return the rows of a tensor that this process has; FSDP2 shards by rows only."""
    (rows, *_), (start, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(start, start + rows)


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        target.to_local().copy_(value[own_rows(target)])
    else:
        target.copy_(value)


def plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return names in order, grouped so that each group stays within `limit` bytes, unless one tensor exceeds it."""
    shards: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def export_model(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, configuration, generation configuration if the model came with one, and tokenizer.

    `folder` exists and is empty; see `files.whole_folder`, which makes it appear whole or not at all. If the model is
    the text part of another, write the whole one, with the other parts from its files. LoRA is merged in fp32, before
    the weights are rounded to `dtype`. `tensors` are the weights to write for a model without adapter, by the names of
    `stored_tensors`; by default its own.

    Raises:
        ModelError: see `stored_tensors`; or a tensor is not finite in `dtype`, merged or not.
        OSError: a file could not be written; with `filename`.
    """
    stored = stored_tensors(model) if tensors is None else {name: (name, each) for name, each in tensors.items()}
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(plain, PreTrainedModel)
    whole = whole_config(plain)
    others = None if whole is None else OtherParts(whole)
    sizes = {name: tensor.numel() * dtype.itemsize for name, (_, tensor) in stored.items()}
    shards = plan_shards(sizes | (others.sizes if others else {}), SHARD_BYTES)
    index: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            if name in stored:
                value = _merged(model, name, *stored[name], dtype)
                tensors |= {final: part.contiguous() for final, part in published(plain, {name: value}).items()}
        if others is not None:
            tensors = {others.named_as_there(name): tensor for name, tensor in tensors.items()}
            tensors |= others.read([name for name in names if name not in stored])
        total += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        index |= dict.fromkeys(tensors, file)
        write_bytes(folder / file, save(tensors, metadata={"format": "pt"}))
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        write_bytes(folder / INDEX_FILE, json.dumps(content, indent=2).encode())
    _write_configs(plain, dtype, folder)
    if others is not None:
        others.copy_processors(folder)
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)


@torch.no_grad()
def _merged(model: PreTrainedModel | PeftModel, name: str, own: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype` on the CPU; of a module with an adapter, W + scaling * B A, computed in fp32."""
    value = tensor.detach()
    module_name, base_layer, parameter = own.partition(".base_layer.")
    if base_layer and parameter == "weight":
        layer = model.get_submodule(module_name)
        assert isinstance(layer, LoraLayer), own
        delta: Tensor = layer.get_delta_weight("default")  # pyright: ignore[reportCallIssue]  # of its subclasses
        value = tensor.detach().float() + delta.float()
    value = value.to(dtype)
    if first_not_finite([value], [value]) is not None:
        raise ModelError(
            "can't be written for the server", field=name, got="values that are not finite",
            wanted=f"finite ones in {str(dtype).removeprefix('torch.')}", fix="take an earlier checkpoint",
        )  # fmt: skip
    return value.cpu()


def architecture(model: nn.Module) -> str:
    """Return the name of the model's class, without the class that FSDP2 derives from it."""
    plain = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return plain.__name__


def _write_configs(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    whole = whole_config(model)
    config: Any = copy.deepcopy(getattr(model, OWN_CONFIG, model.config) if whole is None else whole)
    if whole is None:
        config.architectures = [architecture(model)]
    config.dtype = dtype
    config.save_pretrained(folder)
    make_readable(folder)
    generation = model.generation_config
    if generation is not None and not getattr(generation, "_from_model_config", True):
        # `save_pretrained` refuses what released models have, such as a temperature without `do_sample`.
        generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer: the files that it was read from, byte for byte, where they are on this machine.

    `save_pretrained` of transformers 5 writes files that versions before it do not read; what it writes is corrected.
    Raise an OSError if a file can't be copied or written.
    """
    if not copy_tokenizer(tokenizer.name_or_path, folder):
        tokenizer.save_pretrained(folder)
    make_readable(folder)
