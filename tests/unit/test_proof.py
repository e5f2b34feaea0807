"""The bridge proof against a server made of the same model, with faults planted in it."""

from __future__ import annotations

import copy
import re
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

from grpo_trainer.alignment import proof
from grpo_trainer.alignment.proof import BASE_MODEL, EARLIER, OTHER_WEIGHTS, STALE_CACHE, prove_lora
from grpo_trainer.errors import BridgeError
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.protocol import BridgeInfo, GenerateResponse

INFO = BridgeInfo(
    enabled=True, shared_weights=False, update_count=0, last_update_time=0.0, model_name="m", served_model_name="m",
    device="cpu", dtype="float32", boot_id="b", pid=1, policy_version=0, lora_name="policy", max_lora_rank=8,
    max_loras=4, keep_versions=4, max_model_len=512, logprobs_mode="processed_logprobs", vllm_version="0",
    lora_dtype="float32", machine="m", workers=[],
)  # fmt: skip


SCALING = 32 / 8
"""lora_alpha / r of the trainer."""

SLOTS = 3
"""For adapters that are loaded at one time."""

BLOCK = 16
"""Tokens of a block of the stand-in's KV cache."""


class FakeServer:
    """Serves adapters by name from a separate model; `fault` says what it does wrong.

    Args:
        noise: standard deviation of what it adds to each logprob: a server that rounds differently.
    """

    def __init__(self, trainer: PeftModel, fault: str = "", model: PeftModel | None = None, noise: float = 0.0) -> None:
        self.trainer = trainer
        self.model = (tiny_lora() if model is None else model).eval()
        self.fault = fault
        self.noise = noise
        self.random = torch.Generator().manual_seed(0)
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.unloaded: list[str] = []
        self.prefixes: dict[tuple[int, ...], Any] = {}

    def load(self, name: str) -> None:
        assert len(self.adapters) - len(self.unloaded) < SLOTS
        state = {key: value.clone() for key, value in get_peft_model_state_dict(self.trainer).items()}
        if self.fault == "scaled twice":
            state = {key: value * SCALING if "lora_B" in key else value for key, value in state.items()}
        if self.fault.startswith("without "):
            part = self.fault.removeprefix("without ")
            assert any(part in key for key in state)
            state = {key: value * 0 if part in key and "lora_B" in key else value for key, value in state.items()}
        self.adapters[name] = state

    def generate(
        self, prompt: list[int], *, model: str, max_tokens: int, prompt_logprobs: int | None = None, **_: Any
    ) -> GenerateResponse:
        served = {
            "base served": None,
            "first adapter kept": next(iter(self.adapters)),
            "synthetic kept": next((name for name in self.adapters if "synthetic" in name), model),
        }.get(self.fault, model)  # fmt: skip
        zeros = {key: value * 0 for key, value in self.adapters[model].items()}
        set_peft_model_state_dict(self.model, zeros if served is None else self.adapters[served])
        tokens = list(prompt)
        logprobs = []
        for _step in range(max_tokens):
            row = self._row(tokens, len(prompt) // BLOCK * BLOCK)
            token = int(torch.multinomial(row.exp(), 1))
            logprobs.append([{token: float("nan") if self.fault == "no numbers" else float(row[token])}])
            tokens.append(token)
        return GenerateResponse(
            text=[""], prompt=None, finish_reasons=["length"], policy_version=0,
            model="policy-v9" if self.fault == "wrong name" else model,
            prompt_token_ids=prompt, token_ids=[tokens[len(prompt) :]], logprobs=[logprobs],
            prompt_logprobs=None if prompt_logprobs is None else self._prompt_logprobs(prompt),
        )  # fmt: skip

    @torch.no_grad()
    def _row(self, tokens: list[int], blocks: int) -> torch.Tensor:
        """Logprobs of the next token; a stale cache holds keys and values of the first adapter that had this prompt."""
        prefix = None
        if self.fault == "stale prefix cache" and blocks:
            key = tuple(tokens[:blocks])
            if key not in self.prefixes:
                self.prefixes[key] = self.model(input_ids=torch.tensor([key]), use_cache=True).past_key_values
            prefix, tokens = copy.deepcopy(self.prefixes[key]), tokens[blocks:]
        logits_V = self.model(input_ids=torch.tensor([tokens]), past_key_values=prefix, use_cache=bool(prefix)).logits
        return self._rounded(logits_V[0, -1])

    @torch.no_grad()
    def _prompt_logprobs(self, prompt: list[int]) -> list[dict[int, float] | None]:
        rows = self._rounded(self.model(input_ids=torch.tensor([prompt])).logits[0])
        return [None, *({token: float(row[token])} for token, row in zip(prompt[1:], rows, strict=False))]

    def _rounded(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits + self.noise * torch.randn(logits.shape, generator=self.random), -1)

    def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)


