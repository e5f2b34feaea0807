"""The reference model of the KL divergence: the model that training began with, whose weights never change.

With a new adapter, the reference is the model without it. With `--lora-adapter`, it is the model with the adapter in
that folder (TRL does the same), or the model without one if `--kl-reference base` says so. If all weights are trained,
it is a frozen copy that is read from `--model-name`. Both copies come from files, so they are the same after a resume,
whatever the server's memory holds. The reference computes by the policy's own modules, which use the frozen weights
during a forward pass. So the two differ only in their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_trainer.config.bridge import read_adapter
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.model.lora import adapter_weights, decoder_layers
from grpo_trainer.model.text_part import load_causal_lm

log = logging.getLogger(__name__)


Reference = Callable[[], AbstractContextManager[None]]
"""Makes the model compute as the reference within a block, for forward passes without gradient."""


class FrozenWeights:
    """A copy of the weights, or of an adapter's alone, in its own dtype, on the device or in main memory.

    Each decoder layer switches to its frozen weights before its forward pass and back after it. So if weights must be
    moved or cast, the device holds only one layer of them at a time, and those outside the layers (embeddings, head).
    A parameter of the model that is not in `weights` keeps its own.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], layers: Sequence[nn.Module] = ()) -> None:
        by_parameter = {p: weights[name] for name, p in model.named_parameters() if name in weights}
        self._layers = [(layer, {p: by_parameter.pop(p) for p in layer.parameters()}) for layer in layers]
        self._outside = by_parameter

    @contextmanager
    def active(self) -> Iterator[None]:
        hooks = [hook for layer, weights in self._layers for hook in _while_it_runs(layer, weights)]
        own = _exchange(self._outside)
        try:
            # Hooks would make torch compile layers again.
            with torch.compiler.set_stance("force_eager") if hooks else nullcontext():
                yield
        finally:
            _exchange(own)
            for hook in hooks:
                hook.remove()


def _while_it_runs(layer: nn.Module, weights: Mapping[nn.Parameter, Tensor]) -> list[Any]:
    """Add hooks that give a layer other weights during its forward pass, even if the pass fails; return the hooks."""
    own: list[dict[nn.Parameter, Tensor]] = []
    before = layer.register_forward_pre_hook(lambda *_: own.append(_exchange(weights)))

    def restore(*_: Any) -> None:
        _exchange(own.pop())

    return [before, layer.register_forward_hook(restore, always_call=True)]


def _exchange(weights: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Point parameters at other tensors, and return their old ones; no memory is overwritten."""
    before = {parameter: parameter.data for parameter in weights}
    for parameter, value in weights.items():
        parameter.data = value.to(parameter.device, parameter.dtype, non_blocking=True)
    return before


def build_reference(model: nn.Module, config: TrainConfig) -> Reference | None:
    """Return the reference if the options need one, else None.

    Raises:
        ConfigError: the device has no room for a copy of the weights.
        ModelError: the files at `--model-name` hold other parameters, or `--lora-adapter` is another model's.
    """
    if not config.needs_reference:
        return None
    if isinstance(model, PeftModel):
        start = config.lora_adapter if config.trains_adapter else None
        if start is None or config.kl_reference == "base":
            return model.disable_adapter
        return FrozenWeights(model, adapter_weights(model, read_adapter(start))).active
    assert isinstance(model, PreTrainedModel)
    found = load_causal_lm(config.model_name, dtype="auto")
    weights = {name: parameter.detach() for name, parameter in found.named_parameters()}
    if {name: p.shape for name, p in model.named_parameters()} != {name: w.shape for name, w in weights.items()}:
        raise ModelError("its parameters are not the trained model's", field="--model-name", got=config.model_name)
    size = sum(weight.numel() * weight.itemsize for weight in weights.values())
    device = model.device
    if config.ref_offload:
        weights = {name: w.pin_memory() if device.type == "cuda" else w for name, w in weights.items()}
    else:
        check_room(size, free_bytes(device))
        weights = {name: weight.to(device) for name, weight in weights.items()}
    log.info("reference: %.1f MB of frozen weights on %s", size / 1e6, next(iter(weights.values())).device)
    return FrozenWeights(model, weights, list(model.get_submodule(decoder_layers(model).name).children())).active


def free_bytes(device: torch.device) -> float:
    """Return the bytes that can still be allocated on a GPU; infinite for main memory, which is not counted."""
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def check_room(size: int, free: float) -> None:
    """Raise a `ConfigError` if a copy of the weights does not fit."""
    if size > free:
        raise ConfigError(
            "the reference is a copy of the weights",
            field="--kl-beta, --log-kl",
            got=f"{free / 2**30:.1f} GiB free on the GPU",
            wanted=f"{size / 2**30:.1f} GiB",
            fix="add --ref-offload, train an adapter (its reference needs no copy), or give the server less "
            "(--server.gpu-memory-utilization)",
        )
