"""Tiny models of each architecture, their every parameter random, so that no two can be taken for one another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

FOLDER: Final = Path(__file__).parent


class Golden(msgspec.Struct, frozen=True):
    """`vllm`: shapes by name; `ties`: names of one place -> the first of them; `found`: where each parameter of
    transformers' model stands, `[name, first row]`, under each of its names."""

    vllm: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    found: dict[str, list[tuple[str, int]]]

    def text(self) -> str:
        """JSON with a line for each name."""
        parts = []
        for field, value in msgspec.to_builtins(self).items():
            lines = (f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(value.items()))
            parts.append(f"  {json.dumps(field)}: {{\n" + ",\n".join(lines) + "\n  }")
        return "{\n" + ",\n".join(parts) + "\n}\n"


VOCABULARY: Final = 98  # vLLM pads it to 128

SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # heads of 32: vLLM's CPU build has no attention kernel for smaller ones
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS: Final = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,  # twice that is the hidden size: a transposed matrix would fit as well
}

CONFIGS: Final[Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 64, "tie_word_embeddings": False}),
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "phi3": (Phi3Config, {}),
    "gemma2": (Gemma2Config, WINDOWS),
    "gemma3": (Gemma3TextConfig, WINDOWS),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "head_dim": 32}),
}
ATTENTION: Final = {"gemma2": "eager"}
"""Where transformers' default leaves out part of the model (here the soft capping of attention scores)."""


def golden(architecture: str) -> Golden:
    """What vLLM has reported."""
    return msgspec.json.decode((FOLDER / f"{architecture}.json").read_bytes(), type=Golden)


def random_model(architecture: str) -> PreTrainedModel:
    """The model in float32; norms and biases are random as well."""
    torch.manual_seed(0)
    kind, fields = CONFIGS[architecture]
    attention = ATTENTION.get(architecture, "sdpa")
    config = kind(**SIZES | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
