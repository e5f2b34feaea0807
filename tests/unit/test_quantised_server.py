"""A server in 8 bits: its flags, the correction that it turns on, the proof's measured offset, a wrong scale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from torch import nn

from grpo_trainer.alignment.drift import MARGIN_QUANTISED, drift_alarm
from grpo_trainer.alignment.probes import FAILED, computed_in_fp8, rounded_to_fp8
from grpo_trainer.alignment.proof import NOISE_LIMIT_QUANTISED, NOISE_MARGIN, Change, Proof
from grpo_trainer.config.options import build
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ConfigError
from grpo_trainer.launch.plan import server_process
from tests.unit.test_proof import INFO, FakeServer, prove
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.protocol import GenerateResponse


def trainer_of(**given: object) -> TrainConfig:
    return build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only", **given})


# ---------------------------------------------------------------- options


def of_a_run(**given: object) -> TrainConfig:
    named = {f"server.{key}" if key in ("quantization", "kv_cache_dtype") else key: each for key, each in given.items()}
    return build_run({}, {"model_name": "m", "weight_bridge_mode": "lora_only", **named}).trainer


@pytest.mark.parametrize("made", [trainer_of, of_a_run])
@pytest.mark.parametrize("given", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_samples_of_8_bits_are_corrected_by_default(made: Callable[..., TrainConfig], given: dict[str, Any]) -> None:
    loss = made(**given)
    assert (loss.ratio_against, loss.correction, loss.is_level, loss.is_cap) == ("trainer", "truncate", "token", 2.0)
    assert made(**given, ratio_against="rollout").correction == "none"
    assert made(**given, is_correction="mask", is_cap=3).correction == "mask"


def server_words(config: TrainConfig) -> tuple[str, ...]:
    return tuple(server_process(config, python="python", on_gpu=True, model="m").argv)


def test_a_server_is_started_in_8_bits_only_if_it_is_asked_for() -> None:
    config = trainer_of()
    assert (config.ratio_against, config.correction) == ("rollout", "none")
    assert not {"--quantization", "--kv-cache-dtype", "--return-routed-experts"} & {*server_words(config)}
    coarse = of_a_run(quantization="fp8", kv_cache_dtype="fp8")
    words = server_words(coarse)
    assert coarse.server.in_8_bits
    assert words[words.index("--quantization") + 1] == words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--return-routed-experts" in server_words(trainer_of(routing_replay="server"))


def test_the_flag_has_one_place() -> None:
    with pytest.raises(ConfigError) as caught:
        build_run({}, {"model_name": "m", "server.extra_args": "-q,fp8"})
    assert caught.value.problems[0].wanted == "--server.quantization"


# ---------------------------------------------------------------- the trainer in fp8, by values computed by hand


@pytest.mark.parametrize(
    ("values", "largest", "rounded"),
    [
        # 448 is the greatest number of e4m3: the scale is 1. Three bits stay after the leading one.
        ([448.0, 17.0, 18.9, -300.0, 0.0], [448.0], [448.0, 16.0, 18.0, -288.0, 0.0]),
        ([896.0, 34.0], [896.0], [896.0, 32.0]),
        ([[448.0, 17.0], [0.0, -896.0]], [[448.0], [896.0]], [[448.0, 16.0], [0.0, -896.0]]),
        ([0.0, 0.0], [0.0], [0.0, 0.0]),
    ],
)
def test_rounded_to_fp8(values: Any, largest: Any, rounded: Any) -> None:
    assert rounded_to_fp8(torch.tensor(values), torch.tensor(largest)).tolist() == rounded
    if values == [0.0, 0.0]:  # the scale must not be 0 in 16 bits either
        for dtype in (torch.bfloat16, torch.float16):
            assert not rounded_to_fp8(torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=dtype)).any()


class Model(nn.Module):
    """A linear layer, an adapter's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lora_A, self.lm_head = (nn.Linear(2, 1, bias=False) for _ in range(3))
        for each in (self.layer, self.lora_A, self.lm_head):
            each.weight.data = torch.tensor([[448.0, 17.0]])

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_activations_have_a_scale_a_token_and_only_linear_layers_of_the_base_model_are_rounded_to_fp8() -> None:
    model, tokens = Model(), torch.tensor([[448.0, 17.0], [0.0, 34.0]])
    exact = [448.0 * 448 + 17 * 17, 34.0 * 17]
    with torch.no_grad(), computed_in_fp8(model):
        # the second token's scale is its own: 34 is its greatest number, which is exact
        assert model.layer(tokens)[:, 0].tolist() == pytest.approx([448.0 * 448 + 16 * 16, 34.0 * 16])
        for other in (model.lora_A, model.lm_head):
            assert other(tokens)[:, 0].tolist() == exact
    assert model.layer(tokens)[:, 0].tolist() == exact


# ---------------------------------------------------------------- proof


def matrices(model: nn.Module) -> list[nn.Linear]:
    named = model.named_modules()
    return [each for name, each in named if isinstance(each, nn.Linear) and name.endswith("base_layer")]


def in_fp8(model: nn.Module, *, fault: bool = False) -> Any:
    """A copy with matrices in 8 bits and a scale for each, as vLLM has them; the fault: another tensor's scale."""
    rounded = copy.deepcopy(model)
    largest = torch.finfo(torch.float8_e4m3fn).max
    layers = matrices(rounded)
    scales = [layer.weight.abs().max() / largest for layer in layers]
    used = scales[1:] + scales[:1] if fault else scales
    with torch.no_grad():
        for layer, scale, wrong in zip(layers, scales, used, strict=True):
            layer.weight.copy_((layer.weight / scale).to(torch.float8_e4m3fn).to(layer.weight.dtype) * wrong)
    return rounded


