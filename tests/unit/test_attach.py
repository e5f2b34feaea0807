"""The model in a server's memory, against a stand-in that lays weights out as vLLM was seen to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    SeedOssConfig,
)

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import BridgeError, ConfigError, ModelError
from grpo_trainer.model.export import export_model
from grpo_trainer.model.load import build_without_weights, freeze, load_model
from grpo_trainer.shared import attach
from grpo_trainer.shared.attach import attach_model, bind, build_skeleton, server_device
from grpo_trainer.shared.names import Binding
from tests.golden.models import ATTENTION, CONFIGS, VOCABULARY, random_model
from tests.golden.stand_in import StandIn, bridge_config, stand_in
from tests.unit.factories import refusing
from tests.unit.test_bridge_file import CUDA

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
TOKENS = torch.randint(2, VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(0))


def options(server: StandIn, architecture: str = "", **more: Any) -> ModelConfig:
    attention = ATTENTION.get(architecture, "sdpa")
    return ModelConfig.model_validate(
        {"model_name": str(server.folder), "device": "cpu", "attention": attention, **more}
    )


def attached(server: StandIn, architecture: str = "", **more: Any) -> PreTrainedModel:
    return attach_model(server.config, options(server, architecture, **more), CPU)


@torch.no_grad()
def logprobs(model: nn.Module) -> Tensor:
    logits = model(input_ids=TOKENS).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, TOKENS[0, 1:, None])[:, 0]


def bind_all(built: PreTrainedModel, model: PreTrainedModel) -> None:
    """Bind each parameter to that of the same name."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    bind(built, [Binding(name, name, 0, len(each), tuple(each.shape)) for name, each in tensors.items()], tensors)


@pytest.fixture
def qwen(tmp_path: Path) -> StandIn:
    return stand_in("qwen2", tmp_path)


# the memory is the server's --------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_attach_computes_the_same(tmp_path: Path, architecture: str) -> None:
    server = stand_in(architecture, tmp_path)
    model = attached(server, architecture)
    assert torch.equal(logprobs(model), logprobs(server.model.train()))
    assert len(list(model.parameters())) == len(list(server.model.parameters()))
    # all parameters are in one file
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if server.model.config.tie_word_embeddings:
        assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_optimizers_step_lands_in_the_file(qwen: StandIn, checkpointing: bool) -> None:
    model = attached(qwen, gradient_checkpointing=checkpointing)
    assert model.training and model.is_gradient_checkpointing == checkpointing
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    again = dict(attached(qwen).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        assert not torch.equal(again[name], before[name]), name
        assert torch.allclose(again[name], before[name] - 0.1 * parameter.grad, rtol=1e-6, atol=1e-8), name


def test_parameters_are_of_the_servers_dtype_and_rotary_frequencies_of_32_bits(tmp_path: Path) -> None:
    server = stand_in("qwen3", tmp_path, torch.bfloat16)
    model = attached(server)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert torch.equal(logprobs(model), logprobs(server.model.train()))


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(vocab_size=98, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, dropout=0.5,
                  layerdrop=0.5, word_embed_proj_dim=32),
        SeedOssConfig(**SIZES, head_dim=32, residual_dropout=0.5),
        MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.5, attention_dropout=0.5),
        FalconConfig(**SIZES, attention_dropout=0.5, hidden_dropout=0.5),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_nothing_is_random_in_training_mode(config: Any, tmp_path: Path) -> None:
    rates = {key: value for key, value in config.to_dict().items() if value == 0.5}
    model = freeze(AutoModelForCausalLM.from_config(config), ModelConfig(model_name="x"))
    assert model.training and torch.equal(logprobs(model), logprobs(model))
    export_model(model, None, tmp_path, torch.float32)
    assert rates and rates.items() <= AutoConfig.from_pretrained(tmp_path).to_dict().items()


def test_attach_refuses_attention_that_would_leave_out_capping(tmp_path: Path) -> None:
    server = stand_in("gemma2", tmp_path)
    for make in (attached, lambda server: load_model(options(server))):
        with refusing(
            ConfigError, "--attention", got="sdpa", words=["attn_logit_softcapping 50.0", "--attention eager"]
        ):
            make(server)
    assert torch.equal(logprobs(attached(server, "gemma2")), logprobs(load_model(options(server, "gemma2"))))


# buffers ---------------------------------------------------------------------------------------------------

ORIGINAL = {"original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {  # and those of CONFIGS
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * index for index in range(16)],
        "long_factor": [2.0 + index for index in range(16)],
        **ORIGINAL,
    },
}


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rotary_frequencies_are_the_models_own(rope: str) -> None:
    kind: Any = Phi3Config if rope == "longrope" else LlamaConfig
    more = {**ORIGINAL, "pad_token_id": 0} if rope == "longrope" else {}
    config = kind(**SIZES, **more, rope_parameters={"rope_theta": 50000.0, **ROPES[rope]})
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    built = build_without_weights(config, torch.float32, "sdpa", CPU)
    wanted = dict(plain.named_buffers())
    assert [name for name, _ in built.named_buffers()] == sorted(wanted)
    for name, buffer in built.named_buffers():
        assert torch.equal(buffer, wanted[name])
    bind_all(built, plain)
    assert torch.equal(logprobs(built.eval()), logprobs(plain.eval()))  # 90 tokens: beyond the original 64


