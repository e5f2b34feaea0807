"""The LoRA adapter (arXiv 2106.09685) by PEFT: create it, compute with it, write it as PEFT and vLLM load it."""

from __future__ import annotations

import json
import logging
import re
import types
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_common.models import from_anywhere
from grpo_trainer.config.bridge import CONFIG_FILE, WEIGHTS_FILE, AdapterFile, BridgeConfig, read_adapter
from grpo_trainer.errors import ModelError, warn_once
from grpo_trainer.files import write_bytes
from grpo_trainer.model.export import PEFT_PREFIX
from grpo_trainer.model.text_part import PREFIX, in_part, in_whole, whole_config

log = logging.getLogger(__name__)

ADAPTER = "default"
"""PEFT's name for the only adapter."""

OUTSIDE_TEXT = rf"(?!{re.escape(PREFIX)}).*"
"""Modules of a conditional model that its text part's adapter is not for, as PEFT matches names."""

ALWAYS_WRITTEN = frozenset(
    {
        *("peft_type", "task_type", "base_model_name_or_path", "inference_mode"),
        *("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "use_rslora", "fan_in_fan_out"),
    }
)
"""Settings of an adapter that every version of PEFT knows."""


def add_adapter(model: PreTrainedModel, options: BridgeConfig, seed: int) -> PeftModel:
    """Wrap a frozen model with an adapter in fp32.

    The adapter is new (B = 0, so training starts from the base model), or the one that `--lora-adapter` names.

    Raises:
        ModelError: the model lacks a target module or layer, vLLM would not serve one, or the named adapter belongs to
            another model.
    """
    layers = decoder_layers(model)
    layers.check("--lora-layer-indices", options.layer_indices)
    _check_modules(model, layers, options.lora_target_modules)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # PEFT computes with it; a float is right
        use_rslora=options.lora_rslora,
        target_modules=list(options.lora_target_modules),
        layers_to_transform=None if options.layer_indices is None else list(options.layer_indices),
        layers_pattern=None if options.layer_indices is None else layers.name.rpartition(".")[2],
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=True)
    assert isinstance(wrapped, PeftModel)
    if options.lora_adapter is not None:
        file = read_adapter(options.lora_adapter)
        parameters = dict(wrapped.named_parameters())
        with torch.no_grad():
            for name, tensor in adapter_weights(wrapped, file).items():
                parameters[name].copy_(tensor)
        name = getattr(wrapped.config, "name_or_path", None)
        if file.base_model and name and file.base_model not in (name, from_anywhere(name)):
            warn_once(log, "--lora-adapter %s was trained on %s, this is %s", file.path, file.base_model, name)
        log.info("starting from the adapter %s: rank %d, %d modules", file.path, file.r, len(file.modules))
    return wrapped


@dataclass(frozen=True)
class DecoderLayers:
    """The list of a model's decoder layers."""

    name: str
    """Its name within the model."""
    count: int
    linear: Set[str]
    """Names of the linear modules in the layers."""

    def check(self, flag: str, numbers: Sequence[int] | None) -> None:
        """Raise a `ModelError` for numbers of layers that the model does not have."""
        if beyond := [number for number in numbers or () if number >= self.count]:
            got, wanted = ",".join(map(str, beyond)), f"0 to {self.count - 1}"
            raise ModelError(f"the model has {self.count} layers", field=flag, got=got, wanted=wanted)


def decoder_layers(model: PreTrainedModel) -> DecoderLayers:
    """Return the layers in which vLLM serves adapters.

    Raises:
        ModelError: the model has no list of layers.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, found in model.named_modules():  # from the outside in
        if isinstance(found, nn.ModuleList) and len(found) == count:
            linear = {
                path.rpartition(".")[2] for path, module in found.named_modules() if isinstance(module, nn.Linear)
            }
            return DecoderLayers(name, count, linear)
    raise ModelError(field=type(model).__name__, got=f"no list of {count} layers", wanted="a decoder-only model")


def _check_modules(model: PreTrainedModel, layers: DecoderLayers, wanted: Sequence[str]) -> None:
    """Check that the target modules are linear modules of the layers: outside, vLLM serves some architectures only."""
    flag, missing = "--lora-target-modules", [name for name in wanted if name not in layers.linear]
    if missing:
        kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in model.named_modules()}
        outside = [f"{name} ({kinds[name]})" for name in missing if name in kinds]
        why = f"; vLLM need not serve {', '.join(outside)}" if outside else ""
        raise ModelError(
            f"{type(model).__name__} has no such linear module in its layers{why}",
            field=flag,
            got=",".join(missing),
            wanted=", ".join(sorted(layers.linear)) or "none",
        )
    if "kv_b_proj" in wanted:
        raise ModelError(
            "vLLM computes latent attention with copies of this matrix, which an adapter does not change",
            field=flag,
            got="kv_b_proj",
            wanted=", ".join(sorted(layers.linear - {"kv_b_proj"})),
        )


def adapter_weights(model: PeftModel, file: AdapterFile) -> dict[str, Tensor]:
    """Return the weights of an existing adapter by the names of this model's parameters, on its device.

    Raises:
        ModelError: its names or shapes are not those of this model's adapter.
    """
    weights = load_file(file.path / WEIGHTS_FILE)
    if differing := _differences(adapter_state(model), weights):
        fix = f"name an adapter of this model; it was trained on {file.base_model}"
        raise ModelError("is another model's", field=f"--lora-adapter {file.path}", got=differing, fix=fix)
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    parameters = {_published(model.get_base_model(), name.replace(".default.", ".")): name for name in names}
    return {parameters[name]: tensor.to(model.device, torch.float32) for name, tensor in weights.items()}


def _differences(own: dict[str, Tensor], saved: dict[str, Tensor]) -> str:
    """Describe briefly how two adapters differ in names and shapes; empty if they don't."""

    def some(names: Iterable[str]) -> str:
        found = sorted(names)
        return ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")

    if lacking := set(own) - set(saved):
        return f"it lacks {some(lacking)}"
    if strange := set(saved) - set(own):
        return f"this model has no {some(strange)}"
    return "; ".join(
        f"{name} is {list(saved[name].shape)}, not {list(own[name].shape)}"
        for name in own
        if own[name].shape != saved[name].shape
    )[:300]


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the adapter's tensors under the names of its checkpoint, which are those of the whole model.

    Embeddings are never included. Without that setting, PEFT asks the hub about the base model at each call.
    """
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {_published(model.get_base_model(), name): tensor for name, tensor in state.items()}


def _published(model: nn.Module, name: str) -> str:
    """Return the name of an adapter's tensor in its checkpoint."""
    return PEFT_PREFIX + in_whole(model, name.removeprefix(PEFT_PREFIX))


