"""Exported models: what transformers loads back computes what the trainer's model does, and that one is untouched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import ModelError
from grpo_trainer.model.export import INDEX_FILE, checkpoint_name, export_model, plan_shards
from grpo_trainer.model.lora import add_adapter
from tests.unit.tiny_lora import fill_b, tiny_lora, tiny_qwen

TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


def tied_qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def tiny_mixture() -> Qwen3MoeForCausalLM:
    """Its experts are one tensor each in memory, and one a piece in checkpoints."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # pyright: ignore[reportCallIssue]  # kept from older configurations
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def names(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all that lies in a folder's weights files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            held = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        assert not held.keys() & found.keys()
        found |= held
    return found


def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    ("parameter", "name"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        (
            "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", None),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight", None),
    ],
)
def test_names_lose_what_peft_put_around_them(parameter: str, name: str | None) -> None:
    assert checkpoint_name(parameter) == name


@pytest.mark.parametrize("make", [tiny_qwen, tied_qwen, tiny_mixture])
def test_a_plain_model_is_written_as_transformers_itself_would(make: type[PreTrainedModel], tmp_path: Path) -> None:
    model = make()  # type: ignore[call-arg]
    (tmp_path / "ours").mkdir()
    export_model(model, None, tmp_path / "ours", torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    assert names(tmp_path / "ours") == names(tmp_path / "theirs")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(model))


def test_tied_embeddings_are_written_once_and_load_back_tied(tmp_path: Path) -> None:
    export_model(tied_qwen(), None, tmp_path, torch.float32)
    assert "lm_head.weight" not in names(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("make", [tiny_qwen, tied_qwen])
def test_a_merged_model_computes_what_the_adapter_does(
    make: type[PreTrainedModel], rslora: bool, tmp_path: Path
) -> None:
    base = make()  # type: ignore[call-arg]
    base.requires_grad_(False)
    options = BridgeConfig.model_validate({"weight_bridge_mode": "lora_only", "lora_r": 8, "lora_rslora": rslora})
    model = add_adapter(base, options, seed=0)
    fill_b(model)
    export_model(model, None, tmp_path, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert (logits(loaded) - logits(model)).abs().max() > 0.01, "the adapter made no difference"


def test_no_bit_of_the_model_in_memory_changes(tmp_path: Path) -> None:
    model = tiny_lora()
    fill_b(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_model(model, None, tmp_path, torch.bfloat16)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_merging_is_exact_before_it_is_rounded(tmp_path: Path) -> None:
    base = tiny_qwen().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    model = add_adapter(base, BridgeConfig.model_validate({"weight_bridge_mode": "lora_only", "lora_r": 8}), seed=0)
    fill_b(model)
    layer: Any = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == b.dtype == torch.float32 and layer.base_layer.weight.dtype == torch.bfloat16
    wanted = (layer.base_layer.weight.float() + layer.scaling["default"] * b @ a).to(torch.bfloat16)
    export_model(model, None, tmp_path, torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor("model.layers.0.mlp.up_proj.weight"), wanted)


def test_files_stay_below_the_limit_and_the_index_finds_every_tensor(tmp_path: Path) -> None:
    limit = 20_000
    export_model(tiny_qwen(), None, tmp_path, torch.float32, shard_bytes=limit)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == {file.name for file in files}
    assert index["weight_map"].keys() == names(tmp_path).keys()
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in tiny_qwen().parameters())
    assert all(file.stat().st_size < limit + 3_000 for file in files)  # their headers come on top
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(tiny_qwen()))


def test_shards_are_filled_in_order_and_a_tensor_above_the_limit_stands_alone() -> None:
    # 3 + 4 <= 8; 3 + 4 + 2 > 8; 9 > 8 stands alone; 1 after it
    sizes = {"a": 3, "b": 4, "c": 2, "d": 9, "e": 1}
    assert plan_shards(sizes, 8) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert plan_shards({}, 8) == []


def test_a_generation_config_goes_along_only_if_the_model_came_with_one(tmp_path: Path) -> None:
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    model = tiny_qwen()
    export_model(model, None, tmp_path / "without", torch.float32)
    assert not (tmp_path / "without" / "generation_config.json").exists()
    model.generation_config = GenerationConfig(eos_token_id=7, temperature=0.6)  # of which transformers says: invalid
    export_model(model, None, tmp_path / "with", torch.float32)
    written = json.loads((tmp_path / "with" / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["temperature"]) == (7, 0.6)


def test_weights_that_are_packed_in_fewer_bits_are_refused(tmp_path: Path) -> None:
    model = tiny_qwen()
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ModelError) as error:
        export_model(model, None, tmp_path, torch.float32)
    assert "model.layers.0.mlp.up_proj.weight" in str(error.value) and "torch.uint8" in str(error.value)


def test_an_adapter_on_one_of_two_tied_modules_is_refused(tmp_path: Path) -> None:
    model = tied_qwen()
    first, second = (model.get_submodule(f"model.layers.{number}.mlp.up_proj") for number in (0, 1))
    second.weight = first.weight
    options = BridgeConfig.model_validate({"weight_bridge_mode": "lora_only", "lora_r": 8, "lora_layer_indices": "1"})
    adapted = add_adapter(model, options, seed=0)
    with pytest.raises(ModelError) as error:
        export_model(adapted, None, tmp_path, torch.float32)
    assert all(f"layers.{number}.mlp.up_proj" in str(error.value) for number in (0, 1))


def test_what_is_not_finite_in_the_dtype_of_the_file_is_not_written(tmp_path: Path) -> None:
    model = tiny_qwen()
    name = "model.norm.weight"
    for value, dtype in ((70_000.0, torch.float16), (float("nan"), torch.float32)):  # float16 ends at 65,504
        with torch.no_grad():
            model.get_parameter(name).fill_(value)
        with pytest.raises(ModelError) as refused:
            export_model(model, None, tmp_path, dtype)
        assert refused.value.field == name and not list(tmp_path.iterdir())
