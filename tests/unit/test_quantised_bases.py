"""Base models in GPTQ and AWQ: their plain weights by hand and against gptqmodel, what is refused, what is merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import BridgeError, ModelError
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import add_adapter, save_adapter
from grpo_trainer.model.quantised import PLAIN, mark, other_files, plain_weights
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from grpo_trainer.weights.lora_swap import LoraSwap
from tests.processes import ROOT
from tests.quantised_models import METHODS, PROMPT, RECORD
from tests.unit.test_proof import INFO
from tests.unit.tiny_lora import fill_b, tiny_lora

MADE = ROOT / "tests/data/quantised"
EIGHT = [8, 9, 7, 15, 0, 10, 6, 12]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 2}


def word(nibbles: list[int]) -> Tensor:
    """The number of 32 bits with these four bits each, the lowest first."""
    bits = sum(value << 4 * place for place, value in enumerate(nibbles))
    return torch.tensor(bits - (1 << 32) if bits >= 1 << 31 else bits, dtype=torch.int32)


def files(folder: Path, **tensors: Tensor) -> list[str]:
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return [str(folder / "model.safetensors")]


# ---------------------------------------------------------------- plain weights


def test_gptq_packs_inputs_and_has_8_in_the_middle(tmp_path: Path) -> None:
    paths = files(
        tmp_path, qweight=word(EIGHT).view(1, 1), qzeros=word([7] * 8).view(1, 1), scales=torch.tensor([[0.5]]),
        g_idx=torch.zeros(8, dtype=torch.int32), bias=torch.tensor([3.0]),
    )  # fmt: skip
    found = plain_weights(paths, GPTQ, torch.float32)
    assert found.keys() == {"layer.weight", "layer.bias"} and found["layer.bias"].tolist() == [3.0]
    assert found["layer.weight"].tolist() == [[0.0, 0.5, -0.5, 3.5, -4.0, 1.0, -1.0, 2.0]]


def test_8_bits_of_gptq_have_128_in_the_middle(tmp_path: Path) -> None:
    packed = torch.tensor([[128 | 129 << 8 | 100 << 16]], dtype=torch.int32)
    paths = files(tmp_path, qweight=packed, qzeros=packed.clone(), scales=torch.tensor([[2.0]]))
    found = plain_weights(paths, {"quant_method": "gptq", "bits": 8, "group_size": -1}, torch.float32)
    assert found["layer.weight"].tolist() == [[0.0, 2.0, -56.0, -256.0]]


def test_awq_packs_outputs_in_its_order_with_a_zero_point_and_a_scale_each_group(tmp_path: Path) -> None:
    # Outputs 0 … 7 lie at the places 0 4 1 5 2 6 3 7, so the word has the outputs 0 2 4 6 1 3 5 7.
    row = [word([0 + start, 2, 4, 6, 1, 3, 5, 7]) for start in (0, 1, 2, 3)]
    paths = files(
        tmp_path, qweight=torch.stack(row)[:, None], qzeros=torch.stack([word([0] * 8), word([1] * 8)])[:, None],
        scales=torch.tensor([[1.0] * 8, [2.0] * 8]),
    )  # fmt: skip
    plain = plain_weights(paths, AWQ, torch.float32)["layer.weight"]
    assert plain.shape == (8, 4)
    assert plain[0].tolist() == [0.0, 1.0, 2.0, 4.0]  # (code - zero) * scale: 0, 1, (2 - 1) * 2, (3 - 1) * 2
    assert plain[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert plain[5].tolist() == [5.0, 5.0, 8.0, 8.0]


@pytest.mark.parametrize(
    "tensors",
    [
        {"scales": torch.ones(2, 1)},
        {"scales": None},  # also AWQ's scales of an activation, which have no matrix
        {"qzeros": torch.zeros(2, 1, dtype=torch.int32), "group_size": 3},
    ],
)
def test_files_of_another_layout_are_refused(tmp_path: Path, tensors: dict[str, Any]) -> None:
    parts = {"qweight": word(EIGHT).view(1, 1), "qzeros": word([7] * 8).view(1, 1), "scales": torch.ones(1, 1)}
    settings = GPTQ | {key: value for key, value in tensors.items() if key == "group_size"}
    parts |= {key: value for key, value in tensors.items() if key != "group_size"}
    paths = files(tmp_path, **{name: each for name, each in parts.items() if each is not None})
    with pytest.raises(ModelError) as refused:
        plain_weights(paths, settings, torch.float32)
    assert refused.value.field == "--model-name: layer"


@pytest.mark.parametrize("method", METHODS)
def test_the_plain_model_computes_what_gptqmodel_does(method: str) -> None:
    model = load_model(ModelConfig(model_name=str(MADE / method), device="cpu")).eval()
    with torch.no_grad():
        own = model(torch.tensor([PROMPT])).logits.log_softmax(-1)[0]
    recorded = torch.tensor(json.loads((MADE / method / RECORD).read_text()))
    assert recorded.std() > 0.3  # it has preferences
    torch.testing.assert_close(own, recorded, atol=0.02, rtol=0)  # in float16 there
    assert not hasattr(model.config, "quantization_config")
    assert model.config._name_or_path == str(MADE / method)


# ---------------------------------------------------------------- refused


def changed(tmp_path: Path, method: str, **settings: object) -> str:
    folder = shutil.copytree(MADE / method, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("gptq", {"desc_act": True}),
        ("gptq", {"sym": False}),
        ("gptq", {"bits": 3}),
        ("gptq", {"group_size": 0}),
        ("awq", {"group_size": None}),
        ("gptq", {"checkpoint_format": "marlin"}),
        ("gptq", {"dynamic": {"-:.*mlp.*": {}}}),
        ("gptq", {"lm_head": True}),
        ("awq", {"version": "gemv"}),
        ("awq", {"zero_point": False}),
        ("awq", {"bits": 8}),
    ],
)
def test_files_that_were_not_compared_with_vllm_are_refused(
    tmp_path: Path, method: str, settings: dict[str, object]
) -> None:
    name = changed(tmp_path, method, **settings)
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=name, device="cpu"))
    assert refused.value.field == "--model-name" and {*settings, f"({method}),"} <= set(refused.value.summary.split())


@pytest.mark.parametrize("file_too", [False, True])
def test_missing_weights_are_not_drawn_at_random(tmp_path: Path, file_too: bool) -> None:
    folder = shutil.copytree(MADE / "awq", tmp_path / "torn")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if not file_too:
        kept = {name: each for name, each in tensors.items() if "layers.1.mlp.up_proj" not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=str(folder), device="cpu"))
    assert refused.value.field == f"--model-name {folder}" and refused.value.got.startswith("no ")


def test_a_method_whose_package_is_missing_is_refused(tmp_path: Path) -> None:
    name = changed(tmp_path, "gptq", quant_method="hqq")
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=name, device="cpu"))
    assert refused.value.field == f"--model-name {name}"


@pytest.mark.parametrize(
    ("own", "served", "differ"),
    [
        (None, None, None),
        (None, "fp8", None),  # the server quantises the same files
        ("gptq", "auto_gptq", None),
        ("gptq", "gptq_marlin", None),
        ("awq", "awq", None),
        (None, "auto_gptq", (PLAIN, "gptq")),  # the weights that the files were made of, or those in other 4 bits
        ("awq", None, ("awq", PLAIN)),
        ("awq", "auto_gptq", ("awq", "gptq")),
    ],
)
def test_trainer_and_server_have_files_of_one_method(
    own: str | None, served: str | None, differ: tuple[str, str] | None
) -> None:
    model = tiny_lora()
    if own is not None:
        mark(model.get_base_model(), own)
    assert other_files(model, served) == differ
    nothing: Any = None
    bridge = LoraSwap(BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), model, nothing, Path(), 64)
    info = msgspec.structs.replace(INFO, quantization=served)
    if differ is None:
        bridge._check(info)  # pyright: ignore[reportPrivateUsage]
        return
    with pytest.raises(BridgeError) as refused:
        bridge._check(info)  # pyright: ignore[reportPrivateUsage]
    (problem,) = refused.value.problems
    assert (problem.field, problem.got, problem.wanted) == ("--model-name", *differ)


# ---------------------------------------------------------------- merged


def test_an_adapter_is_merged_into_the_plain_weights(tmp_path: Path) -> None:
    base = load_model(ModelConfig(model_name=str(MADE / "awq"), device="cpu"))
    adapted: PeftModel = add_adapter(base, BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), seed=0)
    fill_b(adapted)
    save_adapter(adapted, tmp_path)
    output = export_checkpoint(ExportOptions(tmp_path, tmp_path / "out", merge=True, dtype="float32"))
    merged = AutoModelForCausalLM.from_pretrained(output).eval()
    with torch.no_grad():
        own, found = (each(torch.tensor([PROMPT])).logits for each in (adapted.eval(), merged))
    torch.testing.assert_close(found, own, atol=0.05, rtol=0)  # merged from the files' bfloat16
    assert {each.dtype for each in load_file(output / "model.safetensors").values()} == {torch.float32}