def prove() -> tuple[PeftModel, FakeServer]:
    trainer = tiny_lora()
    fill_b(trainer)
    server = FakeServer(trainer)
    prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    return trainer, server


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("base served", BASE_MODEL),
        ("scaled twice", "4 times"),
        ("without layers.1.mlp.up_proj", "without model.layers.1.mlp.up_proj"),
        ("stale prefix cache", STALE_CACHE),
    ],
)
def test_a_fresh_adapter_which_is_still_the_base_model_hides_no_fault(fault: str, words: str) -> None:
    trainer = tiny_lora()  # B is 0: only the synthetic adapter shows anything
    server = FakeServer(trainer, fault)
    with pytest.raises(BridgeError) as failed:
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    assert "(synthetic adapter)" in failed.value.field and set(words.split()) <= set(failed.value.summary.split())
    assert sorted(server.unloaded) == sorted(server.adapters)


def test_an_honest_server_passes_and_the_weights_are_as_before_bit_for_bit() -> None:
    trainer, server = prove()
    untouched = tiny_lora()
    fill_b(untouched)
    states = [get_peft_model_state_dict(model) for model in (trainer, untouched)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert trainer.training
    assert sorted(server.unloaded) == sorted(server.adapters) and len(server.adapters) == 3


@pytest.mark.parametrize(("factors", "enough"), [((1, 4, 64), True), ((1, 4), False)])
def test_an_adapter_that_shows_too_little_is_made_larger(
    monkeypatch: pytest.MonkeyPatch, factors: tuple[int, ...], enough: bool
) -> None:
    monkeypatch.setattr(proof, "MIN_MOVE", 0.2)
    monkeypatch.setattr(proof, "RELATIVE_SIZES", tuple(2.0**exponent for exponent in range(-12, 3)))
    monkeypatch.setattr(proof, "FACTORS", factors)
    trainer = tiny_lora()
    server = FakeServer(trainer)
    if enough:
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    else:
        with pytest.raises(BridgeError) as failed:
            prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
        assert "impossible" in failed.value.field.split()
    assert sum("synthetic" in name for name in server.adapters) == len(factors)
    assert sorted(server.unloaded) == sorted(server.adapters)


@pytest.mark.parametrize(
    ("fault", "tried", "words"),
    [
        ("base served", "(present adapter)", BASE_MODEL),
        ("scaled twice", "(present adapter)", "4 times (applied twice)"),
        ("without layers.1.mlp.up_proj", "(present adapter)", "without model.layers.1.mlp.up_proj"),
        ("without k_proj", "(present adapter)", "without k_proj"),
        ("without layers.0.self_attn", "(present adapter)", OTHER_WEIGHTS),
        ("first adapter kept", "(synthetic adapter)", f"{EARLIER} (present)"),
        ("synthetic kept", "(restored adapter)", f"{EARLIER} (synthetic)"),
        ("stale prefix cache", "(synthetic adapter)", STALE_CACHE),
    ],
)
def test_each_planted_fault_is_caught_and_named(fault: str, tried: str, words: str) -> None:
    trainer = tiny_lora()
    fill_b(trainer)
    before = {key: value.clone() for key, value in get_peft_model_state_dict(trainer).items()}
    server = FakeServer(trainer, fault)
    with pytest.raises(BridgeError) as failed:
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    assert tried in failed.value.field and set(words.split()) <= set(failed.value.summary.split())
    assert sorted(server.unloaded) == sorted(server.adapters)  # a failed proof leaves nothing behind
    after = get_peft_model_state_dict(trainer)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_an_answer_by_another_adapter_is_no_proof() -> None:
    trainer = tiny_lora()
    server = FakeServer(trainer, "wrong name")
    with pytest.raises(BridgeError) as failed:
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    assert failed.value.got == "policy-v9" and failed.value.wanted in server.adapters
    assert sorted(server.unloaded) == sorted(server.adapters)


def test_logprobs_that_are_no_numbers_are_no_proof() -> None:
    trainer = tiny_lora()
    server = FakeServer(trainer, "no numbers")
    with pytest.raises(BridgeError) as failed:
        prove_lora(trainer, server, server.load, INFO)  # type: ignore[arg-type]
    assert "(present adapter)" in failed.value.field and "nan" in failed.value.got.split()


LAYERS = 12
NOISY = msgspec.structs.replace(INFO, dtype="bfloat16")


@pytest.mark.complete
@pytest.mark.parametrize("module", ["5.self_attn.k_proj", "11.mlp.down_proj"])
def test_one_missing_module_shows_through_noise_that_hides_it_on_average(module: str) -> None:
    """One of 84 modules changes the logprobs by less, on average, than what 16 bits do must be allowed to."""
    trainer = tiny_lora(LAYERS)
    server = FakeServer(trainer, f"without layers.{module}", tiny_lora(LAYERS), noise=0.02)
    with pytest.raises(BridgeError) as failed:
        prove_lora(trainer, server, server.load, NOISY)  # type: ignore[arg-type]
    assert re.fullmatch(rf"\d % of model.layers.{module}", failed.value.got)


@pytest.mark.complete
def test_noise_alone_is_no_missing_module(caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_lora(LAYERS)
    server = FakeServer(trainer, model=tiny_lora(LAYERS), noise=0.02)
    server.random.manual_seed(0)
    with caplog.at_level("INFO"):
        assert 0.005 < prove_lora(trainer, server, server.load, NOISY).noise < 0.05  # type: ignore[arg-type]
    (proved,) = [record.args for record in caplog.records if record.name == proof.__name__]
    assert isinstance(proved, tuple) and proved[3] == 84 and int(str(proved[4])) > 42
