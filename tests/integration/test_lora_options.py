"""The adapter's options against the real server: what it generates with is what the trainer computes."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_trainer.alignment import proof
from grpo_trainer.alignment.probes import Probe, probe_of, trainer_logprobs
from grpo_trainer.alignment.proof import NOISE_LIMIT_QUANTISED
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import add_adapter, save_adapter
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.lora_swap import LoraSwap
from tests.integration.serving import KEEP_VERSIONS, RANK, Serving, save_tiny_model, serving, shared_server
from tests.unit.tiny_lora import fill_b

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

PROMPT = [2 + (5 * i) % 90 for i in range(150)]


class Side:
    """A trainer's side of the bridge: the model as the options say, a client, the bridge."""

    def __init__(self, server: Serving, **options: object) -> None:
        port = int(server.url.rpartition(":")[2])
        values = {"model": str(server.model_folder), "weight_bridge_mode": "lora_only", "vllm_port": port}
        lora = {"lora_keep_versions": KEEP_VERSIONS, "lora_root": str(server.adapter_root)}
        rank = {} if "lora_adapter" in options else {"lora_r": RANK}
        config = build(TrainConfig, {**values, **lora, **rank, "seq_len": 256, "device": "cpu", **options})
        assert config.weight_bridge_mode == "lora_only"
        self.model: PeftModel = add_adapter(load_model(config), config, seed=0)
        self.client = ServerClient(config.server)
        self.swap = LoraSwap(config, self.model, self.client, server.adapter_root, config.seq_len)

    def published(self) -> Probe:
        """What the server says once it has this side's adapter."""
        version = self.swap.connect(1)
        self.swap.publish(version)
        answer = self.client.generate(PROMPT, max_tokens=24, temperature=1.0, logprobs=0, ignore_eos=True)
        assert answer.policy_version == version
        return probe_of(answer)


@contextmanager
def side(server: Serving, **options: object) -> Iterator[Side]:
    made = Side(server, **options)
    with made.swap:
        yield made


def gap(probe: Probe, model: PeftModel) -> float:
    return float((probe.server_logprobs - trainer_logprobs(model, probe)).abs().mean())


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rslora": True, "lora_alpha": 4.0},
        {"lora_layer_indices": "1"},
        {"lora_layer_indices": "0", "lora_target_modules": "q_proj,up_proj", "lora_rslora": True},
    ],
)
def test_scale_and_layers_are_the_same_on_both_sides(options: dict[str, object]) -> None:
    with side(shared_server(), **options) as made:
        fill_b(made.model)
        probe = made.published()
        assert gap(probe, made.model) < 1e-3
        with made.model.disable_adapter():
            assert gap(probe, made.model) > 0.02, "the adapter made no difference: the test shows nothing"
        made.swap.prove()


def test_a_run_that_starts_from_an_adapter_serves_that_adapter(tmp_path: Path) -> None:
    with side(shared_server(), lora_rslora=True, lora_target_modules="q_proj,down_proj") as first:
        fill_b(first.model)
        save_adapter(first.model, tmp_path)
    with side(shared_server(), lora_adapter=str(tmp_path)) as second:
        probe = second.published()
        assert gap(probe, first.model) < 1e-3
        with first.model.disable_adapter():
            assert gap(probe, first.model) > 0.02


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
    with (
        serving(tmp_path, "--lora-keep-versions", str(KEEP_VERSIONS)) as server,
        side(server, load_in_4bit=True) as made,
    ):
        fill_b(made.model)
        probe = made.published()
        with caplog.at_level(logging.INFO):
            noise = made.swap.prove()
        assert noise is not None and 1e-3 < noise < NOISE_LIMIT_QUANTISED
        (proved,) = [record.args for record in caplog.records if record.name == proof.__name__]
        assert isinstance(proved, tuple) and proved[0] == noise
        assert gap(probe, made.model) < 3 * noise
        with made.model.disable_adapter():
            assert gap(probe, made.model) > 3 * noise, "the adapter is lost in the noise: the test shows nothing"