def wrap_with(model: PreTrainedModel, path: Path) -> PeftModel:
    """Wrap a model with an existing adapter, whose names may be those of the whole model.

    Raises:
        ModelError: the adapter has other modules than the model.
    """
    if whole_config(model) is None:
        return PeftModel.from_pretrained(model, str(path))
    config = LoraConfig.from_pretrained(str(path))
    assert isinstance(config, LoraConfig)
    config.exclude_modules = None
    wrapped = get_peft_model(model, config)
    assert isinstance(wrapped, PeftModel)
    weights = load_file(path / WEIGHTS_FILE)
    if differing := _differences(adapter_state(wrapped), weights):
        raise ModelError("is another model's", field=str(path), got=differing, fix="name the model it was trained on")
    load_weights(wrapped, weights)
    return wrapped


def load_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> None:
    """Copy an adapter's weights, by the names of its checkpoint, into the model's adapter, which has the same names."""
    base = model.get_base_model()
    set_peft_model_state_dict(model, {in_part(base, name): tensor for name, tensor in weights.items()})


def save_adapter(model: PeftModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write PEFT's two files into an existing folder, with the model's present weights or `tensors`."""
    state = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in (adapter_state(model) if tensors is None else tensors).items()
    }
    write_bytes(folder / WEIGHTS_FILE, save(state, metadata={"format": "pt"}))
    write_bytes(folder / CONFIG_FILE, json.dumps(adapter_settings(model), indent=2).encode())


def adapter_settings(model: PeftModel) -> dict[str, Any]:
    """Return the `adapter_config.json` of the model's adapter, as plain JSON types; see `readable_settings`."""
    settings = model.peft_config[ADAPTER].to_dict()
    settings["inference_mode"] = True
    settings["target_modules"] = sorted(settings["target_modules"])
    if whole_config(model.get_base_model()) is not None:
        settings["exclude_modules"] = OUTSIDE_TEXT
    if base := settings["base_model_name_or_path"]:
        settings["base_model_name_or_path"] = from_anywhere(base)
    return readable_settings(json.loads(json.dumps(settings, default=str)))


def readable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's settings without those at PEFT's defaults: a version of PEFT refuses those it does not know.

    Those of `ALWAYS_WRITTEN` stay. Without `peft_version`, too, which PEFT before 0.18 refuses.
    """
    defaults = json.loads(json.dumps(LoraConfig().to_dict(), default=str)) | {"peft_version": None}
    left_out = {name for name, value in settings.items() if name == "peft_version" or defaults.get(name, ...) == value}
    return {name: value for name, value in settings.items() if name in ALWAYS_WRITTEN or name not in left_out}


# few kernels ---------------------------------------------------------------------------------------------------------


def use_few_kernels(model: nn.Module) -> int:
    """Replace the forward passes of a model's LoRA modules, and return the number of replaced ones.

    PEFT's own forward pass casts its input to the adapter's fp32, multiplies in fp32, and needs three passes over the
    output to add the result. Here the small matrices are cast instead: `x W + (x A) (s B)`, where the last product adds
    into the first one's result. The server computes it like this too. The parameters remain PEFT's, and they and their
    gradients stay fp32. Modules in 4 bits, or of another kind than plain LoRA keep their own.
    """
    if not isinstance(model, PeftModel):
        return 0
    found = [
        module
        for module in model.modules()
        if type(module) is Linear
        and type(module.base_layer) is nn.Linear
        and list(module.lora_A) == [ADAPTER]
        and not module.lora_variant
        and module.lora_B[ADAPTER].bias is None
    ]
    for module in found:
        module.forward = types.MethodType(_forward, module)
    return len(found)


def _forward(module: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if module.disable_adapters or module.merged or args or kwargs or torch.is_autocast_enabled(x.device.type):
        return Linear.forward(module, x, *args, **kwargs)
    down, up = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
    assert isinstance(down, Tensor) and isinstance(up, Tensor)
    result = module.base_layer(x)
    inner = functional.linear(x, down.to(x.dtype))
    scaled_up = (up * module.scaling[ADAPTER]).to(x.dtype)
    result.flatten(0, -2).addmm_(inner.flatten(0, -2), scaled_up.mT)
    return result
