"""Load the model to train, after checking from its configuration that it can be trained; and its tokenizer."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import ConfigError, ModelError, warn_once
from grpo_trainer.model.quantised import is_read, not_read, quantised_by
from grpo_trainer.model.text_part import (
    NAMED_OTHERWISE,
    OWN_CONFIG,
    PREFIX,
    causal_lm_of,
    load_causal_lm,
    text_config_of,
)

log = logging.getLogger(__name__)

BUFFER_TOLERANCE = 1e-5
"""Relative tolerance: a GPU's powers and cosines differ from a CPU's in the last bits."""

KERNEL_ERROR = 0.15
"""Relative error of nf4 on normally distributed weights: about 0.09 when it works, 0.2 and more when it does not."""


# before anything is loaded -------------------------------------------------------------------------------------------


def check_model(name: str) -> Any:
    """Return the transformers configuration of a decoder-only causal language model, or of a model with such a part.

    Raises:
        ModelError: the model is not found, or is of another kind.
    """
    config = read_config(name)
    if problem := not_trainable(config):
        wanted = "a decoder-only model (Qwen, Llama, Mistral, …)"
        raise ModelError(problem, field="--model-name", got=name, wanted=wanted)
    return config


def read_config(name: str) -> Any:
    """Return the transformers configuration of a model.

    Raises:
        ModelError: it is not there, or can't be read.
    """
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = f"no model there: {next(iter(str(error).strip().splitlines()), '')}"
    except (KeyError, AttributeError, TypeError) as error:  # as of a quantization_config that is no table
        reason = f"its config.json can't be read: {type(error).__name__}: {error}"
    wanted = "a folder with config.json, or a hub name that this machine can reach"
    raise ModelError(reason, field="--model-name", got=name, wanted=wanted)


def not_trainable(config: Any) -> str | None:
    """Return why a model of this configuration can't be trained, or None."""
    kind = config.model_type
    architectures = list(getattr(config, "architectures", None) or [])
    name = architectures[0] if architectures else kind
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder"
    if problem := not_read(config):
        return problem
    if (text := text_config_of(config)) is not None:
        if is_read(config):
            return f"{name} is quantised and has a text part among others"
        if kind in NAMED_OTHERWISE:
            return f"the text part of {name} is not at {PREFIX.removesuffix('.')}"
        if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return f"the text part of {name} ({text.model_type}) has no AutoModelForCausalLM"
        return None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"{name} has no AutoModelForCausalLM"
    if kind == "phimoe":  # and its jitter can't be 0: in evaluation too it decides which experts count
        return f"{name} draws its experts at random in training"
    if architectures and not set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()).intersection(architectures):
        return f"{name} is no causal language model"
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return f"{name} is an encoder"
    return None


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
        problem = f"this machine has {torch.cuda.device_count()} visible GPUs"
        raise ConfigError(problem, field="--device", got=wanted, fix="use --device auto")
    return device


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `--dtype` means: auto is bfloat16 on a GPU and float32 on a CPU."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, wanted)
    assert isinstance(dtype, torch.dtype)
    return dtype


# the model -----------------------------------------------------------------------------------------------------------


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
    quantised: dict[str, Any] = {}
    if config.load_in_4bit:
        if (method := quantised_by(found)) is not None:
            field, wanted = f"--model-name {config.model_name}", "16 or 32 bits to quantise"
            raise ModelError("is quantised already", field=field, got=method, wanted=wanted)
        # QLoRA (arXiv 2305.14314): 4-bit NormalFloat with quantised scales.
        quantised["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = load_causal_lm(
        config.model_name, dtype=dtype, attn_implementation=config.attention, device_map={"": device}, **quantised
    )
    if config.load_in_4bit:
        if device.type == "cpu":
            warn_once(log, "--load-in-4bit on a CPU saves memory and costs time: each pass expands every matrix again")
        _check_kernel(model, device)
        # On CPUs with AVX512-BF16 bitsandbytes would repack weights at a layer's first forward pass in eval mode, as in
        # the bridge proof, for a kernel without a backward pass.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # unknown to nn.Module's types
    freeze(model, config)
    size, bits = model.num_parameters() / 1e6, ", 4 bits each" if config.load_in_4bit else ""
    log.info("loaded %s: %.2fM parameters%s, %s on %s", config.model_name, size, bits, dtype, device)
    return model


