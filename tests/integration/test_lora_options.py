"""The adapter's options against the real server: what it generates with is what the trainer computes."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_trainer.alignment import proof
from grpo_trainer.alignment.probes import Probe
from grpo_trainer.alignment.proof import NOISE_LIMIT_QUANTISED
from grpo_trainer.model.lora import save_adapter
from tests.bridge_contract import Trainer
from tests.integration.serving import KEEP_VERSIONS, save_tiny_model, serving, shared_server
from tests.unit.tiny_lora import fill_b

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server


def published(trainer: Trainer) -> Probe:
    """What the server samples once it has this trainer's adapter."""
    version = trainer.swap.connect(1)
    trainer.swap.publish(version)
    probe, answered = trainer.ask()
    assert answered == version
    return probe


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rslora": True, "lora_alpha": 4.0},
        {"lora_layer_indices": "1"},
        {"lora_layer_indices": "0", "lora_target_modules": "q_proj,up_proj", "lora_rslora": True},
    ],
)
def test_scale_and_layers_are_the_same_on_both_sides(options: dict[str, Any]) -> None:
    made = Trainer(shared_server(), **options)
    with made.swap:
        fill_b(made.model)
        probe = published(made)
        assert made.gap(probe) < 1e-3
        assert made.gap_to_base(probe) > 0.02, "the adapter made no difference: the test shows nothing"
        made.swap.prove()


def test_a_run_that_starts_from_an_adapter_serves_that_adapter(tmp_path: Path) -> None:
    first = Trainer(shared_server(), lora_rslora=True, lora_target_modules="q_proj,down_proj")
    fill_b(first.model)
    save_adapter(first.model, tmp_path)
    second = Trainer(shared_server(), lora_adapter=str(tmp_path))
    with second.swap:
        probe = published(second)
    assert first.gap(probe) < 1e-3 and first.gap_to_base(probe) > 0.02


def save_calm_model(folder: Path, *sizes: int) -> Path:
    """The tiny model with layers that say less and a head that says more, so that 4 bits are a small noise to it."""
    save_tiny_model(folder, *sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.weight" in name:
                parameter.mul_(0.3)
        model.lm_head.weight.mul_(4.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra qlora)")
def test_lora_in_4_bits_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tests.integration.serving.save_tiny_model", save_calm_model)
    with serving(tmp_path, "--lora-keep-versions", str(KEEP_VERSIONS)) as server:
        made = Trainer(server, load_in_4bit=True)
        fill_b(made.model)
        probe = published(made)
        with caplog.at_level(logging.INFO), made.swap:
            noise = made.swap.prove()
        assert noise is not None and 1e-3 < noise < NOISE_LIMIT_QUANTISED
        (proved,) = [record.args for record in caplog.records if record.name == proof.__name__]
        assert isinstance(proved, tuple) and proved[0] == noise
        assert made.gap(probe) < 3 * noise
        assert made.gap_to_base(probe) > 3 * noise, "the adapter is lost in the noise: the test shows nothing"
