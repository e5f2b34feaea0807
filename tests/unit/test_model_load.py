"""Models: of which kind, on which device, in files that older readers understand; the KL divergence's reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    Llama4Config,
    LlavaConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    Qwen2AudioConfig,
    Qwen2Config,
    Qwen3VLConfig,
    T5Config,
)

from environments.demo_model.model import build_tokenizer
from grpo_common.model_files import TOKENIZER_FILES, make_readable, readable_config, readable_tokenizer_config
from grpo_common.models import CONFIG_FILE, missing_path, nearest_folder
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.options import build
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.export import write_tokenizer
from grpo_trainer.model.load import (
    NoTokenizerError,
    load_all_weights,
    load_model,
    not_trainable,
    pick_device,
    pick_dtype,
    read_tokenizer,
)
from grpo_trainer.model.lora import adapter_settings, add_adapter, readable_settings, save_adapter
from grpo_trainer.model.reference import FrozenWeights, build_reference, check_room
from grpo_trainer.trainer import Trainer
from tests.golden.host import logprobs
from tests.golden.models import (
    ATTENTION,
    CONFIGS,
    IN_16_BITS,
    PAGE,
    PROMPT,
    RECORDED,
    SIZES,
    WITHOUT_LORA,
    golden,
    save_model,
    table,
    with_adapter,
)
from tests.unit.factories import batch, refusing, sample
from tests.unit.tiny_lora import fill_b, save_tiny, tiny_lora, tiny_qwen
from vllm_server import checks, seams
from vllm_server.checks import check_model_path
from vllm_server.errors import FatalError


def test_load_model_is_frozen_in_its_dtype(tmp_path: Path) -> None:
    model = load_model(ModelConfig(model_name=str(save_tiny(tmp_path)), device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16} and model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    options = BridgeConfig(weight_bridge_mode="lora_only", lora_r=8, lora_target_modules=("q_proj",))
    adapted = add_adapter(model, options, seed=0)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(("seq_len", "factor"), [(16, 1.0), (64, 4.0)])
def test_load_model_long_rope_has_one_kind_of_factors(seq_len: int, factor: float, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen2Config(), ()),
        (Qwen2Config(architectures=["Qwen2ForCausalLM"]), ()),
        (PhimoeConfig(architectures=["PhimoeForCausalLM"]), ("PhimoeForCausalLM", "experts")),
        (BertConfig(architectures=["BertForMaskedLM"]), ("BertForMaskedLM",)),
        (BertConfig(), ("bert", "encoder")),
        (T5Config(), ("t5", "encoder-decoder")),
        (Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"]), ("text part", "qwen3_vl_text")),
        # its names are language_model.model.layers…
        (Llama4Config(architectures=["Llama4ForConditionalGeneration"]), ("language_model",)),
        (LlavaConfig(architectures=["LlavaForConditionalGeneration"]), ()),
        # a kind that says in its text part alone whether the head is tied
        (Qwen2AudioConfig(architectures=["Qwen2AudioForConditionalGeneration"]), ()),
    ],
)
def test_not_trainable_names_other_kinds_than_decoders_and_parts_that_are_none(
    config: object, words: tuple[str, ...]
) -> None:
    refused = not_trainable(config)
    assert (refused is None) == (not words) and all(word in str(refused) for word in words)


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


def test_load_model_refuses_what_is_not_there(tmp_path: Path) -> None:
    with refusing(ModelError, "--model-name", got=f"{tmp_path}/none"):
        load_model(ModelConfig(model_name=f"{tmp_path}/none"))
    for device, wanted in (("toaster", "auto, cpu, cuda or cuda:N"), ("cuda:99", "")):
        with refusing(ConfigError, "--device", got=device, wanted=wanted):
            pick_device(device)
    assert [pick_dtype("auto", torch.device(kind)) for kind in ("cpu", "cuda")] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_read_tokenizer_names_a_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text(text)
    with refusing(NoTokenizerError, f"--model-name {tmp_path}") as error:
        read_tokenizer(str(tmp_path))
    assert error.value.got


# files in the form of transformers 4 ---------------------------------------------------------------------------------


LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
OF_PEFT_0_12 = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora"),
    }
)
"""The fields of its LoraConfig."""


@pytest.mark.parametrize(
    ("model_type", "rope", "flat"),
    [
        ("qwen2", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        ("llama", {"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25},
            {"rotary_emb_base": 2e4, "rotary_pct": 0.25, "rope_scaling": None},
        ),
        (
            "phi3",
            {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64, **LONG},
            {
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
            },
        ),
        ("phi3", {"rope_theta": 1e4, "attention_factor": 1.2, **LONG}, {}),  # transformers 4 has no place for a factor
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4},
        ),
        (
            "olmo3",
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {},  # one base for all layers there
        ),
        ("new_model", {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}, {}),
    ],
)
def test_readable_config_for_older_readers(model_type: str, rope: dict[str, Any], flat: dict[str, Any]) -> None:
    config = {"model_type": model_type, "dtype": "bfloat16", "rope_parameters": rope}
    assert readable_config(config) == {**config, "torch_dtype": "bfloat16", **flat}
    mixture = {"model_type": "qwen3_moe", "num_local_experts": 4}
    assert readable_config(mixture) == {**mixture, "num_experts": 4}
    outer = {"model_type": "outer", "text_config": config}
    assert readable_config(outer)["text_config"] == readable_config(config)


FACTORS = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 3e4, "original_max_position_embeddings": 128}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CONFIGS},
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("phi3", {"original_max_position_embeddings": 128, "rope_scaling": FACTORS}),
}


@pytest.mark.parametrize("name", ROPES)
def test_readable_config_is_the_same_to_transformers_5(name: str, tmp_path: Path) -> None:
    architecture, changes = ROPES[name]
    kind, fields = CONFIGS[architecture]
    kind(**SIZES | fields | changes).save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    make_readable(tmp_path)
    assert "rope_theta" in json.loads((tmp_path / "config.json").read_text())
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    for rope in (before["rope_parameters"], after["rope_parameters"]):
        rope.pop("type", None)  # the older name of rope_type
    assert {key: after[key] for key in before} == before


def test_readable_tokenizer_config_changes_only_what_transformers_5_wrote() -> None:
    older = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"], "model_max_length": 8}
    assert readable_tokenizer_config(older) == older
    newer = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}
    assert readable_tokenizer_config(newer) == {
        "backend": "tokenizers",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
        "clean_up_tokenization_spaces": False,
    }


def test_write_tokenizer_copies_its_files_byte_for_byte_or_saves_it(tmp_path: Path) -> None:
    base, out, saved = (tmp_path / name for name in ("base", "out", "saved"))
    build_tokenizer().save_pretrained(base)
    make_readable(base)
    (base / "tokenizer_config.json").write_text(json.dumps(json.loads((base / "tokenizer_config.json").read_text())))
    (base / "special_tokens_map.json").write_text('{"eos_token":   "<|endoftext|>"}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (base / "model.safetensors").write_bytes(b"")
    out.mkdir()
    write_tokenizer(read_tokenizer(str(base)), out)
    files = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    copied = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert files - copied == {Path("model.safetensors")} and copied <= files
    assert all((base / path).read_bytes() == (out / path).read_bytes() for path in copied)
    saved.mkdir()
    write_tokenizer(build_tokenizer(), saved)  # which was read from no files
    assert {path.name for path in saved.iterdir()} <= set(TOKENIZER_FILES)
    assert AutoTokenizer.from_pretrained(saved).encode("1+2") == build_tokenizer().encode("1+2")


def test_adapter_settings_have_no_key_that_older_peft_refuses() -> None:
    layers = adapter_settings(tiny_lora(layers="1", rslora=True))
    assert set(layers) | set(adapter_settings(tiny_lora())) <= OF_PEFT_0_12
    assert layers["layers_to_transform"] == [1] and layers["use_rslora"] is True


def test_readable_settings_keep_what_is_not_at_its_default() -> None:
    modules: dict[str, Any] = {"target_modules": ["q_proj"], "exclude_modules": ["k_proj"]}
    config = LoraConfig(r=4, use_dora=True, task_type="CAUSAL_LM", **modules)
    settings = json.loads(json.dumps(config.to_dict(), default=sorted))
    kept = readable_settings({**settings, "unknown_to_peft": 1})
    assert kept.pop("unknown_to_peft") == 1
    assert kept["use_dora"] and kept["exclude_modules"] == ["k_proj"] and "peft_version" not in kept
    assert LoraConfig(**kept) == config


# the reference of the KL divergence ----------------------------------------------------------------------------------


TOKENS = torch.tensor([[1, 2, 3, 4]])


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_frozen_weights_compute_the_same(dtype: torch.dtype, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's weights are there afterwards, also if the forward pass fails."""
    frozen = tiny_qwen(seed=1)
    for parameter in frozen.parameters():
        parameter.copy_(parameter.to(dtype))  # what the copy can hold
    model = tiny_qwen(seed=2)
    own, places = logits(model), [parameter.data_ptr() for parameter in model.parameters()]
    weights = {name: parameter.detach().to(dtype) for name, parameter in frozen.named_parameters()}
    ends, reference = pytest.raises(ZeroDivisionError), FrozenWeights(model, weights, list(model.model.layers))
    with monkeypatch.context() as patched, ends if fails else nullcontext(), reference.active():
        assert torch.equal(logits(model), logits(frozen))
        assert torch.equal(model.lm_head.weight, frozen.lm_head.weight)  # also for who multiplies by it himself
        if fails:
            patched.setattr(model.model.layers[1].mlp, "forward", lambda *_: 1 / 0)
            logits(model)
    assert torch.equal(logits(model), own)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_adapter_off_is_the_base_and_keeps_what_was_accumulated(tmp_path: Path) -> None:
    model = tiny_lora()
    reference = build_reference(model, kl_config(tmp_path / "nowhere", log_kl=True))
    base = logits(model)
    fill_b(model)
    assert not torch.allclose(logits(model), base)
    model(input_ids=TOKENS).logits.sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert reference is not None
    with reference():
        assert torch.equal(logits(model), base)
    after = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert before and before.keys() == after.keys()
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


