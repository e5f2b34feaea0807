"""Base models in GPTQ, AWQ and bitsandbytes: their plain weights, what is refused, what is merged, the proof."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import BridgeError, ModelError
from grpo_trainer.model.load import load_model, weights_of
from grpo_trainer.model.lora import add_adapter, save_adapter
from grpo_trainer.model.quantised import PLAIN, mark, other_files, plain_weights
from grpo_trainer.saving.export import ExportOptions, export_checkpoint
from grpo_trainer.weights.lora_swap import LoraSwap
from tests.processes import ROOT
from tests.quantised_models import METHODS, PROMPT, RECORD
from tests.unit.factories import refusing
from tests.unit.test_proof import INFO, FakeServer, prove
from tests.unit.tiny_lora import fill_b, tiny_lora, tiny_qwen

MADE = ROOT / "tests/data/quantised"
EIGHT = [8, 9, 7, 15, 0, 10, 6, 12]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}


def word(nibbles: list[int]) -> Tensor:
    """The number of 32 bits with these four bits each, the lowest first."""
    bits = sum(value << 4 * place for place, value in enumerate(nibbles))
    return torch.tensor(bits - (1 << 32) if bits >= 1 << 31 else bits, dtype=torch.int32)


def files(folder: Path, **tensors: Tensor) -> list[str]:
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return [str(folder / "model.safetensors")]


# ---------------------------------------------------------------- plain weights


def test_gptq_packs_inputs_and_has_half_of_its_numbers_in_the_middle(tmp_path: Path) -> None:
    """In 8 bits; those of 4 bits are compared as a whole model."""
    packed = torch.tensor([[128 | 129 << 8 | 100 << 16]], dtype=torch.int32)
    paths = files(tmp_path, qweight=packed, qzeros=packed.clone(), scales=torch.tensor([[2.0]]))
    found = plain_weights(paths, {"quant_method": "gptq", "bits": 8, "group_size": -1}, torch.float32)
    assert found["layer.weight"].tolist() == [[0.0, 2.0, -56.0, -256.0]]


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
    settings = GPTQ | {"group_size": tensors.get("group_size", GPTQ["group_size"])}
    parts |= {key: value for key, value in tensors.items() if key != "group_size"}
    paths = files(tmp_path, **{name: each for name, each in parts.items() if each is not None})
    with refusing(ModelError, "--model-name: layer"):
        plain_weights(paths, settings, torch.float32)


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


UNCOMPARED: dict[str, list[dict[str, object]]] = {
    "gptq": [
        *({"desc_act": True}, {"sym": False}, {"bits": 3}, {"group_size": 0}, {"checkpoint_format": "marlin"}),
        *({"dynamic": {"-:.*mlp.*": {}}}, {"lm_head": True}),
    ],
    "awq": [{"group_size": None}, {"version": "gemv"}, {"zero_point": False}, {"bits": 8}],
}


@pytest.mark.parametrize(("method", "settings"), [(of, each) for of, some in UNCOMPARED.items() for each in some])
def test_quantised_uncompared_files_are_refused(tmp_path: Path, method: str, settings: dict[str, object]) -> None:
    name = changed(tmp_path, method, **settings)
    with refusing(ModelError, "--model-name") as refused:
        load_model(ModelConfig(model_name=name, device="cpu"))
    assert {*settings, f"({method}),"} <= set(refused.value.summary.split())


@pytest.mark.parametrize("file_too", [False, True])
def test_quantised_missing_weights_are_not_drawn_at_random(tmp_path: Path, file_too: bool) -> None:
    folder = shutil.copytree(MADE / "awq", tmp_path / "torn")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if not file_too:
        kept = {name: each for name, each in tensors.items() if "layers.1.mlp.up_proj" not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=str(folder), device="cpu"))
    assert refused.value.field == f"--model-name {folder}" and refused.value.got.startswith("no ")
    name = changed(tmp_path, "gptq", quant_method="hqq")  # whose package is missing
    with refusing(ModelError, f"--model-name {name}"):
        load_model(ModelConfig(model_name=name, device="cpu"))


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
def test_quantised_files_of_one_method(own: str | None, served: str | None, differ: tuple[str, str] | None) -> None:
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


# 4 bits made while loading -------------------------------------------------------------------------------------------


def in_4_bits(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs bitsandbytes, whose kernels are slow on a CPU."""
    is_missing = importlib.util.find_spec("bitsandbytes") is None
    skipped = pytest.mark.skipif(is_missing, reason="bitsandbytes is not installed (the extra qlora)")
    return pytest.mark.complete(skipped(test))


TOKENS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))


def base(folder: Path, layer_scale: float = 0.3) -> Path:
    """A tiny model whose linear modules are multiples of 64 wide, in its files.

    Its layers say less and its head says more, so that 4 bits are a small noise to it.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and "proj.weight" in name:
                parameter.mul_(layer_scale)
        model.lm_head.weight.mul_(8.0)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, *, coarse: bool) -> PeftModel:
    model = load_model(ModelConfig(model_name=str(folder), device="cpu", load_in_4bit=coarse))
    return add_adapter(model, BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), seed=0)


@in_4_bits
def test_linear_modules_are_in_4_bits_and_near_their_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = base(tmp_path, 1.0)
    load_model(ModelConfig(model_name=str(folder), device="cpu"))
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    model = load_model(ModelConfig(model_name=str(folder), device="cpu", load_in_4bit=True))
    warned = [each.name for each in caplog.records if each.levelname == "WARNING" and each.name.startswith("grpo")]
    assert warned == ["grpo_trainer.model.load"]
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


@in_4_bits
def test_every_adapted_module_has_a_gradient_also_after_an_evaluation(tmp_path: Path) -> None:
    model = loaded(base(tmp_path), coarse=True)
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


@in_4_bits
@pytest.mark.parametrize(
    ("fault", "scale"),
    [
        *((fault, 0.3) for fault in ("base served", "scaled twice", "first adapter kept", "synthetic kept")),
        ("", 2.0),  # a base model that 4 bits ruin
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_proof_catches_faults_above_the_noise_of_4_bits(tmp_path: Path, fault: str, scale: float, fresh: bool) -> None:
    folder = base(tmp_path, scale)
    trainer, server = loaded(folder, coarse=True), loaded(folder, coarse=False)
    if not fresh:
        fill_b(trainer)
    with pytest.raises(BridgeError) as failed:
        prove(trainer, FakeServer(trainer, fault, model=server))
    assert failed.value.field.startswith(FAILED)


@in_4_bits
def test_a_width_that_the_kernel_garbles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional

    folder = base(tmp_path)
    honest = bitsandbytes.functional.dequantize_4bit

    def garbled(quantised: torch.Tensor, state: Any) -> torch.Tensor:
        matrix = honest(quantised, state)
        return matrix if matrix.shape[1] == 64 else matrix.roll(1)

    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", garbled)
    with pytest.raises(ModelError) as refused:
        loaded(folder, coarse=True)
    assert refused.value.field == "--load-in-4bit" and {"cpu", "128"} <= set(refused.value.summary.split())


@in_4_bits
@pytest.mark.parametrize("quantised", [{"quant_method": "awq", "bits": 4}, "awq"])
def test_a_model_that_is_quantised_already_is_refused(tmp_path: Path, quantised: object) -> None:
    tiny_qwen().config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": quantised}))
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(model_name=str(tmp_path), device="cpu", load_in_4bit=True))
    assert refused.value.field.startswith("--model-name")
    assert refused.value.got in ("awq", str(tmp_path))  # the second: transformers can't read the configuration
