"""The trainer's model in the server's memory: built without weights, each parameter a view of one of vLLM's.

Nothing is copied. `names.py` finds each parameter's place in vLLM's memory, and the server's `vllm_bridge_config.json`
has the handles that open it.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.engine.tensor_shards import cut_model
from grpo_trainer.errors import BridgeError, ConfigError, ModelError
from grpo_trainer.model.load import (
    build_without_weights,
    check_attention,
    check_model,
    freeze,
    pick_device,
    pick_dtype,
    take_generation_config,
)
from grpo_trainer.shared.bridge_file import start_of, storage_of, tied_names
from grpo_trainer.shared.names import Binding, Facts, bind_names, not_shareable
from vllm_server.protocol.bridge_config import BridgeConfigFile, FileHandle, Handle

log = logging.getLogger(__name__)

WITHOUT_EFFECT: Final = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
    | {"output_attentions", "output_hidden_states", "initializer_range", "id2label", "label2id", "problem_type"}
    | {"attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout", "residual_dropout"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Fields of a model's configuration that do not affect a forward pass without dropout."""


def build_skeleton(model_config: ModelConfig) -> PreTrainedModel:
    """Return the model without weights, built from the trainer's own options without asking a server.

    Raises:
        ConfigError, ModelError: see `check_model`, `_check_shareable` and `check_attention`.
    """
    found = check_model(model_config.model_name)
    _check_shareable(found, model_config.model_name)
    check_attention(found, model_config.attention)
    device = pick_device(model_config.device)
    return build_without_weights(found, pick_dtype(model_config.dtype, device), model_config.attention, device)


def _check_shareable(config: Any, name: str) -> None:
    if why := not_shareable(config.to_dict()):
        raise ModelError(
            why, field="--model-name", got=name, wanted="a model whose weights trainer and server can share",
            fix="use --weight-bridge-mode lora_only (without --share-base) or broadcast",
        )  # fmt: skip


def attach_model(
    config: BridgeConfigFile,
    model_config: ModelConfig,
    device: torch.device,
    skeleton: PreTrainedModel | None = None,
    rank: int = 0,
) -> PreTrainedModel:
    """Return the model of `--model-name` on the server's parameters, in training mode, with every parameter frozen.

    If several workers of the server have a shard of each weight, the model is this process's shard: `config` has the
    parameters of worker `rank`. A `skeleton` is used if it has the server's dtype and device.

    Raises:
        BridgeError: this process can't open the server's memory.
        ConfigError: `--dtype` is not the server's, or `--attention` leaves out part of the model.
        ModelError: the server serves another model, or its parameters can't be bound (`NamesError`).
    """
    found = check_same_model(config.model, model_config.model_name)
    _check_shareable(found, model_config.model_name)
    check_attention(found, model_config.attention)
    device = server_device(config, device)
    [(common, _)] = Counter(mapping.dtype for mapping in config.param_mappings.values()).most_common(1)
    dtype: torch.dtype = getattr(torch, common)
    if model_config.dtype != "auto" and getattr(torch, model_config.dtype) != dtype:
        raise ConfigError(
            "trainer and server share one copy of the weights",
            field="--dtype",
            got=model_config.dtype,
            wanted=f"{common}, the server's",
            fix=f"use --dtype auto, or start the server with --dtype {model_config.dtype}",
        )
    fits = skeleton is not None and skeleton.dtype == dtype and all(b.device == device for b in skeleton.buffers())
    model = skeleton if fits else build_without_weights(found, dtype, model_config.attention, device)
    assert model is not None
    facts = facts_of(model, config)
    if config.tp_degree > 1:
        facts = replace(facts, padded=cut_model(model, rank, config.tp_degree).padded)
    theirs = {name: tuple(mapping.shape) for name, mapping in config.param_mappings.items()}
    bindings = bind_names({name: tuple(tensor.shape) for name, tensor in _state(model)}, theirs, facts)
    bind(model, bindings, open_handles(config, device))
    take_generation_config(model, model_config.model_name)
    log.info("Attached %d tensors to vLLM's shared memory", len(bindings))
    log.info("Single-copy mode active: %s, %s on %s", model_config.model_name, common, device)
    return freeze(model, model_config)


def check_same_model(served: str, own: str) -> Any:
    """Return the configuration of `--model-name`, after comparing all relevant fields with the server's model.

    Raises:
        ModelError: a field differs, which the error names; or one of the two models is not found.
    """
    found = check_model(own)
    if served == own or (Path(own).is_dir() and Path(served).is_dir() and Path(own).samefile(served)):
        return found
    ours, fix = found.to_dict(), "name the same model on both sides"
    try:
        theirs = check_model(served).to_dict()
    except ModelError:
        why, wanted = "the trainer can't read the server's model to compare the two", f"{served}, the server's"
        raise ModelError(why, field="--model-name", got=own, wanted=wanted, fix=fix) from None
    for field in sorted((ours.keys() | theirs.keys()) - WITHOUT_EFFECT):
        if ours.get(field) != theirs.get(field):
            raise ModelError(
                f"{own} is another model than the server's {served}",
                field=f"--model-name: {field}",
                got=ours.get(field),
                wanted=str(theirs.get(field)),
                fix=fix,
            )
    return found


# the memory ------------------------------------------------------------------------------------------------


