"""The adapter: options, its scale, chosen layers, an adapter to start from, what can't be served; its forward pass."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from grpo_trainer.config.bridge import BridgeConfig, read_adapter
from grpo_trainer.config.options import build, dump
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.model.lora import adapter_state, add_adapter, save_adapter, use_few_kernels
from tests.unit.factories import refusing
from tests.unit.tiny_lora import VOCAB, fill_b, tiny_lora, tiny_qwen

TOKENS = torch.tensor([[3, 14, 15, 9, 26]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def bridge(**options: object) -> BridgeConfig:
    made = build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only", **options})
    assert made.weight_bridge_mode == "lora_only"
    return made


def saved(folder: Path, **options: Any) -> Path:
    """An adapter of PEFT's own making for the tiny model, with B not zero."""
    config = LoraConfig(**{"r": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **options})
    model = get_peft_model(tiny_qwen(), config)
    fill_b(model)  # type: ignore[arg-type]
    model.save_pretrained(str(folder))
    return folder


def test_lora_scale_and_layers() -> None:
    for rslora, scale in ((True, 6.0 / math.sqrt(8)), (False, 6.0 / 8)):
        layers = [m for m in tiny_lora(rslora=rslora, alpha=6.0).modules() if isinstance(m, LoraLayer)]
        assert {layer.scaling["default"] for layer in layers} == {scale}
    model = tiny_lora(layers="1", target_modules="q_proj,down_proj")
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    prefix = "base_model.model.model.layers.1."
    assert adapted == {prefix + "self_attn.q_proj", prefix + "mlp.down_proj"}
    with refusing(ModelError, "--lora-layer-indices", got="2,3", wanted="0 to 1"):
        tiny_lora(layers="0-3")


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("lm_head", "lm_head (Linear)"),
        ("embed_tokens", "embed_tokens (Embedding)"),
        ("input_layernorm", "input_layernorm (Qwen2RMSNorm)"),
        ("score", None),
    ],
)
def test_lora_modules_that_vllm_need_not_serve_are_refused(target: str, kind: str | None) -> None:
    with refusing(ModelError, "--lora-target-modules", got=target) as refused:
        tiny_lora(target_modules=("q_proj", target))
    assert refused.value.wanted.startswith("down_proj, gate_proj, ")
    assert kind in refused.value.summary if kind else "(" not in refused.value.summary
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=10))  # without linear modules
    options = BridgeConfig(weight_bridge_mode="lora_only", lora_target_modules=("c_attn",))
    with refusing(ModelError, "--lora-target-modules", got="c_attn", wanted="none", words=["c_attn (Conv1D)"]):
        add_adapter(model, options, seed=0)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"layers_to_transform": [1]}, {"r": 16}])
def test_lora_adapter_to_start_from(tmp_path: Path, options: dict[str, Any]) -> None:
    path = saved(tmp_path / "a", **options)
    started = add_adapter(tiny_qwen(), bridge(lora_adapter=path), seed=5)
    theirs = PeftModel.from_pretrained(tiny_qwen(), str(path))
    assert torch.equal(logits(started), logits(theirs))
    assert (logits(started) - logits(tiny_qwen())).abs().max() > 0.01, "B is 0: the test shows nothing"
    assert {tensor.dtype for tensor in adapter_state(started).values()} == {torch.float32}
    assert all(parameter.requires_grad for name, parameter in started.named_parameters() if "lora_" in name)
    (tmp_path / "b").mkdir()
    save_adapter(started, tmp_path / "b")  # what goes to the server is the same again
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen(), str(tmp_path / "b"))), logits(theirs))


