"""Load the model to train."""

from __future__ import annotations

import logging

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_trainer.config import ModelConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.model.check import check_model

log = logging.getLogger(__name__)


def pick_device(wanted: str) -> torch.device:
    """The device that `--device` means; indices count the visible GPUs.

    Raises:
        ConfigError: torch does not know it, or this machine lacks it.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"--device {wanted}: no such kind of device; wanted auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {wanted}: this machine has {torch.cuda.device_count()} visible GPUs")
    return device


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype that `--dtype` means: auto is bfloat16 on a GPU and float32 on a CPU."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, wanted)
    assert isinstance(dtype, torch.dtype)
    return dtype


def remove_dropout(model: PreTrainedModel) -> None:
    """No dropout in the base model: the server samples without, and the ratio would be noise."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  # a plain attribute, unknown to nn.Module's types


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Load weights onto the device, in training mode but with nothing to train yet.

    Raises:
        ModelError: see `check_model`.
        ConfigError: see `pick_device`.
    """
    check_model(config.name)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    model = AutoModelForCausalLM.from_pretrained(
        config.name, dtype=dtype, attn_implementation=config.attention, device_map={"": device}
    )
    model.requires_grad_(False)
    remove_dropout(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info("loaded %s: %.2fM parameters, %s on %s", config.name, parameters / 1e6, dtype, device)
    return model.train()