def server_device(config: BridgeConfigFile, wanted: torch.device) -> torch.device:
    """Return the server's device, numbered as this process sees it; "cuda" without a number asks for the server's GPU.

    Raises:
        BridgeError: `--device` is another device, or the trainer does not see the server's.
    """
    if config.kind == "file":
        if wanted.type != "cpu":
            raise BridgeError(
                "the server's weights are in main memory", field="--device", got=wanted, fix="use --device cpu"
            )
        return wanted
    if wanted.type != "cuda":
        raise BridgeError(
            f"the server's weights are on GPU {config.gpu_uuid}", field="--device", got=wanted, fix="use --device auto"
        )
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if config.gpu_uuid not in visible:
        raise BridgeError(
            "the trainer does not see the GPU that holds the server's weights",
            field="gpu_uuid",
            got=", ".join(visible) or "none",
            wanted=str(config.gpu_uuid),
            fix="start the trainer with --device auto and a CUDA_VISIBLE_DEVICES that has this GPU",
        )
    index = visible.index(config.gpu_uuid)
    if wanted.index not in (None, index):
        raise BridgeError(
            field="--device",
            got=wanted,
            wanted=f"cuda:{index}, where the server's weights are",
            fix=f"use --device cuda:{index}",
        )
    return torch.device("cuda", index)


def open_handles(config: BridgeConfigFile, device: torch.device) -> dict[str, Tensor]:
    """Return the server's parameters by vLLM's names, for reading and writing; each storage is mapped once.

    Raises:
        BridgeError: the memory can't be mapped, or is smaller than the file says.
    """
    if device.type == "cuda":
        torch.cuda.init()
        torch.empty(1, device=device)  # a process without a CUDA context crashes when it opens a handle
    storages: dict[tuple[str, int], torch.UntypedStorage] = {}
    tensors: dict[str, Tensor] = {}
    for name, handle in config.ipc_handles.items():
        place = storage_of(handle)
        dtype = getattr(torch, handle.dtype)
        try:
            if place not in storages:
                storages[place] = _open(handle, device)
            empty = torch.empty(0, dtype=dtype, device=device)
            start, size, stride = start_of(handle) // dtype.itemsize, tuple(handle.shape), tuple(handle.stride)
            tensors[name] = empty.set_(storages[place], start, size, stride)  # pyright: ignore
        except (OSError, RuntimeError) as error:
            raise BridgeError(
                "the server's memory can't be mapped",
                field=name,
                got=error,
                wanted="a living server and its trainer on one machine, in one container, as one user",
            ) from None
    return tensors


def _open(handle: Handle, device: torch.device) -> Any:
    if isinstance(handle, FileHandle):
        return torch.UntypedStorage.from_file(handle.path, True, Path(handle.path).stat().st_size)
    return torch.UntypedStorage._new_shared_cuda(
        device.index,
        b64decode(handle.ipc_handle_b64),
        handle.storage_size,
        handle.storage_offset,
        b64decode(handle.ref_counter_handle_b64),
        handle.ref_counter_offset,
        b64decode(handle.event_handle_b64),
        handle.event_sync_required,
    )


# the model -------------------------------------------------------------------------------------------------


def facts_of(model: PreTrainedModel, config: BridgeConfigFile) -> Facts:
    """Return the facts that `bind_names` needs besides names and shapes."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in _state(model):
        if (owner := first.setdefault(id(tensor), name)) != name:
            ties[name] = owner
    strange: dict[str, str] = {}
    for path, module in model.named_modules():
        marks = {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": True}
        if hasattr(module, "is_transposed"):
            odd = [
                f"{mark} is {getattr(module, mark)}" for mark, plain in marks.items() if getattr(module, mark) != plain
            ]
            strange |= {path: f"its experts have another layout ({', '.join(odd)})"} if odd else {}
    return Facts(ties, tied_names(config), strange)


def bind(model: PreTrainedModel, bindings: Iterable[Binding], tensors: Mapping[str, Tensor]) -> None:
    """Make each parameter, and each buffer that checkpoints hold, a view of the server's memory, without copying.

    Raises:
        ModelError: a dtype differs from that of the model's forward pass, or a tensor is left without memory.
    """
    own: dict[str, list[str]] = {}  # first name -> all of its names
    first: dict[int, str] = {}
    meta = dict(_state(model))
    for name, tensor in meta.items():
        own.setdefault(first.setdefault(id(tensor), name), []).append(name)
    for binding in bindings:
        whole = tensors[binding.vllm_name]
        theirs, ours = (str(each.dtype).removeprefix("torch.") for each in (whole, meta[binding.hf_name]))
        if theirs != ours:
            raise ModelError(
                field=f"{binding.hf_name}: dtype",
                got=f"{theirs} of the server's {binding.vllm_name}",
                wanted=f"{ours}, which the model computes with",
                fix="use lora_only or none",
            )
        view = whole.narrow(0, binding.start, binding.length)
        is_parameter = isinstance(meta[binding.hf_name], nn.Parameter)
        bound = nn.Parameter(view, requires_grad=False) if is_parameter else view
        for name in own[binding.hf_name]:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            place = module._parameters if leaf in module._parameters else module._buffers
            place[leaf] = bound  # pyright: ignore[reportArgumentType]
    for path, module in model.named_modules():  # plain attributes of modules, too
        for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(
                    "shared_vllm does not know this architecture",
                    field=f"{path}.{name}",
                    got="a tensor without memory",
                    fix="use lora_only or none",
                )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and the buffers that checkpoints hold, tied ones under each of their names."""
    held = set(model.state_dict())
    yield from model.named_parameters(remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in held)
