"""The text part of a conditional model: trained alone, published and exported under the names of the whole one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from grpo_trainer.batch.microbatches import split
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.doctor.checks import Case, decoder_only
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.machine import Machine
from grpo_trainer.model import export
from grpo_trainer.model.export import stored_tensors
from grpo_trainer.model.load import load_all_weights, load_model
from grpo_trainer.model.lora import OUTSIDE_TEXT, add_adapter, save_adapter
from grpo_trainer.model.text_part import load_causal_lm
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.rollouts.groups import Sample
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from grpo_trainer.shared.attach import build_skeleton
from grpo_trainer.weights.layout import ModelLayout
from tests.golden.models import CONDITIONAL, save_model, with_adapter
from tests.unit.factories import refusing

TOKENS = torch.randint(2, 89, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONDITIONAL)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=TOKENS).logits[0].float()


def whole(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder)


def part(folder: Path) -> PreTrainedModel:
    return load_model(ModelConfig(model_name=str(folder), device="cpu"))


def test_text_part_and_its_adapter_are_those_of_the_whole_model(tmp_path: Path, architecture: str) -> None:
    """PEFT puts the adapter on the whole model, and nowhere else; vLLM's logprobs with it are recorded."""
    save_model(architecture, tmp_path)
    both, text = whole(tmp_path), part(tmp_path)
    assert torch.equal(logits(text), logits(both))
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
    assert torch.equal(logits(theirs), logits(ours))
    adapted = {name for name, _ in theirs.named_parameters() if ".lora_A." in name}
    assert len(adapted) == len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) / 2
    assert all(".language_model.layers." in name for name in adapted)
    again = Adapter(with_adapter(architecture, part(tmp_path)))
    for parameter in again.model.parameters():
        parameter.data.mul_(0.5 if parameter.requires_grad else 1.0)
    again.load(tmp_path / "adapter", {})  # as a resumed run does
    assert torch.equal(logits(again.model), logits(ours))
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
    torch.testing.assert_close(logits(merged), logits(ours), rtol=0, atol=1e-4)
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
    assert torch.equal(logits(whole(checkpoint)), logits(policy.model))
    again.load(checkpoint, policy.exact(policy.tensors()))
    assert torch.equal(logits(again.model), logits(policy.model))
    assert torch.equal(logits(load_causal_lm(checkpoint)), logits(policy.model))


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
            made.append(Sample(TOKENS[0, :length].numpy(), np.arange(1, length)))
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
