"""Exported models: transformers and PEFT load them, and they compute what the trainer's model does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from environments.demo_model.model import build_tokenizer
from grpo_trainer.cli import app
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import CheckpointConfig, OptimizerConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.model import export
from grpo_trainer.model.export import INDEX_FILE, export_model
from grpo_trainer.model.lora import adapter_settings, add_adapter
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from tests.unit.factories import refusing
from tests.unit.tiny_lora import fill_b, save_tiny, tiny, tiny_lora, tiny_qwen

TOKENS = torch.tensor([[1, 2, 3, 7, 9]])
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
"""One tensor each in memory, and one a piece in checkpoints."""


def names(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all that lies in a folder's weights files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            held = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        assert not held.keys() & found.keys()
        found |= held
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(input_ids=TOKENS).logits


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
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("limit", [1 << 30, 20_000], ids=["one file", "several"])
@pytest.mark.parametrize(("kind", "changes"), [("qwen2", UNTIED), ("qwen2", {}), ("qwen3_moe", EXPERTS)])
def test_export_model_has_the_names_of_transformers(
    kind: str, changes: dict[str, Any], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", limit)
    model, ours = tiny(kind, **changes), tmp_path / "ours"
    ours.mkdir()
    export_model(model, None, ours, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    assert names(ours) == names(tmp_path / "theirs")
    files = sorted(ours.glob("*.safetensors"))
    assert all(file.stat().st_size < limit + 3_000 for file in files)  # their headers come on top
    assert (len(files) > 3) == (limit == 20_000) == (ours / INDEX_FILE).exists()
    if limit == 20_000:
        index = json.loads((ours / INDEX_FILE).read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert index["weight_map"].keys() == names(ours).keys()
        assert index["metadata"]["total_size"] == 4 * sum(math.prod(shape) for shape in names(ours).values())
    loaded = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(model))
    if model.config.tie_word_embeddings:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_export_model_generation_config_that_the_model_came_with(tmp_path: Path) -> None:
    model, file = tiny_qwen(), tmp_path / "generation_config.json"
    export_model(model, None, tmp_path, torch.float32)
    assert not file.exists()
    model.generation_config = GenerationConfig(eos_token_id=7, temperature=0.6)  # of which transformers says: invalid
    export_model(model, None, tmp_path, torch.float32)
    written = json.loads(file.read_text())
    assert (written["eos_token_id"], written["temperature"]) == (7, 0.6)


def test_export_model_refuses_packed_weights_and_an_adapter_on_tied_modules(tmp_path: Path) -> None:
    model = tiny("qwen2").requires_grad_(False)
    first, second = (model.get_submodule(f"model.layers.{number}.mlp.up_proj") for number in (0, 1))
    second.weight = first.weight
    options = BridgeConfig.model_validate({"weight_bridge_mode": "lora_only", "lora_r": 8, "lora_layer_indices": "1"})
    with pytest.raises(ModelError) as error:
        export_model(add_adapter(model, options, seed=0), None, tmp_path, torch.float32)
    assert all(f"layers.{number}.mlp.up_proj" in str(error.value) for number in (0, 1))
    first.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with refusing(ModelError, "model.layers.0.mlp.up_proj.weight", words=["torch.uint8"]):
        export_model(model, None, tmp_path, torch.float32)


@pytest.mark.parametrize(("value", "dtype"), [(70_000.0, torch.float16), (float("nan"), torch.float32)])
def test_export_refuses_what_is_not_finite_in_the_files_dtype(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """float16 ends at 65,504."""
    model, name = tiny_qwen(), "model.norm.weight"
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    with refusing(ModelError, name):
        export_model(model, None, tmp_path, dtype)
    assert not list(tmp_path.iterdir())


# grpo export ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[PeftModel, Path]:
    """A trained adapter, and its checkpoint; its base has a tokenizer."""
    model = tiny_lora(rslora=True)
    model.peft_config["default"].base_model_name_or_path = str(save_tiny(tmp_path / "base"))
    words = Tokenizer(WordLevel({"?": 0, "1": 1}, unk_token="?"))  # PEFT widens embeddings for a larger tokenizer
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "base")
    fill_b(model)
    return model, save(model, Adapter(model), tmp_path / "run" / "checkpoints")


def save(model: Any, policy: Any, folder: Path, step: int = 3) -> Path:
    optimizer = AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], OptimizerConfig())
    return Checkpoints(CheckpointConfig(save_path=folder), policy, optimizer).save(Progress(step, step))


def all_weights(folder: Path) -> tuple[Any, Path]:
    """A model of fp32 weights, and its checkpoint, whose model files are rounded."""
    model = tiny_qwen()
    model.requires_grad_(True)
    return model, save(model, AllWeights(model, build_tokenizer(), torch.bfloat16), folder)


def test_an_adapter_is_loaded_by_peft_and_computes_the_same(adapter: tuple[PeftModel, Path]) -> None:
    model, path = adapter
    output = export_checkpoint(ExportOptions(path))
    assert output == path.with_name("exported_adapter_step_3")
    assert not {"trainer_state.pt", "state.json"} & {file.name for file in output.iterdir()}
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(output)), logits(model))


def test_export_of_relative_base(
    adapter: tuple[PeftModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As checkpoints name it of runs that were started in its parent folder."""
    model, path = adapter
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "base"}))
    (path / "state.json").unlink()  # it has the checksum of what was written
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    output = export_checkpoint(ExportOptions(path, Path("plain")))
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(output)), logits(model))
    assert AutoTokenizer.from_pretrained(output)("1")
    assert export_checkpoint(ExportOptions(path, Path("whole"), merge=True)).is_dir()


