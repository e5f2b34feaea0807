"""`grpo export`: plain transformers and PEFT load what it writes, and compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from environments.demo_model.model import build_tokenizer
from grpo_trainer.cli import app
from grpo_trainer.config.train import CheckpointConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.model.lora import adapter_settings
from grpo_trainer.optim import FusedAdamW
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from tests.unit.tiny_lora import fill_b, save_tiny, tiny_lora, tiny_qwen

TOKENS = torch.tensor([[1, 2, 3, 7, 9]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(input_ids=TOKENS).logits


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[PeftModel, Path]:
    """A trained adapter, and its checkpoint; its base has a tokenizer."""
    model = tiny_lora()
    model.peft_config["default"].base_model_name_or_path = str(save_tiny(tmp_path / "base"))
    words = Tokenizer(WordLevel({"?": 0, "1": 1}, unk_token="?"))  # PEFT widens embeddings for a larger tokenizer
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "base")
    fill_b(model)
    return model, save(model, Adapter(model), tmp_path / "run")


def save(model: Any, policy: Any, folder: Path, step: int = 3) -> Path:
    optimizer = FusedAdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    return Checkpoints(CheckpointConfig(save_path=folder), policy, optimizer).save(Progress(step, step))


def all_weights(folder: Path, step: int = 3) -> tuple[Any, Path]:
    """A model of fp32 weights, and its checkpoint, whose model files are rounded."""
    model = tiny_qwen()
    model.requires_grad_(True)
    return model, save(model, AllWeights(model, build_tokenizer(), torch.bfloat16), folder, step)


def test_an_adapter_is_loaded_by_peft_and_computes_the_same(adapter: tuple[PeftModel, Path]) -> None:
    model, path = adapter
    output = export_checkpoint(ExportOptions(path))
    assert output == path.with_name("exported_adapter_step_3")
    assert not {"trainer_state.pt", "state.json"} & {file.name for file in output.iterdir()}
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(output)), logits(model))


def test_a_base_by_a_relative_path_is_found_from_another_folder(
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


def test_a_checkpoint_names_its_base_by_the_whole_path(
    adapter: tuple[PeftModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = adapter
    monkeypatch.chdir(tmp_path)
    for name, saved in (("base", str(tmp_path / "base")), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")):
        model.peft_config["default"].base_model_name_or_path = name
        assert adapter_settings(model)["base_model_name_or_path"] == saved


def test_the_output_is_the_second_argument(adapter: tuple[PeftModel, Path], tmp_path: Path) -> None:
    _, path = adapter
    done = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out")])
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_the_command_says_what_it_does_without_a_log_record(
    adapter: tuple[PeftModel, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, path = adapter
    with caplog.at_level("INFO"):
        done = CliRunner().invoke(app, ["export", str(path.parent)])
    first, newest = done.stderr.splitlines()
    assert str(path.parent) in first and str(path) in newest
    assert not [record for record in caplog.records if record.name.startswith("grpo")]


def test_an_adapter_may_be_written_in_16_bits(adapter: tuple[PeftModel, Path]) -> None:
    _, path = adapter
    output = export_checkpoint(ExportOptions(path, dtype="bfloat16"))
    with safe_open(output / "adapter_model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_a_merged_adapter_is_loaded_by_transformers_and_computes_the_same(
    adapter: tuple[PeftModel, Path], tmp_path: Path
) -> None:
    model, path = adapter
    output = export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True))
    merged = AutoModelForCausalLM.from_pretrained(output)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert (logits(merged) - logits(model)).abs().max() > 0.01, "the adapter made no difference"
    assert AutoTokenizer.from_pretrained(output)("1")


def test_merging_is_exact_before_it_is_rounded(adapter: tuple[PeftModel, Path], tmp_path: Path) -> None:
    model, path = adapter
    output = export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True, dtype="bfloat16"))
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    wanted = (layer.base_layer.weight + layer.scaling["default"] * b @ a).to(torch.bfloat16)
    with safe_open(output / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.layers.1.self_attn.q_proj.weight"), wanted)
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_base_that_has_moved_is_named_by_hand(adapter: tuple[PeftModel, Path], tmp_path: Path) -> None:
    model, path = adapter
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError) as error:
        export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True))
    assert (error.value.field, error.value.got) == ("--merge", str(tmp_path / "base"))
    assert "--model-name" in error.value.fix
    assert not (tmp_path / "out").exists()
    merged = export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True, base=str(tmp_path / "moved")))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), logits(model), atol=1e-4, rtol=0)
    plain = export_checkpoint(ExportOptions(path, base=str(tmp_path / "moved")))
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(plain)), logits(model))


@pytest.mark.parametrize("quantised", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"])
def test_a_quantised_base_is_refused_with_what_to_do(
    adapter: tuple[PeftModel, Path], tmp_path: Path, quantised: object
) -> None:
    _, path = adapter
    config = tmp_path / "base" / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"] = quantised
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        export_checkpoint(ExportOptions(path, tmp_path / "out", merge=True))
    assert error.value.field == "--merge"
    assert "bitsandbytes" in error.value.got or error.value.got == str(tmp_path / "base")  # it can't be read
    assert "--model-name" in error.value.fix
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


def test_of_a_folder_the_newest_is_taken(tmp_path: Path) -> None:
    for step in (9, 10):
        all_weights(tmp_path / "run" / "checkpoints", step)
    assert export_checkpoint(ExportOptions(tmp_path / "run")).name == "exported_step_10"


def test_what_is_no_checkpoint_damaged_or_in_the_way_is_refused(tmp_path: Path) -> None:
    def refused(options: ExportOptions) -> tuple[str, str]:
        with pytest.raises(ConfigError) as error:
            export_checkpoint(options)
        return error.value.field, error.value.got

    assert refused(ExportOptions(tmp_path)) == (str(tmp_path), "no checkpoint")
    _, path = all_weights(tmp_path)
    assert refused(ExportOptions(path, merge=True)) == ("--merge", f"{path}, {AllWeights.kind}")
    output = export_checkpoint(ExportOptions(path))
    assert refused(ExportOptions(path)) == ("OUTPUT", str(output))
    (path / "config.json").write_text("{}")
    assert refused(ExportOptions(path, tmp_path / "out")) == (str(path / "config.json"), "2 bytes")
    assert not (tmp_path / "out").exists()