def kl_config(path: Path, **loss: object) -> TrainConfig:
    return TrainConfig.model_validate({"model_name": str(path), "device": "cpu", "lr": 1e-2, **loss})


def kls_of_steps(start: Callable[[], Any], settings: TrainConfig) -> list[float]:
    """Of three; a process that resumes with other weights keeps the reference of the run's start."""
    nudge(other := start())
    trainer, resumed = Trainer(start(), settings), Trainer(other, settings)
    kls = [reduce(each.step(ROLLOUTS, 0).metrics)["alignment/kl_reference"] for each in (*[trainer] * 3, resumed)]
    assert kls.pop() > 1e-4
    return kls


ROLLOUTS = batch(
    [sample([1, 2], [3, 4], 1.0), sample([1, 2], [5], 0.0)], [sample([1], [6], 1.0), sample([1], [7], 1.0)]
)


@pytest.mark.parametrize("options", [{"kl_beta": 0.1}, {"log_kl": True, "ref_offload": True}])
def test_kl_reference_of_all_weights_is_the_first_model(tmp_path: Path, options: dict[str, object]) -> None:
    settings = kl_config(save_tiny(tmp_path), **options)
    first, second, third = kls_of_steps(lambda: load_all_weights(settings), settings)
    assert first == 0 < second < third


