"""Load the model to train."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.model.check import check_model
from grpo_trainer.model.quantised import quantised_by
from grpo_trainer.model.text_part import load_causal_lm

log = logging.getLogger(__name__)


def pick_device(wanted: str) -> torch.device:
    """Return the device that `--device` means; indices count the visible GPUs.

    Raises:
        ConfigError: torch does not know it, or this machine lacks it.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(
            "no such kind of device", field="--device", got=wanted, wanted="auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"this machine has {torch.cuda.device_count()} visible GPUs",
            field="--device",
            got=wanted,
            fix="use --device auto",
        )
    return device


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `--dtype` means: auto is bfloat16 on a GPU and float32 on a CPU."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, wanted)
    assert isinstance(dtype, torch.dtype)
    return dtype


def computing_dtype(model: nn.Module, config: ModelConfig) -> torch.dtype:
    """Return the dtype of a model's forward pass: fp32 weights compute in `--dtype` (`compute_in`)."""
    first = next(model.parameters())
    return pick_dtype(config.dtype, first.device) if first.dtype == torch.float32 else first.dtype


def remove_dropout(model: PreTrainedModel) -> None:
    """Disable dropout and jitter in the base model: the server samples without them, so the ratio would be noise."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Others are calls with plain attributes: attention_dropout, residual_dropout, layerdrop, jitter_noise, …
        for name in [name for name, value in vars(module).items() if isinstance(value, float)]:
            if "drop" in name or "jitter" in name:
                setattr(module, name, 0.0)


def fix_long_rope(model: PreTrainedModel, seq_len: int) -> None:
    """Let rotary embeddings of the kind longrope use the factors for long texts in each pass if texts may be long.

    transformers chooses the factors in each pass by the longest text in it, so the logprobs of a text would depend on
    those beside it. vLLM chooses them once, by the longest text that it serves.
    """
    for module in model.modules():
        rope: Any = module
        if getattr(rope, "rope_type", None) != "longrope":
            continue
        if seq_len > rope.config.rope_parameters["original_max_position_embeddings"]:
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](rope.config, rope.inv_freq.device, seq_len=seq_len)
            rope.inv_freq.copy_(frequencies)
            rope.rope_type = "default"  # nothing is chosen in a pass


def check_attention(found: Any, wanted: str) -> None:
    """Refuse an attention implementation that would silently leave out part of the model.

    Raises:
        ConfigError: it would; the message names the part.
    """
    capping = getattr(found.get_text_config(), "attn_logit_softcapping", None)
    if capping and wanted == "sdpa":
        raise ConfigError(
            f"does not cap this model's attention scores (attn_logit_softcapping {capping}), as the server does",
            field="--attention",
            got="sdpa",
            fix="use --attention eager",
        )


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Load weights onto the device, in training mode, with every parameter frozen.

    With `--load-in-4bit` the linear modules are quantised during loading; the files do not change.

    Raises:
        ModelError: see `check_model`; or the model is quantised already.
        ConfigError: see `pick_device` and `check_attention`.
    """
    found = check_model(config.model_name)
    check_attention(found, config.attention)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    quantised = {"quantization_config": _in_4_bits(config.model_name, found, dtype)} if config.load_in_4bit else {}
    model = load_causal_lm(
        config.model_name, dtype=dtype, attn_implementation=config.attention, device_map={"": device}, **quantised
    )
    if config.load_in_4bit:
        _check_kernel(model, device)
        _keep_one_layout(model)
    freeze(model, config)
    log.info(
        "loaded %s: %.2fM parameters%s, %s on %s",
        *(
            config.model_name,
            model.num_parameters() / 1e6,
            ", 4 bits each" if config.load_in_4bit else "",
            dtype,
            device,
        ),
    )
    return model


def freeze(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Put a model into training mode, without dropout, with every parameter frozen."""
    model.requires_grad_(False)
    remove_dropout(model)
    fix_long_rope(model, config.seq_len)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()  # only reentrant checkpoints need it
    return model.train()


def load_all_weights(config: ModelConfig) -> PreTrainedModel:
    """Load all weights in fp32 and trainable; the forward pass runs in `--dtype` by autocast.

    The weights stay fp32 whatever the forward pass computes in, because small updates to 16-bit weights round to
    nothing.

    Raises:
        ModelError, ConfigError: see `load_model`.
    """
    model = load_model(config.model_copy(update={"dtype": "float32"}))
    model.requires_grad_(True)
    compute_in(model, config)
    return model


def compute_in(model: PreTrainedModel, config: ModelConfig) -> None:
    """Make the forward pass of fp32 weights run in `--dtype`."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if dtype != torch.float32:
        for part in (model, model.base_model):  # callers use either
            part.forward = torch.autocast(device.type, dtype)(part.forward)


def _in_4_bits(name: str, found: Any, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return QLoRA's quantisation (arXiv 2305.14314): 4-bit NormalFloat with quantised scales.

    Raises:
        ModelError: the weights are quantised already.
    """
    if (method := quantised_by(found)) is not None:
        raise ModelError(
            "is quantised already", field=f"--model-name {name}", got=method, wanted="16 or 32 bits to quantise"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _check_kernel(model: PreTrainedModel, device: torch.device) -> None:
    """Test bitsandbytes on one matrix of each width, because some of its kernels garble some widths.

    Version 0.50 on a CPU garbles multiples of 32 that are not multiples of 64.

    Raises:
        ModelError: weights of a width come back garbled.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for width in sorted({module.in_features for module in linear if hasattr(module.weight, "quant_state")}):
        matrix = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(device)
        error = (dequantize_4bit(*quantize_4bit(matrix, quant_type="nf4")) - matrix).norm() / matrix.norm()
        if not error < KERNEL_ERROR:
            raise ModelError(
                f"bitsandbytes on {device.type} garbles weights of width {width}",
                field="--load-in-4bit",
                got=f"a relative error of {error:.2f}",
                wanted="about 0.09",
                fix="leave it out, use another device, or another version of bitsandbytes",
            )


KERNEL_ERROR = 0.15
"""Relative error of nf4 on normally distributed weights: about 0.09 when it works, 0.2 and more when it does not."""


def _keep_one_layout(model: PreTrainedModel) -> None:
    """Stop bitsandbytes from repacking weights on CPUs with AVX512-BF16.

    It does so at a layer's first forward pass in eval mode, for a kernel without a backward pass. The bridge proof runs
    in eval mode, and training after it would have no gradient.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # unknown to nn.Module's types


def weights_of(module: nn.Linear) -> Tensor:
    """Return a linear module's weights `[out, in]` in fp32, dequantised if it holds them in 4 bits."""
    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).float()