def load_all_weights(config: ModelConfig) -> PreTrainedModel:
    """Load all weights in fp32 and trainable (see `load_model`); the forward pass runs in `--dtype` by autocast.

    The weights stay fp32 whatever the forward pass computes in, because small updates to 16-bit weights round to
    nothing.
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


def computing_dtype(model: nn.Module, config: ModelConfig) -> torch.dtype:
    """Return the dtype of a model's forward pass: fp32 weights compute in `--dtype` (`compute_in`)."""
    first = next(model.parameters())
    return pick_dtype(config.dtype, first.device) if first.dtype == torch.float32 else first.dtype


def freeze(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Put a model into training mode, without dropout, with every parameter frozen."""
    model.requires_grad_(False)
    setattr(model, OWN_CONFIG, copy.deepcopy(model.config))
    for module in model.modules():  # the server samples without dropout and jitter: with them the ratio would be noise
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Others are calls with plain attributes of a module or its config: attention_dropout, layerdrop, jitter_noise…
        for holder in (module, getattr(module, "config", None)):
            for name in [name for name, value in getattr(holder, "__dict__", {}).items() if isinstance(value, float)]:
                if "drop" in name or "jitter" in name:
                    setattr(holder, name, 0.0)
    _fix_long_rope(model, config.seq_len)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()  # only reentrant checkpoints need it
    return model.train()


def _fix_long_rope(model: PreTrainedModel, seq_len: int) -> None:
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


# without weights -----------------------------------------------------------------------------------------------------


def build_without_weights(config: Any, dtype: torch.dtype, attention: str, device: torch.device) -> PreTrainedModel:
    """Return the model with its parameters on `meta`, and its buffers computed on the device by the model's own code.

    Raises:
        ModelError: a buffer differs from the one that the model's constructor makes on a CPU.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    with init_empty_weights(include_buffers=False), no_init_weights():
        reference = dict(causal_lm_of(config, **options).named_buffers())
    with torch.device("meta"):
        model = causal_lm_of(config, **options)
    held = set(model.state_dict())
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name not in held:
            empty = torch.empty_like(buffer, device=device)
            path, _, leaf = name.rpartition(".")
            filled = empty.fill_(torch.nan) if empty.is_floating_point() else empty.zero_()
            model.get_submodule(path)._buffers[leaf] = filled
    model.initialize_weights()  # fills buffers, as when a checkpoint is loaded; does nothing for parameters on meta
    for name, buffer in model.named_buffers():
        if name not in held:
            wanted = reference.get(name)
            here = buffer.cpu()
            if wanted is None or (here.shape, here.dtype) != (wanted.shape, wanted.dtype):
                raise ModelError(
                    "this buffer is not in a model built on a CPU",
                    field=name,
                    fix="use another release of transformers",
                )
            if not torch.allclose(here.double(), wanted.double(), rtol=BUFFER_TOLERANCE, atol=0.0, equal_nan=False):
                error = (here.double() - wanted.double()).abs().max().item()
                raise ModelError(
                    "this buffer is not that of a model built on a CPU",
                    field=name,
                    got=f"a difference of {error:.3g}",
                    wanted=f"at most {BUFFER_TOLERANCE:g} of the value",
                    fix="use lora_only",
                )
    return model


def take_generation_config(model: PreTrainedModel, name: str) -> None:
    """Load the generation configuration as `from_pretrained` does, so that saved models have it too."""
    with suppress(OSError):  # the model comes without one; transformers has derived one from its configuration
        model.generation_config = GenerationConfig.from_pretrained(name)


# in 4 bits -----------------------------------------------------------------------------------------------------------


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


def weights_of(module: nn.Linear) -> Tensor:
    """Return a linear module's weights `[out, in]` in fp32, dequantised if it holds them in 4 bits."""
    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).float()


# the tokenizer -------------------------------------------------------------------------------------------------------


class NoTokenizerError(ModelError):
    """The model has no readable tokenizer."""


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder or hub name; `model.export` writes it beside weights, for vLLM.

    Raises:
        NoTokenizerError: the model has no readable tokenizer; `got` has the reason.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:  # as of a tokenizer.json of {}
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise NoTokenizerError("no tokenizer", field=f"--model-name {name}", got=reason) from None
