"""Tiny models of each architecture, their every parameter random, so that no two can be taken for one another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from grpo_trainer.config.bridge import ALL_LINEAR, BridgeConfig
from grpo_trainer.model.lora import add_adapter

FOLDER: Final = Path(__file__).parent


class Golden(msgspec.Struct, frozen=True):
    """`vllm`: shapes by name; `ties`: names of one place -> the first of them; `found`: where each parameter of
    transformers' model stands, `[name, first row]`, under each of its names. `logprobs`: of the tokens of `PROMPT`
    after the first, in nats; `adapted`: the same with the adapter of `with_adapter`, empty for `WITHOUT_LORA`.
    `served_by`: vLLM's class. Of models that are not in `CONFIGS` there are only the last three."""

    vllm: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    found: dict[str, list[tuple[str, int]]]
    logprobs: list[float]
    adapted: list[float]
    served_by: str

    def text(self) -> str:
        """JSON with a line for each name."""
        parts = []
        for field, value in msgspec.to_builtins(self).items():
            if isinstance(value, dict):
                lines = (f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(value.items()))
                parts.append(f"  {json.dumps(field)}: {{\n" + ",\n".join(lines) + "\n  }")
            else:
                parts.append(f"  {json.dumps(field)}: {json.dumps(value)}")
        return "{\n" + ",\n".join(parts) + "\n}\n"


VOCABULARY: Final = 98  # vLLM pads it to 128
PROMPT: Final = torch.randint(2, 90, (200,), generator=torch.Generator().manual_seed(2)).tolist()
"""Longer than a block of the cache and than the tiny models' sliding windows."""

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
    "starcoder2": (Starcoder2Config, {"sliding_window": None}),
    "phi": (PhiConfig, {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "yi": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "tie_word_embeddings": False}),
    "deepseek_coder": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}, "tie_word_embeddings": False},
    ),
}
"""Architectures of which trainer and server can share one copy of the weights."""

YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}
"""As DeepSeek-V2's own. With plain rotary embeddings vLLM's CPU build computes latent attention wrongly."""
MLA: Final = {
    "rope_parameters": YARN,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # with the 64 below the only size of vLLM's latent attention
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
}
CHUNKED: Final = {
    **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    **{"intermediate_size_mlp": 64, "attention_chunk_size": 128, "no_rope_layers": [1, 0], "use_qk_norm": False},
}
COPIED: Final[Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]]] = {
    "deepseek_v2": (DeepseekV2Config, MLA),
    "llama4": (Llama4TextConfig, CHUNKED),
}
"""Architectures that need a copy of the weights on each side."""

TOWER: Final = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4}
IMAGES: Final = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92}
CONDITIONAL: Final[Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]]] = {
    "gemma3_whole": (
        Gemma3Config,
        WINDOWS,
        {
            "vision_config": {**TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16},
            "mm_tokens_per_image": 4,
            **{"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
        },
    ),
    "gemma4_whole": (
        Gemma4Config,
        {
            **{"head_dim": 32, "global_head_dim": 64, "sliding_window": 64, "num_kv_shared_layers": 0},
            "layer_types": ["sliding_attention", "full_attention"],
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY},
        },
        {
            "vision_config": {
                **{**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
                "head_dim": 16,
            },
            "audio_config": None,
            **{**IMAGES, "audio_token_id": 93, "video_token_id": 94},
        },
    ),
    "qwen3_5": (
        Qwen3_5Config,
        {
            "layer_types": ["linear_attention", "full_attention"],
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
            **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 32},
            "tie_word_embeddings": False,
        },
        {
            "vision_config": {
                **{**TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 128, "spatial_merge_size": 2},
                **{"temporal_patch_size": 2, "num_position_embeddings": 16, "in_channels": 3},
            },
            **{"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
            "tie_word_embeddings": False,
        },
    ),
}
"""Models of which the trainer has the text part: fields of that part, and of the whole."""

RECORDED: Final = (*CONFIGS, *COPIED, *CONDITIONAL)

IN_A_PROCESS: Final = ("phi", "starcoder2")
"""vLLM runs transformers' class, which it changes, so the trainer's model needs another process."""

WITHOUT_LORA: Final = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "llama4")
"""vLLM's CPU build does not serve LoRA for mixtures of experts."""

