"""Exported models, and text parts of conditional ones: others load them, and they compute what the trainer's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from environments.demo_model.model import build_tokenizer
from grpo_trainer.batch.microbatches import split
from grpo_trainer.cli import app
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import CheckpointConfig, ModelConfig, OptimizerConfig, TrainConfig
from grpo_trainer.doctor.checks import Case, decoder_only
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.machine import Machine
from grpo_trainer.model import export
from grpo_trainer.model.export import INDEX_FILE, export_model, stored_tensors
from grpo_trainer.model.load import load_all_weights, load_model
from grpo_trainer.model.lora import OUTSIDE_TEXT, adapter_settings, add_adapter, save_adapter
from grpo_trainer.model.text_part import load_causal_lm
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.rollouts.groups import Sample
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from grpo_trainer.shared.attach import build_skeleton
from grpo_trainer.weights.layout import ModelLayout
from tests.golden.models import CONDITIONAL, save_model, with_adapter
from tests.unit.factories import refusing
from tests.unit.tiny_lora import fill_b, save_tiny, tiny, tiny_lora, tiny_qwen

TOKENS = torch.tensor([[1, 2, 3, 7, 9]])
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
"""One tensor each in memory, and one a piece in checkpoints."""


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
    assert weights_in(ours).keys() == weights_in(tmp_path / "theirs").keys()
    files = sorted(ours.glob("*.safetensors"))
    assert all(file.stat().st_size < limit + 3_000 for file in files)  # their headers come on top
    assert (len(files) > 3) == (limit == 20_000) == (ours / INDEX_FILE).exists()
    if limit == 20_000:
        index = json.loads((ours / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == 4 * model.num_parameters()
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


# the text part of a conditional model, under the names of the whole one -----------------------------------------------


TEXT = torch.randint(2, 89, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONDITIONAL)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def text_logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=TEXT).logits[0].float()


def whole(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder)


def part(folder: Path) -> PreTrainedModel:
    return load_model(ModelConfig(model_name=str(folder), device="cpu"))


def test_text_part_and_its_adapter_are_those_of_the_whole_model(tmp_path: Path, architecture: str) -> None:
    """PEFT puts the adapter on the whole model, and nowhere else; vLLM's logprobs with it are recorded."""
    save_model(architecture, tmp_path)
    both, text = whole(tmp_path), part(tmp_path)
    assert torch.equal(text_logits(text), text_logits(both))
    assert text.num_parameters() < both.num_parameters()
    assert not [name for name, _ in text.named_modules() if "vision" in name or "visual" in name]
    stored = {name: tensor for name, (_, tensor) in stored_tensors(text).items()}
    sent = {span.name for spans in ModelLayout(text, stored, torch.float32).spans for span in spans}
    named = dict(both.named_parameters())
    of_text = {name for name in named if name.startswith("model.language_model.")}
    buffers = {name for name in sent if name.endswith("layer_scalar")}  # Gemma 4's, in its files
    assert sent - buffers == of_text | ({"lm_head.weight"} & set(named))

    ours = with_adapter(architecture, text)
    (tmp_path / "adapter").mkdir()
    save_adapter(ours, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(both, str(tmp_path / "adapter"))
    assert torch.equal(text_logits(theirs), text_logits(ours))
    adapted = {name for name, _ in theirs.named_parameters() if ".lora_A." in name}
    assert len(adapted) == len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) / 2
    assert all(".language_model.layers." in name for name in adapted)
    again = Adapter(with_adapter(architecture, part(tmp_path)))
    for parameter in again.model.parameters():
        parameter.data.mul_(0.5 if parameter.requires_grad else 1.0)
    again.load(tmp_path / "adapter", {})  # as a resumed run does
    assert torch.equal(text_logits(again.model), text_logits(ours))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["exclude_modules"] == OUTSIDE_TEXT