def test_export_base_path(adapter: tuple[PeftModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = adapter
    monkeypatch.chdir(tmp_path)
    for name, saved in (("base", str(tmp_path / "base")), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")):
        model.peft_config["default"].base_model_name_or_path = name
        assert adapter_settings(model)["base_model_name_or_path"] == saved


def test_export_command_takes_the_newest(
    adapter: tuple[PeftModel, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, path = adapter
    newest, run = save(model, Adapter(model), path.parent, step=12), path.parent.parent
    with caplog.at_level("INFO"):
        done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "out")
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert str(newest) in done.stderr and str(path) not in done.stderr
    assert not [record for record in caplog.records if record.name.startswith("grpo")]


def test_export_merges_an_adapter(adapter: tuple[PeftModel, Path], tmp_path: Path) -> None:
    model, path = adapter
    output = export_checkpoint(ExportOptions(path, tmp_path / "whole", merge=True))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(output)), logits(model), atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(output)("1")
    (tmp_path / "base").rename(tmp_path / "moved")
    with refusing(ConfigError, "--merge", got=str(tmp_path / "base"), words=["--model-name"]):
        export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True))
    assert not (tmp_path / "out").exists()
    merged = export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True, base=str(tmp_path / "moved")))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), logits(model), atol=1e-4, rtol=0)
    plain = export_checkpoint(ExportOptions(path, base=str(tmp_path / "moved")))
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(plain)), logits(model))


@pytest.mark.parametrize("quantised", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"])
def test_export_of_a_quantised_base(adapter: tuple[PeftModel, Path], tmp_path: Path, quantised: object) -> None:
    _, path = adapter
    config = tmp_path / "base" / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"] = quantised
    config.write_text(json.dumps(content))
    with refusing(ConfigError, "--merge", words=["--model-name"]) as error:
        export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True))
    assert "bitsandbytes" in error.value.got or error.value.got == str(tmp_path / "base")  # it can't be read
    assert not (tmp_path / "out").exists()


def test_all_weights_are_loaded_by_transformers_as_they_are_or_unrounded(tmp_path: Path) -> None:
    model, path = all_weights(tmp_path)
    output = export_checkpoint(ExportOptions(path))
    rounded = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert rounded.dtype == torch.bfloat16 and AutoTokenizer.from_pretrained(output)("1")
    assert not {"trainer_state.pt", "state.json"} & {file.name for file in output.iterdir()}
    exact = export_checkpoint(ExportOptions(path, tmp_path / "exact", dtype="float32"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(exact, dtype="auto")), logits(model))
    assert not torch.equal(logits(rounded), logits(model))


def test_export_refuses_what_is_no_checkpoint_damaged_or_in_the_way(tmp_path: Path) -> None:
    with refusing(ConfigError, str(tmp_path), got="no checkpoint"):
        export_checkpoint(ExportOptions(tmp_path))
    _, path = all_weights(tmp_path)
    with refusing(ConfigError, "--merge", got=f"{path}, {AllWeights.kind}"):
        export_checkpoint(ExportOptions(path, merge=True))
    output, inside = export_checkpoint(ExportOptions(path)), path / "out"
    with refusing(ConfigError, "OUTPUT", got=str(output)):
        export_checkpoint(ExportOptions(path))
    with refusing(ConfigError, "OUTPUT", got=str(inside)):
        export_checkpoint(ExportOptions(path, inside))
    assert not inside.exists()
    (path / "config.json").write_text("{}")
    with refusing(ConfigError, str(path / "config.json"), got="2 bytes"):
        export_checkpoint(ExportOptions(path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