def test_rank_scale_modules_and_layers_come_from_the_adapter_and_survive_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, lora_alpha=12, use_rslora=True, layers_to_transform=[1])
    made = bridge(lora_adapter=str(path))
    assert (made.lora_r, made.lora_alpha, made.lora_rslora, made.lora_layer_indices) == (8, 12.0, True, (1,))
    assert made.lora_target_modules == ("q_proj", "up_proj")
    config = build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only", "lora_adapter": str(path)})
    assert build(TrainConfig, dump(config, only_set=True)) == config


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"use_dora": True}, ("use_dora", "true", "false")),
        ({"modules_to_save": ["lm_head"], "bias": "all"}, ("bias", '"all"', "modules_to_save", '["lm_head"]')),
        ({"peft_type": "IA3"}, ("peft_type", '"IA3"')),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights", '"pissa"')),
        ({"r": 24}, ("r", "24", "32")),
        ({"r": 1024}, ("r", "1024", "512")),
        ({"lora_alpha": "much"}, ("adapter_config.json",)),
    ],
)
def test_lora_adapter_that_cannot_be_served(tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    path = saved(tmp_path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError) as error:
        bridge(lora_adapter=str(path))
    for part in (*parts, f"--lora-adapter {path}"):  # as a word
        assert re.search(rf"(?<![\w.]){re.escape(part)}(?!\w)", str(error.value)), part


def test_read_adapter_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        read_adapter(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"embed_tokens.*lora_A and lora_B"):
        read_adapter(saved(tmp_path / "b", target_modules=["q_proj", "embed_tokens"]))
    path = saved(tmp_path / "a")
    (path / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors.* damaged"):
        read_adapter(path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors.*save_pretrained"):
        read_adapter(path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = LlamaConfig(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    for layers, parts in ((2, ("[8, 32]", "[8, 48]")), (3, ("layers.2.",))):
        other.num_hidden_layers = layers
        with refusing(ModelError, f"--lora-adapter {path}") as refused:
            add_adapter(LlamaForCausalLM(other), bridge(lora_adapter=str(path)), seed=0)
        assert all(part in refused.value.got for part in parts)


# the forward pass with few kernels ------------------------------------------------------------------


TEXTS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def made(dtype: torch.dtype, *, few: bool = False, **options: Any) -> PeftModel:
    """A model with an adapter; `few`: kernels."""
    model = tiny_lora(**options)
    fill_b(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if few:
        use_few_kernels(model)
    return model


def outcome(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=TEXTS, use_cache=False).logits
    logits.float().square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_values_and_gradients_are_pefts(rslora: bool) -> None:
    theirs = made(torch.float32, rslora=rslora, alpha=24)
    ours = copy.deepcopy(theirs)
    assert use_few_kernels(ours) == 14  # seven modules in each of two layers
    (logits, grads), (their_logits, their_grads) = outcome(ours), outcome(theirs)
    torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5)
    assert grads.keys() == their_grads.keys() and len(grads) == 28
    for name, grad in grads.items():
        torch.testing.assert_close(grad, their_grads[name], rtol=1e-4, atol=1e-6)


def test_few_kernels_in_16_bits_are_as_near_to_the_truth_as_pefts_and_cast_less() -> None:
    """No activation is cast in addition to those of norms (two in each of two layers, and the last) and of the rotary
    embedding."""
    errors, counts = [], []
    _, truth = outcome(made(torch.float32))
    for few in (False, True):
        model = made(torch.bfloat16, few=few)
        with LargeCasts() as casts, torch.no_grad():
            model(input_ids=TEXTS, use_cache=False)
        counts.append(casts.count)
        _, grads = outcome(model)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        errors.append(torch.stack([(grads[name] - true).norm() / true.norm() for name, true in truth.items()]).mean())
    assert errors[1] < 1.2 * errors[0] < 0.1
    assert counts[1] == 6 < counts[0]


def test_few_kernels_leave_names_and_the_model_without_its_adapter() -> None:
    @torch.no_grad()
    def texts(model: nn.Module) -> Tensor:
        return model(input_ids=TEXTS, use_cache=False).logits

    model = made(torch.float32)
    names = list(model.state_dict()), list(adapter_state(model))
    use_few_kernels(model)
    assert (list(model.state_dict()), list(adapter_state(model))) == names
    with model.disable_adapter():
        bare = texts(model)
    torch.testing.assert_close(bare, texts(tiny_qwen()))
    assert not torch.allclose(bare, texts(model))
    again = copy.deepcopy(model)  # its modules' forward passes are its own
    with torch.no_grad():
        next(p for name, p in again.named_parameters() if "lora_B" in name).add_(1.0)
    assert not torch.allclose(texts(again), texts(model))


class LargeCasts(TorchDispatchMode):
    """Counts copies of whole activations in another dtype."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.ndim == 3 and out.dtype == torch.float32:
            self.count += 1
        return out