@pytest.mark.parametrize("reference", ["start", "base"])
def test_kl_reference_of_a_started_adapter(tmp_path: Path, reference: str) -> None:
    base, adapter = save_tiny(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    trained = tiny_lora()
    fill_b(trained)
    save_adapter(trained, adapter)
    given = {"model_name": str(base), "device": "cpu", "weight_bridge_mode": "lora_only", "lora_adapter": str(adapter)}
    settings = build(TrainConfig, given | {"kl_beta": 0.1, "kl_reference": reference, "lr": 1e-2})
    assert settings.weight_bridge_mode == "lora_only"
    first, second, third = kls_of_steps(lambda: add_adapter(tiny_qwen(), settings, seed=5), settings)
    assert first > 1e-4 if reference == "base" else first == 0 < second < third


def test_build_reference_only_where_it_is_wanted_and_fits(tmp_path: Path) -> None:
    assert build_reference(tiny_qwen(), kl_config(tmp_path / "nowhere")) is None
    with refusing(ModelError, "--model-name", got=str(tmp_path)):
        build_reference(tiny_qwen(depth=3), kl_config(save_tiny(tmp_path), log_kl=True))
    check_room(2**30, free=2**30)
    with refusing(ConfigError, "--kl-beta, --log-kl", wanted="3.0 GiB", words=["1.5 GiB", "--ref-offload"]):
        check_room(3 * 2**30, free=1.5 * 2**30)


# what a model's name means -------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has one model: runs/demo-model."""
    (tmp_path / "runs" / "demo-model").mkdir(parents=True)
    (tmp_path / "runs" / "demo-model" / CONFIG_FILE).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("runs/demo-modle", "runs/demo-model"),
        ("rnus/demo-model", "runs/demo-model"),  # could be the hub's, but for the model that is called nearly so
        ("runs/nothing-alike", "the models runs/demo-model"),
        ("./nothing/alike", "the models runs/demo-model"),  # two levels down
        ("./runs/demo_model", "runs/demo-model"),
        *((name, "") for name in ("Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "runs/demo-model")),
    ],
)
def test_missing_path_names_the_nearest_folder(name: str, fix: str) -> None:
    assert nearest_folder(Path("runs/demo-modle/checkpoints")) == Path("runs/demo-model")
    assert nearest_folder(Path("nothing/demo-model").absolute()) == Path.cwd()
    problem = missing_path(name)
    if not fix:
        assert problem is None
        return
    assert problem is not None and problem.got == name and fix in problem.fix
    with pytest.raises(FatalError) as refused:
        check_model_path(name)
    assert fix in refused.value.fix


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 2}, False),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 16}, True),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4}}, True),
        ({"head_dim": 32, "text_config": {"head_dim": 16}}, True),
        ({"text_config": {"head_dim": 32}}, False),
        ({}, False),
    ],
)
def test_head_size_of_each_part(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], refused: bool) -> None:
    """vLLM's CPU kernels have some sizes only; a conditional model has its text part's in `text_config`."""
    backend = SimpleNamespace(get_supported_head_sizes=lambda: [32, 64])
    monkeypatch.setattr(seams, "device_type", lambda: "cpu")
    monkeypatch.setattr(seams, "require", lambda module, name: backend)
    with pytest.raises(FatalError, match="size 16,") if refused else nullcontext():
        checks._check_head_size("m", config)
    monkeypatch.setattr(seams, "device_type", lambda: "cuda")
    checks._check_head_size("m", config)