@pytest.fixture
def trainer() -> PeftModel:
    """Its matrices are of two sizes, and so are their scales; its head is large, so that it has preferences."""
    model = tiny_lora()
    fill_b(model)
    for index, layer in enumerate(matrices(model)):
        layer.weight.data *= 0.5 if index % 2 else 1.0
    head: Any = model.get_base_model().lm_head
    head.weight.data *= 2.0
    return model


def test_the_offset_is_measured_and_bounds_the_alarm(trainer: PeftModel) -> None:
    info = msgspec.structs.replace(INFO, quantization="fp8")
    server = FakeServer(trainer, model=in_fp8(trainer))
    noise = prove(trainer, server, info).noise
    assert 1e-3 < noise < NOISE_LIMIT_QUANTISED  # more than rounding to 32 bits: the test shows something
    config = trainer_of(quantization="fp8")
    alarm = drift_alarm(config, noise, trainer)
    assert alarm is not None and alarm.limit == pytest.approx(max(0.01, MARGIN_QUANTISED * noise))


def test_quantised_limit_of_a_model_that_moves_far(trainer: PeftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own logprobs in fp8 say how far its server may be off."""
    monkeypatch.setattr("grpo_trainer.alignment.proof.NOISE_LIMIT_QUANTISED", 0.01)
    info = msgspec.structs.replace(INFO, quantization="fp8")
    server = FakeServer(trainer, model=in_fp8(trainer))
    assert prove(trainer, server, info).noise > 0.01
    for wrong, kind in ((True, "fp8"), (False, "awq")):
        server = FakeServer(trainer, model=in_fp8(trainer, fault=wrong))
        with pytest.raises(BridgeError) as caught:
            info = msgspec.structs.replace(INFO, quantization=kind)
            prove(trainer, server, info)
        assert caught.value.field.startswith(FAILED)


class ScaledServer(FakeServer):
    """Serves adapters at a multiple of their scale, from a base model with noise. Each request is seeded."""

    def __init__(self, trainer: PeftModel, scale: float) -> None:
        noisy, random = copy.deepcopy(trainer), torch.Generator().manual_seed(100)
        with torch.no_grad():
            for layer in matrices(noisy):
                layer.weight.add_(0.3 * layer.weight.std() * torch.randn(layer.weight.shape, generator=random))
        super().__init__(trainer, model=noisy)
        self.scale = scale

    def load(self, name: str) -> None:
        super().load(name)
        self.adapters[name] = {
            key: value * self.scale if "lora_B" in key else value for key, value in self.adapters[name].items()
        }

    def generate(self, prompt: list[int], **more: Any) -> GenerateResponse:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().generate(prompt, **more)


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0, 4.0])
def test_a_wrong_scale_shows_through_noise_of_a_quarter_of_a_nat(scale: float) -> None:
    """Planted fault: without the comparison of scales each of the three passes."""
    info = msgspec.structs.replace(INFO, quantization="awq")
    trainer = tiny_lora()
    server = ScaledServer(trainer, scale)
    if scale == 1.0:
        assert prove(trainer, server, info).noise > 0.2
        return
    with pytest.raises(BridgeError) as caught:
        prove(trainer, server, info)
    assert caught.value.field.startswith(FAILED)


class WholeServer(FakeServer):
    """Serves a whole model: what is asked for without an adapter's name."""

    def generate(self, prompt: list[int], *, model: str | None, **more: Any) -> GenerateResponse:
        answer = super().generate(prompt, model=model or "whole", **more)
        return msgspec.structs.replace(answer, policy_version=1)


@pytest.mark.parametrize(
    ("quantization", "fault", "passes"), [("fp8", False, True), ("fp8", True, False), ("awq", False, False)]
)
def test_a_relaunched_server_in_fp8_may_be_off_by_as_much(
    trainer: PeftModel, monkeypatch: pytest.MonkeyPatch, quantization: str, fault: bool, passes: bool
) -> None:
    monkeypatch.setattr("grpo_trainer.alignment.proof.NOISE_LIMIT_QUANTISED", 0.01)
    info = msgspec.structs.replace(INFO, quantization=quantization)
    server = WholeServer(trainer, model=in_fp8(trainer, fault=fault))
    server.load("whole")
    proof = Proof(trainer, server, "float32")  # pyright: ignore[reportArgumentType]
    if not passes:
        with pytest.raises(BridgeError):
            proof.compare(info, Change(trainer, 1))
        return
    noise, allowed = proof.compare(info, Change(trainer, 1))
    assert 0.01 < noise <= allowed
    again, allowed = proof.compare(info, Change(trainer, 1))  # the second launch
    assert again <= allowed == pytest.approx(NOISE_MARGIN * noise)


@pytest.mark.parametrize(("quantization", "fault"), [(None, False), ("fp8", True)])
def test_proof_refuses_8_bits_it_is_not_told_of(trainer: PeftModel, quantization: str | None, fault: bool) -> None:
    server = FakeServer(trainer, model=in_fp8(trainer, fault=fault))
    with pytest.raises(BridgeError) as caught:
        prove(trainer, server, msgspec.structs.replace(INFO, quantization=quantization))
    assert caught.value.field.startswith(FAILED)


@pytest.mark.parametrize(
    ("changes", "coarse"),
    [
        ({}, False),
        ({"quantization": "fp8"}, True),
        ({"kv_cache_dtype": "fp8_e4m3"}, True),
        ({"kv_cache_dtype": "bfloat16"}, False),
    ],
)
def test_what_a_server_says_of_itself(changes: dict[str, str], coarse: bool) -> None:
    assert msgspec.structs.replace(INFO, **changes).in_8_bits == coarse
