"""Which adapters are servable: the table against PEFT's own configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig

from vllm_server.protocol.adapter_config import SERVABLE, refusals


def written(config: Any) -> dict[str, Any]:
    """What PEFT writes into adapter_config.json for a configuration."""
    return json.loads(json.dumps(config.to_dict(), default=lambda value: sorted(value) or None))


PLAIN = {"r": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"lora_alpha": 7.5, "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian"},
        {"task_type": None},
    ],
)
def test_what_is_served_has_no_refusal(options: dict[str, Any]) -> None:
    assert refusals(written(LoraConfig(**{**PLAIN, **options})), 8) == []


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LoraConfig(**PLAIN, use_dora=True), "use_dora"),
        (LoraConfig(**PLAIN, modules_to_save=["lm_head"]), "modules_to_save"),
        (LoraConfig(**PLAIN, bias="lora_only"), "bias"),
        (LoraConfig(**PLAIN, lora_bias=True), "lora_bias"),
        (LoraConfig(**PLAIN, rank_pattern={"q_proj": 4}), "rank_pattern"),
        (LoraConfig(**PLAIN, alpha_pattern={"q_proj": 4}), "alpha_pattern"),
        (LoraConfig(**PLAIN, init_lora_weights="pissa"), "init_lora_weights"),
        (LoraConfig(**PLAIN, init_lora_weights="olora"), "init_lora_weights"),
        (LoraConfig(**{**PLAIN, "task_type": "SEQ_CLS"}), "task_type"),
        (LoraConfig(**{**PLAIN, "r": 16}), "r"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "peft_type"),
        (PrefixTuningConfig(num_virtual_tokens=4), "peft_type"),
        (PromptTuningConfig(num_virtual_tokens=4), "peft_type"),
    ],
)
def test_what_is_not_served_is_named_first_with_a_fix(config: Any, field: str) -> None:
    first = refusals(written(config), 8)[0]
    assert first.field == field and first.fix and first.wanted
    assert str(first).startswith(f"{field}: got ")


def test_every_field_of_the_table_is_one_of_pefts() -> None:
    known = set(LoraConfig().to_dict())
    assert set(SERVABLE) <= known | {"monteclora_config", "kasa_config", "arrow_config"}  # these are newer than 0.18