IN_16_BITS: Final = ("qwen3_5",)
"""vLLM's CPU build computes gated delta nets in bfloat16 only; so does the trainer then."""

ATTENTION: Final = {"gemma2": "eager"}
"""Where transformers' default leaves out part of the model (here the soft capping of attention scores)."""


PROCESSORS: Final = {
    "gemma3_whole": {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"},
    "gemma4_whole": {"image_processor_type": "Gemma4ImageProcessor", "processor_class": "Gemma4Processor"},
    "qwen3_5": {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"},
}

ADAPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
    "deepseek_v2": ("q_proj", "o_proj"),
    "llama4": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3_5": (*ALL_LINEAR, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), ("q_proj", "k_proj", "v_proj", "o_proj")),
}
"""Modules with an adapter, where they are not the default ones."""


def adapted_modules(architecture: str) -> tuple[str, ...]:
    """Modules with an adapter."""
    return ADAPTED.get(architecture, ALL_LINEAR)


def with_adapter(architecture: str, model: PreTrainedModel) -> PeftModel:
    """The model with a random adapter, which changes what it computes."""
    wrapped = add_adapter(
        model,
        BridgeConfig(
            weight_bridge_mode="lora_only", lora_r=8, lora_alpha=16, lora_target_modules=adapted_modules(architecture)
        ),
        seed=0,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return wrapped


FAMILIES: Final[Mapping[str, str]] = {
    "qwen2": "Qwen 2, Qwen 2.5",
    "qwen3": "Qwen 3",
    "llama": "Llama 3",
    "mistral": "Mistral",
    "phi3": "Phi-3, Phi-4",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 1B (text)",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen 2 MoE",
    "qwen3_moe": "Qwen 3 MoE",
    "starcoder2": "StarCoder2",
    "phi": "Phi-1, Phi-2",
    "yi": "Yi",
    "deepseek_coder": "DeepSeek-Coder",
    "deepseek_v2": "DeepSeek-V2",
    "llama4": "Llama 4 (text)",
    "gemma3_whole": "Gemma 3 4B and larger",
    "gemma4_whole": "Gemma 4",
    "qwen3_5": "Qwen 3.5 (dense)",
}
PAGE: Final = FOLDER.parents[1] / "docs" / "training.md"


def table() -> str:
    """The table of compared models in `docs/training.md`, a line for each record."""
    lines = []
    for name in RECORDED:
        model = random_model(name)
        part = "text part of " if name in CONDITIONAL else ""
        kinds = f"{part}`{type(model).__name__}`"
        by = golden(name).served_by
        served = "transformers' class" if by.startswith("Transformers") else "its own class"
        lines.append(f"| {FAMILIES[name]} | {kinds} | {served} | {'yes' if name in CONFIGS else 'no'} |\n")
    return HEADER + "".join(lines)


HEADER: Final = (
    "| models | class in transformers | vLLM runs | one copy of the weights (`shared_vllm`, `--share-base`) |\n"
    "|---|---|---|---|\n"
)


def save_model(
    architecture: str, folder: Path, vocabulary: int = VOCABULARY, file_bytes: int = 1 << 30
) -> PreTrainedModel:
    """Write the random model; a conditional one with the files that vLLM wants of it."""
    model = random_model(architecture, vocabulary)
    model.save_pretrained(folder, max_shard_size=file_bytes)
    if architecture in CONDITIONAL:
        words = Tokenizer(WordLevel({f"t{token}": token for token in range(VOCABULARY)}, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0").save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[architecture]))
    return model


def golden(architecture: str) -> Golden:
    """What vLLM has reported."""
    return msgspec.json.decode((FOLDER / f"{architecture}.json").read_bytes(), type=Golden)


def random_model(architecture: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """The model in float32; norms and biases are random as well."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": vocabulary}
    attention = ATTENTION.get(architecture, "sdpa")
    if architecture in CONDITIONAL:
        kind, text, whole = CONDITIONAL[architecture]
        config = kind(text_config=sizes | text, **whole)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        kind, fields = {**CONFIGS, **COPIED}[architecture]
        config = kind(**sizes | fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


if __name__ == "__main__":  # writes the table
    before, _, rest = PAGE.read_text().partition(HEADER)
    PAGE.write_text(before + table() + rest[rest.index("\n\n") + 1 :])
