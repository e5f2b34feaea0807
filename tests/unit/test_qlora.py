"""A base model in 4 bits: how it is loaded, that it trains, and that the bridge proof still proves something."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.alignment.proof import NOISE_LIMIT_QUANTISED
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import BridgeError, ModelError
from grpo_trainer.model.load import load_model, weights_of
from grpo_trainer.model.lora import add_adapter
from tests.unit.test_proof import FakeServer, prove
from tests.unit.tiny_lora import fill_b, tiny_qwen

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (the extra qlora)"
)
pytestmark = pytest.mark.complete  # 4-bit kernels are slow on a CPU
TOKENS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))


def wide() -> Qwen2ForCausalLM:
    """The tiny model with twice the width: all of its linear modules are multiples of 64 wide."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def base(folder: Path, layer_scale: float = 0.3) -> Path:
    """The tiny model with layers that say less and a head that says more, so that 4 bits are a small noise to it."""
    model = wide()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and "proj.weight" in name:
                parameter.mul_(layer_scale)
        model.lm_head.weight.mul_(8.0)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, *, in_4_bits: bool) -> PeftModel:
    model = load_model(ModelConfig(model_name=str(folder), device="cpu", load_in_4bit=in_4_bits))
    return add_adapter(model, BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), seed=0)


@needs_bitsandbytes
def test_linear_modules_are_in_4_bits_and_near_their_weights(tmp_path: Path) -> None:
    folder = base(tmp_path, 1.0)
    model = load_model(ModelConfig(model_name=str(folder), device="cpu", load_in_4bit=True))
    own = AutoModelForCausalLM.from_pretrained(folder)
    before, after = (dict(m.named_modules()) for m in (own, model))
    for name, module in before.items():
        if not isinstance(module, torch.nn.Linear):
            continue
        quantised = after[name]
        assert isinstance(quantised, torch.nn.Linear)
        was, now = module.weight, weights_of(quantised)
        if name == "lm_head":
            assert torch.equal(now, was)
            continue
        assert quantised.weight.dtype == torch.uint8 and now.dtype == torch.float32
        # of nf4's 16 values in [-1, 1] two neighbours are at most 0.304 apart: -1 and -0.696
        assert 0 < (now - was).abs().max() <= 0.16 * was.abs().max()
        assert torch.equal(weights_of(module), was)


@needs_bitsandbytes
def test_every_adapted_module_has_a_gradient_also_after_an_evaluation(tmp_path: Path) -> None:
    model = loaded(base(tmp_path), in_4_bits=True)
    fill_b(model)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model.train()(input_ids=TOKENS).logits.logsumexp(-1).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}

    before = gradients()
    with torch.no_grad():  # the proof does so; some kernels repack the weights here and can't go backward afterwards
        model.eval()(input_ids=TOKENS)
    after = gradients()
    assert before.keys() == after.keys() == {n for n, _ in model.named_parameters() if "lora_" in n}
    assert all(float(gradient.abs().max()) > 0 for gradient in after.values())
    assert all(torch.equal(before[name], after[name]) for name in before)


@needs_bitsandbytes
def test_an_honest_server_passes_and_the_noise_is_told(tmp_path: Path) -> None:
    folder = base(tmp_path)
    trainer, server = loaded(folder, in_4_bits=True), loaded(folder, in_4_bits=False)
    fill_b(trainer)
    fake = FakeServer(trainer, model=server)
    noise = prove(trainer, fake).noise
    assert 1e-3 < noise < NOISE_LIMIT_QUANTISED  # more than rounding: the test shows something
    assert len(fake.adapters) == 3


@needs_bitsandbytes
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("fault", ["base served", "scaled twice", "first adapter kept", "synthetic kept"])
def test_planted_faults_are_caught_above_the_noise_of_4_bits(tmp_path: Path, fault: str, fresh: bool) -> None:
    folder = base(tmp_path)
    trainer, server = loaded(folder, in_4_bits=True), loaded(folder, in_4_bits=False)
    if not fresh:
        fill_b(trainer)
    fake = FakeServer(trainer, fault, model=server)
    with pytest.raises(BridgeError) as failed:
        prove(trainer, fake)
    assert failed.value.field.startswith(FAILED)


@needs_bitsandbytes
def test_a_base_model_that_4_bits_ruin_is_refused(tmp_path: Path) -> None:
    folder = base(tmp_path, layer_scale=2.0)
    trainer, server = loaded(folder, in_4_bits=True), loaded(folder, in_4_bits=False)
    fake = FakeServer(trainer, model=server)
    with pytest.raises(BridgeError) as failed:
        prove(trainer, fake)
    assert failed.value.field == f"{FAILED} (present adapter)"


@needs_bitsandbytes
def test_a_width_that_the_kernel_garbles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional

    folder = base(tmp_path)
    honest = bitsandbytes.functional.dequantize_4bit

    def garbled(quantised: torch.Tensor, state: Any) -> torch.Tensor:
        matrix = honest(quantised, state)
        return matrix if matrix.shape[1] == 64 else matrix.roll(1)

    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", garbled)
    with pytest.raises(ModelError) as refused:
        loaded(folder, in_4_bits=True)
    assert refused.value.field == "--load-in-4bit" and {"cpu", "128"} <= set(refused.value.summary.split())


@needs_bitsandbytes
@pytest.mark.parametrize("quantised", [{"quant_method": "awq", "bits": 4}, "awq"])
def test_a_model_that_is_quantised_already_is_refused(tmp_path: Path, quantised: object) -> None:
    tiny_qwen().config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": quantised}))
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=str(tmp_path), device="cpu", load_in_4bit=True))
    assert refused.value.field.startswith("--model-name")
    assert refused.value.got in ("awq", str(tmp_path))  # the second: transformers can't read the configuration
