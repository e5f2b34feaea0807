"""Files of models in the form of transformers 4, beside that of transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from environments.demo_model.model import build_tokenizer
from grpo_common.model_files import TOKENIZER_FILES, make_readable, readable_config, readable_tokenizer_config
from grpo_trainer.model.lora import adapter_settings, readable_settings
from grpo_trainer.model.tokenizer import read_tokenizer, write_tokenizer
from tests.golden.models import CONFIGS, SIZES
from tests.unit.tiny_lora import tiny_lora

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
OF_PEFT_0_12 = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora"),
    }
)
"""The fields of its LoraConfig."""


@pytest.mark.parametrize(
    ("model_type", "rope", "flat"),
    [
        ("qwen2", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        ("llama", {"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            "glm4",
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25},
            {"rotary_emb_base": 2e4, "rotary_pct": 0.25, "rope_scaling": None},
        ),
        (
            "phi3",
            {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64, **LONG},
            {
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
            },
        ),
        ("phi3", {"rope_theta": 1e4, "attention_factor": 1.2, **LONG}, {}),  # transformers 4 has no place for a factor
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 1e4,
            },
        ),
        (
            "olmo3",
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {},  # one base for all layers there
        ),
        ("new_model", {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}, {}),
    ],
)
def test_readable_config_says_flat_what_older_readers_understand(
    model_type: str, rope: dict[str, Any], flat: dict[str, Any]
) -> None:
    config = {"model_type": model_type, "dtype": "bfloat16", "rope_parameters": rope}
    assert readable_config(config) == {**config, "torch_dtype": "bfloat16", **flat}
    mixture = {"model_type": "qwen3_moe", "num_local_experts": 4}
    assert readable_config(mixture) == {**mixture, "num_experts": 4}
    outer = {"model_type": "outer", "text_config": config}
    assert readable_config(outer)["text_config"] == readable_config(config)


def configs() -> dict[str, PreTrainedConfig]:
    made: dict[str, Any] = {name: kind(**SIZES | fields) for name, (kind, fields) in CONFIGS.items()}
    llama, fields = CONFIGS["llama"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 3e4, "original_max_position_embeddings": 128}
    made["yarn"] = llama(**{**SIZES, **fields, "rope_parameters": yarn})
    phi3, fields = CONFIGS["phi3"]
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    long: dict[str, Any] = {"original_max_position_embeddings": 128, "rope_scaling": {"type": "longrope", **factors}}
    made["longrope"] = phi3(**SIZES | fields | long)
    return made


@pytest.mark.parametrize("name", [*CONFIGS, "yarn", "longrope"])
def test_readable_config_is_the_same_to_transformers_5(name: str, tmp_path: Path) -> None:
    config = configs()[name]
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    make_readable(tmp_path)
    assert "rope_theta" in json.loads((tmp_path / "config.json").read_text())
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    for rope in (before["rope_parameters"], after["rope_parameters"]):
        rope.pop("type", None)  # the older name of rope_type
    assert {key: after[key] for key in before} == before


def test_readable_tokenizer_config_changes_only_what_transformers_5_wrote() -> None:
    older = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"], "model_max_length": 8}
    assert readable_tokenizer_config(older) == older
    newer = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}
    assert readable_tokenizer_config(newer) == {
        "backend": "tokenizers",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
        "clean_up_tokenization_spaces": False,
    }


def test_write_tokenizer_copies_its_files_byte_for_byte(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    build_tokenizer().save_pretrained(base)
    make_readable(base)
    (base / "tokenizer_config.json").write_text(json.dumps(json.loads((base / "tokenizer_config.json").read_text())))
    (base / "special_tokens_map.json").write_text('{"eos_token":   "<|endoftext|>"}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (base / "model.safetensors").write_bytes(b"")
    out.mkdir()
    write_tokenizer(read_tokenizer(str(base)), out)
    files = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    copied = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert files - copied == {Path("model.safetensors")} and copied <= files
    assert all((base / path).read_bytes() == (out / path).read_bytes() for path in copied)


def test_write_tokenizer_that_was_read_from_nowhere_is_saved(tmp_path: Path) -> None:
    write_tokenizer(build_tokenizer(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= set(TOKENIZER_FILES)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("1+2") == build_tokenizer().encode("1+2")


def test_adapter_settings_have_no_key_that_older_peft_refuses() -> None:
    plain = adapter_settings(tiny_lora())
    assert set(plain) <= OF_PEFT_0_12
    layers = adapter_settings(tiny_lora(layers="1", rslora=True))
    assert set(layers) <= OF_PEFT_0_12 and layers["layers_to_transform"] == [1] and layers["use_rslora"] is True


def test_readable_settings_keep_what_is_not_at_its_default() -> None:
    config = LoraConfig(
        r=4, target_modules=["q_proj"], use_dora=True, exclude_modules=["k_proj"], task_type="CAUSAL_LM"
    )
    settings = json.loads(json.dumps(config.to_dict(), default=lambda value: sorted(value)))
    kept = readable_settings({**settings, "unknown_to_peft": 1})
    assert (kept["use_dora"], kept["exclude_modules"], kept["unknown_to_peft"]) == (True, ["k_proj"], 1)
    assert (
        "peft_version" not in kept and LoraConfig(**{k: v for k, v in kept.items() if k != "unknown_to_peft"}) == config
    )
