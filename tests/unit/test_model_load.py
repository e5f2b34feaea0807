"""Loading a model: of which kind, on which device, and without the noise of dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, Phi3Config, Phi3ForCausalLM, PhiConfig, PhiForCausalLM, Qwen2Config, T5Config

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.model.check import not_trainable
from grpo_trainer.model.load import load_all_weights, load_model, pick_device, pick_dtype
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.model.tokenizer import NoTokenizerError, read_tokenizer
from tests.unit.tiny_lora import save_tiny, tiny_qwen


def test_dropout_of_the_base_model_is_off_while_training(tmp_path: Path) -> None:
    config = PhiConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5,
    )  # fmt: skip
    PhiForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(ModelConfig(model_name=str(tmp_path), device="cpu"))
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert model.training
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize(("seq_len", "factor"), [(16, 1.0), (64, 4.0)])
def test_long_rope_has_one_kind_of_factors_whatever_stands_beside_a_text(
    seq_len: int, factor: float, tmp_path: Path
) -> None:
    def phi(short: float) -> Phi3ForCausalLM:
        rope: Any = {"rope_type": "longrope", "short_factor": [short] * 4, "long_factor": [4.0] * 4}
        rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
        sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
        sizes |= {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
        torch.manual_seed(0)
        return Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=rope))

    phi(1.0).save_pretrained(tmp_path)
    model = load_model(ModelConfig(model_name=str(tmp_path), device="cpu", seq_len=seq_len)).eval()
    tokens = torch.randint(1, 64, (1, seq_len))
    alone, beside = model(input_ids=tokens[:, :10]).logits, model(input_ids=tokens).logits[:, :10]
    torch.testing.assert_close(alone, beside)
    torch.testing.assert_close(alone, phi(factor).eval()(input_ids=tokens[:, :10]).logits)


def test_a_model_is_loaded_frozen_in_the_wanted_dtype(tmp_path: Path) -> None:
    model = load_model(ModelConfig(model_name=str(save_tiny(tmp_path)), device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    adapted = add_adapter(model, BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), seed=0)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "name", "kind"),
    [
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM", "masked"),
        (BertConfig(), "bert", "encoder"),
        (T5Config(), "t5", "encoder-decoder"),
    ],
)
def test_other_kinds_are_named(config: object, name: str, kind: str) -> None:
    words = (not_trainable(config) or "").split()
    assert words[0] == name and (kind in words) == (kind != "masked")


def test_decoders_are_taken_with_or_without_an_architecture() -> None:
    assert not_trainable(Qwen2Config()) is None
    assert not_trainable(Qwen2Config(architectures=["Qwen2ForCausalLM"])) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_are_trained_in_fp32_whatever_the_forward_pass_computes_in(tmp_path: Path, dtype: str) -> None:
    config = ModelConfig.model_validate({"model_name": str(save_tiny(tmp_path)), "device": "cpu", "dtype": dtype})
    model = load_all_weights(config)
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert logits.dtype == getattr(torch, dtype)
    logits.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32 and parameter.grad.any(), name


def test_a_missing_model_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=f"{tmp_path}/none"))
    assert (refused.value.field, refused.value.got) == ("--model-name", f"{tmp_path}/none")


def test_devices_and_dtypes() -> None:
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for device, wanted in (("toaster", "auto, cpu, cuda or cuda:N"), ("cuda:99", "")):
        with pytest.raises(ConfigError) as refused:
            pick_device(device)
        assert (refused.value.field, refused.value.got, refused.value.wanted) == ("--device", device, wanted)


def test_modules_that_the_model_lacks_are_named_with_those_it_has() -> None:
    with pytest.raises(ModelError) as refused:
        add_adapter(tiny_qwen(), BridgeConfig(weight_bridge_mode="lora_only", lora_target_modules=("q", "w")), seed=0)
    assert (refused.value.field, refused.value.got) == ("--lora-target-modules", "q,w")
    assert refused.value.wanted.startswith("down_proj, ")


def test_read_tokenizer_names_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for text in ("{}", "[]", "{"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(NoTokenizerError) as error:
            read_tokenizer(str(tmp_path))
        assert error.value.field == str(tmp_path) and error.value.got