@pytest.fixture(params=["one file", "several files"])
def base(tmp_path: Path, architecture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in one file or several, and exports are, too."""
    size = 1 << 30 if request.param == "one file" else 100_000
    monkeypatch.setattr(export, "SHARD_BYTES", size)
    save_model(architecture, tmp_path / "base", file_bytes=size)
    return tmp_path / "base"


def weights_in(folder: Path) -> dict[str, str]:
    """Names of the tensors in a folder's files, with their files, which the index names as well."""
    found = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    index = folder / "model.safetensors.index.json"
    assert len(set(found.values())) == 1 or json.loads(index.read_text())["weight_map"] == found
    return found


def test_exports_are_the_whole_model(tmp_path: Path, architecture: str, base: Path) -> None:
    """With an adapter merged into it, and as a checkpoint of all weights."""
    folder, checkpoint, adapter = (tmp_path / name for name in ("merged", "step_1", "adapter"))
    adapter.mkdir()
    ours = with_adapter(architecture, part(base))
    save_adapter(ours, adapter)
    export_checkpoint(ExportOptions(adapter, folder, merge=True))
    names = weights_in(folder)
    assert names.keys() == weights_in(base).keys(), "the names are those of the files it was made from"
    assert (len(set(names.values())) > 3) == (export.SHARD_BYTES == 100_000)
    merged, before = whole(folder), whole(base)
    torch.testing.assert_close(text_logits(merged), text_logits(ours), rtol=0, atol=1e-4)
    after = dict(merged.named_parameters())
    changed = {name for name, parameter in before.named_parameters() if not torch.equal(parameter, after[name])}
    assert changed and all(name.startswith("model.language_model.layers.") for name in changed)
    assert (folder / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()

    checkpoint.mkdir()
    policy, again = (
        AllWeights(load_all_weights(ModelConfig(model_name=str(base), device="cpu")), None) for _ in range(2)
    )
    with torch.no_grad():
        policy.model.get_parameter("model.norm.weight").add_(0.5)
    policy.write(checkpoint, policy.tensors())
    assert weights_in(checkpoint).keys() == names.keys()
    assert torch.equal(text_logits(whole(checkpoint)), text_logits(policy.model))
    again.load(checkpoint, policy.exact(policy.tensors()))
    assert torch.equal(text_logits(again.model), text_logits(policy.model))
    assert torch.equal(text_logits(load_causal_lm(checkpoint)), text_logits(policy.model))


def test_sequences_do_not_depend_on_their_neighbours(tmp_path: Path) -> None:
    """With recurrent layers: the states of a packed row would pass from one sequence to the next."""
    save_model("qwen3_5", tmp_path)
    options = {"model_name": str(tmp_path), "device": "cpu", "seq_len": 64}
    config = TrainConfig.model_validate({**options, "packing": "auto"})
    forward = build_forward(part(tmp_path), config)
    assert not forward.packed

    def scores(*lengths: int) -> Tensor:
        made = []
        for length in lengths:
            made.append(Sample(TEXT[0, :length].numpy(), np.arange(1, length)))
        (microbatch,) = split(made, len(made))
        return forward.scores(microbatch).logprobs_N.detach()

    alone = torch.cat([scores(9), scores(23), scores(31)])  # microbatches are sorted by length
    torch.testing.assert_close(scores(23, 9, 31), alone, rtol=0, atol=1e-5)
    config = TrainConfig.model_validate({**options, "packing": "on"})
    with pytest.raises(ConfigError, match="linear_attention"):
        build_forward(part(tmp_path), config)


def test_files_without_the_text_part_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_model("gemma3_whole", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        part(tmp_path)
    assert "model.norm.weight" in str(refused.value.got)


@pytest.mark.parametrize(
    ("architecture", "reason"), [("deepseek_v2", "W_UV"), ("qwen3_5", "Qwen3_5ForConditionalGeneration")]
)
def test_one_copy_of_the_weights_is_refused_with_the_reason(tmp_path: Path, architecture: str, reason: str) -> None:
    save_model(architecture, tmp_path)
    with pytest.raises(ModelError, match=reason) as refused:
        build_skeleton(ModelConfig(model_name=str(tmp_path), device="cpu"))
    assert "broadcast" in refused.value.fix
    if architecture == "deepseek_v2":  # vLLM copies the matrix
        modules = ("q_proj", "kv_b_proj")
        options = BridgeConfig(weight_bridge_mode="lora_only", lora_r=8, lora_target_modules=modules)
        with refusing(ModelError, "--lora-target-modules", got="kv_b_proj", words=["q_proj"]):
            add_adapter(part(tmp_path), options, seed=0)


@pytest.mark.parametrize(("installed", "status"), [(True, "ok"), (False, "warn")])
def test_doctor_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, status: str) -> None:
    save_model("gemma3_whole", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: installed or None)
    run = build_run({}, {"model_name": str(tmp_path), "weight_bridge_mode": "lora_only"})
    found = decoder_only(Case(Machine("3.12", 1), run))
    assert found is not None and found.status == status and ("torchvision" in found.got) != installed