@pytest.mark.parametrize(("factor", "got"), [(None, " nan"), (1.001, " 0.001")], ids=["nothing", "another base"])
def test_attach_wrong_buffer(qwen: StandIn, monkeypatch: pytest.MonkeyPatch, factor: float | None, got: str) -> None:
    right = PreTrainedModel.initialize_weights

    def wrong(self: PreTrainedModel) -> None:
        if factor is not None:
            right(self)
            for buffer in self.buffers():
                buffer.mul_(factor)

    monkeypatch.setattr(PreTrainedModel, "initialize_weights", wrong)
    with refusing(ModelError, "model.rotary_emb.inv_freq") as refused:
        attached(qwen)
    assert refused.value.got.endswith(got)


# faults ----------------------------------------------------------------------------------------------------


def test_attach_refuses_another_dtype_than_the_servers(qwen: StandIn) -> None:
    with refusing(ConfigError, "--dtype", got="bfloat16", words=["float32", "--dtype auto"]):
        attached(qwen, dtype="bfloat16")
    attached(qwen, dtype="float32")
    name = "model.norm.weight"
    changed = {
        field: {**entries, name: msgspec.structs.replace(entries[name], dtype="bfloat16")}
        for field in ("param_mappings", "ipc_handles")
        for entries in [getattr(qwen.config, field)]
    }
    with refusing(ModelError, "model.norm.weight: dtype", words=["bfloat16 ", "float32"]):
        attach_model(msgspec.structs.replace(qwen.config, **changed), options(qwen), CPU)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("qwen2", "rms_norm_eps", 1e-5),
        ("qwen2", "hidden_size", 64),
        ("qwen2", "tie_word_embeddings", False),
        ("qwen3", "initializer_range", 0.02),
    ],
)
def test_attach_another_model(qwen: StandIn, tmp_path: Path, architecture: str, field: str, value: Any) -> None:
    other = random_model(architecture).config
    setattr(other, field, value)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError) as refused:
        attach_model(qwen.config, options(qwen, model_name=str(tmp_path / "other")), CPU)
    if architecture == "qwen2":
        assert (refused.value.field, refused.value.got) == (f"--model-name: {field}", str(value))
    assert refused.value.field.startswith("--model-name: ") and refused.value.got != refused.value.wanted


def test_attach_takes_the_same_model_of_another_folder(qwen: StandIn, tmp_path: Path) -> None:
    copy = random_model("qwen2").config
    copy.initializer_range = 0.5  # without effect on a model that is there
    copy.save_pretrained(tmp_path / "copy")
    attach_model(qwen.config, options(qwen, model_name=str(tmp_path / "copy")), CPU)
    with refusing(ModelError, "--model-name", words=["/not/here"]):
        attach_model(msgspec.structs.replace(qwen.config, model="/not/here"), options(qwen), CPU)


def test_attach_refuses_a_model_with_something_without_memory(qwen: StandIn) -> None:
    built = build_without_weights(qwen.model.config, torch.float32, "sdpa", CPU)
    built.get_submodule("model.norm").scale = torch.empty(1, device="meta")  # a plain attribute
    with refusing(ModelError, "model.norm.scale", words=["lora_only"]):
        bind_all(built, qwen.model)


def test_attach_leaves_memory_that_is_shorter_than_said_as_it_is(qwen: StandIn) -> None:
    memory = qwen.folder / "memory"
    size = memory.stat().st_size - 4
    os.truncate(memory, size)
    with pytest.raises(BridgeError):
        attached(qwen)
    assert memory.stat().st_size == size
    memory.unlink()
    with pytest.raises(BridgeError) as gone:
        attached(qwen)
    assert str(memory) in gone.value.got and f"[Errno {errno.ENOENT}]" in gone.value.got
    assert not memory.exists()


# devices ---------------------------------------------------------------------------------------------------


def test_server_device(qwen: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is found by its UUID."""
    assert server_device(qwen.config, CPU) == CPU
    config = bridge_config("some/model", {"a": CUDA}, gpu_uuid="GPU-2")
    uuids = ["GPU-1", "GPU-2", "GPU-3"]
    monkeypatch.setattr(attach.torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(attach.torch.cuda, "get_device_properties", lambda at: SimpleNamespace(uuid=uuids[at]))
    for asked in ("cuda", "cuda:1"):
        assert server_device(config, torch.device(asked)) == torch.device("cuda", 1)
    for served, device, fix in (
        (config, "cuda:0", "--device cuda:1"),
        (config, "cpu", "--device auto"),
        (qwen.config, "cuda", "--device cpu"),
    ):
        with refusing(BridgeError, "--device", got=device, words=[fix]):
            server_device(served, torch.device(device))
    uuids[1] = "GPU-9"
    with refusing(BridgeError, "gpu_uuid", got="GPU-1, GPU-9, GPU-3", wanted="GPU-2", words=["CUDA_VISIBLE_DEVICES"]):
        server_device(config, torch.device("cuda"))


def test_a_model_that_was_built_before_is_taken_if_it_is_as_the_server_has_it(qwen: StandIn) -> None:
    early = build_skeleton(options(qwen))
    assert attach_model(qwen.config, options(qwen), CPU, early) is early
    other = build_skeleton(options(qwen, dtype="bfloat16"))
    assert attach_model(qwen.config, options(qwen), CPU, other) is not other
