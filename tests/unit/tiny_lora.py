"""Random models of two layers, with a LoRA adapter or without, small enough for unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.model.lora import add_adapter

VOCAB = 64


def tiny_qwen(seed: int = 0, depth: int = 2) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config)
    model.requires_grad_(False)
    return model.train()


SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"initializer_range": 0.2, "pad_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi3": {"sliding_window": 100},
    "olmo2": {},
}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {}), **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.train()


def tiny_lora(**options: Any) -> PeftModel:
    """Return an adapter of rank 8 on a tiny model; options by their names without `lora_`, `layers` by this name."""
    named = {"lora_layer_indices" if name == "layers" else f"lora_{name}": value for name, value in options.items()}
    config = BridgeConfig.model_validate({"weight_bridge_mode": "lora_only", "lora_r": 8, **named})
    return add_adapter(tiny_qwen(), config, seed=0)


def fill_b(model: PeftModel, seed: int = 1) -> None:
    """Give the adapter an effect: B starts at 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def save_tiny(folder: Path) -> Path:
    tiny_qwen().save_pretrained(folder)
    return folder
