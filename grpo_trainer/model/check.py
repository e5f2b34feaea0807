"""Check from a model's configuration that it can be trained, before anything is loaded or started."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from grpo_trainer.errors import ModelError
from grpo_trainer.model.quantised import is_read, not_read
from grpo_trainer.model.text_part import NAMED_OTHERWISE, PREFIX, is_causal, text_config_of


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
    raise ModelError(
        reason,
        field="--model-name",
        got=name,
        wanted="a folder with config.json, or a hub name that this machine can reach",
    )


def not_trainable(config: Any) -> str | None:
    """Return why a model of this configuration can't be trained, or None."""
    kind = config.model_type
    architectures = list(getattr(config, "architectures", None) or [])
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if getattr(config, "is_encoder_decoder", False):
        return f"{_called(architectures, kind)} is an encoder-decoder"
    if problem := not_read(config):
        return problem
    if (text := text_config_of(config)) is not None:
        if is_read(config):
            return f"{_called(architectures, kind)} is quantised and has a text part among others"
        if kind in NAMED_OTHERWISE:
            return f"the text part of {_called(architectures, kind)} is not at {PREFIX.removesuffix('.')}"
        if is_causal(text.model_type):
            return None
        return f"the text part of {_called(architectures, kind)} ({text.model_type}) has no AutoModelForCausalLM"
    if not is_causal(kind):
        return f"{_called(architectures, kind)} has no AutoModelForCausalLM"
    if architectures and not causal.intersection(architectures):
        return f"{_called(architectures, kind)} is no causal language model"
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return f"{_called(architectures, kind)} is an encoder"
    return None


def _called(architectures: list[str], kind: str) -> str:
    return architectures[0] if architectures else kind