# what real vLLM computed for the same random models (`tests/golden/*.json`) ----------------------------------------


TOLERANCE = 2e-4
"""Largest difference of a token, in nats: both sides compute in float32."""
ROUNDED = 0.03
"""Mean difference, in nats, where both compute in bfloat16."""


@pytest.mark.parametrize("architecture", RECORDED)
def test_logprobs_are_vllms_without_and_with_an_adapter(tmp_path: Path, architecture: str) -> None:
    record = golden(architecture)
    save_model(architecture, tmp_path)
    attention = ATTENTION.get(architecture, "sdpa")
    dtype = "bfloat16" if architecture in IN_16_BITS else "float32"
    options = {"model_name": str(tmp_path), "attention": attention, "device": "cpu", "dtype": dtype}
    model: Any = load_model(ModelConfig.model_validate(options)).eval()

    def off(wanted: list[float]) -> Tensor:
        gaps = (logprobs(model, PROMPT) - torch.tensor(wanted)).abs()
        return gaps.mean() if architecture in IN_16_BITS else gaps.max()

    tolerance = ROUNDED if architecture in IN_16_BITS else TOLERANCE
    assert off(record.logprobs) < tolerance
    if architecture in WITHOUT_LORA:
        return
    model = with_adapter(architecture, model).eval()
    assert off(record.adapted) < tolerance
    assert off(record.logprobs) > 5 * tolerance, "the adapter changes nothing"


def test_the_page_of_models_lists_what_was_compared() -> None:
    assert table() in PAGE.read_text(), "write it by python -m tests.golden.models"
