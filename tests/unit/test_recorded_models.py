"""The trainer's logprobs against those that real vLLM gave for the same random models (`tests/golden/*.json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.model.load import load_model
from tests.golden.host import logprobs
from tests.golden.models import (
    ATTENTION,
    IN_16_BITS,
    PAGE,
    PROMPT,
    RECORDED,
    WITHOUT_LORA,
    golden,
    save_model,
    table,
    with_adapter,
)

TOLERANCE = 2e-4
"""Largest difference of a token, in nats: both sides compute in float32."""
ROUNDED = 0.03
"""Mean difference, in nats, where both compute in bfloat16."""


@pytest.mark.parametrize("architecture", RECORDED)
def test_logprobs_are_vllms_without_and_with_an_adapter(tmp_path: Path, architecture: str) -> None:
    record = golden(architecture)
    save_model(architecture, tmp_path)
    attention = ATTENTION.get(architecture, "sdpa")
    dtype = "bfloat16" if architecture in IN_16_BITS else "float32"
    options = {"model_name": str(tmp_path), "attention": attention, "device": "cpu", "dtype": dtype}
    model: Any = load_model(ModelConfig.model_validate(options)).eval()

    def off(wanted: list[float]) -> Tensor:
        gaps = (logprobs(model, PROMPT) - torch.tensor(wanted)).abs()
        return gaps.mean() if architecture in IN_16_BITS else gaps.max()

    tolerance = ROUNDED if architecture in IN_16_BITS else TOLERANCE
    assert off(record.logprobs) < tolerance
    if architecture in WITHOUT_LORA:
        return
    model = with_adapter(architecture, model).eval()
    assert off(record.adapted) < tolerance
    assert off(record.logprobs) > 5 * tolerance, "the adapter changes nothing"


def test_the_page_of_models_lists_what_was_compared() -> None:
    assert table() in PAGE.read_text(), "write it by python -m tests.golden.models"
