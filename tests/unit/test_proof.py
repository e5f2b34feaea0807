"""The bridge proof against servers made of the same model, with faults planted in them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional

from grpo_trainer.alignment import proof
from grpo_trainer.alignment.adapter import (
    EARLIER,
    STALE_CACHE,
    AdapterChange,
    Presence,
    adapted_layers,
    adapted_modules,
    left_out,
    look_for_each_module,
    multiplied,
)
from grpo_trainer.alignment.proof import BASE_MODEL, OTHER_WEIGHTS, STALE, UNSEEN, Proof, Proved, WeightChange
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.model.lora import use_few_kernels
from tests.golden.models import random_model
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.protocol import PROOF_VERSION, BridgeInfo, GenerateResponse

INFO = BridgeInfo(
    enabled=True, shared_weights=False, update_count=0, last_update_time=0.0, model_name="m", served_model_name="m",
    device="cpu", dtype="float32", boot_id="b", pid=1, policy_version=0, lora_name="policy", max_lora_rank=8,
    max_loras=4, keep_versions=4, max_model_len=512, logprobs_mode="processed_logprobs", vllm_version="0",
    lora_dtype="float32", machine="m", workers=[],
)  # fmt: skip


SCALING = 32 / 8
"""lora_alpha / r of the trainer."""


def sampled(
    row_of: Callable[[list[int]], Tensor], prompt: list[int], count: int, draw: torch.Generator | None = None
) -> tuple[list[int], Any]:
    """Tokens drawn one after the other from logprobs of the next one, and the logprob of each."""
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        row_V = row_of(tokens)
        tokens.append(int(torch.multinomial(row_V.exp(), 1, generator=draw)))
        logprobs.append([{tokens[-1]: float(row_V[tokens[-1]])}])
    return tokens[len(prompt) :], logprobs


def answer(prompt: list[int], tokens: list[int], logprobs: Any, version: int = 0, **fields: Any) -> GenerateResponse:
    """What a server says of tokens that it has sampled."""
    made: dict[str, Any] = {"text": [""], "prompt": None, "finish_reasons": ["length"], "model": "m"}
    made |= {"prompt_token_ids": prompt, "token_ids": [tokens], "logprobs": [logprobs], "policy_version": version}
    return GenerateResponse(**made | fields)


@torch.no_grad()
def next_logprobs(model: Any, tokens: list[int]) -> Tensor:
    return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0, -1], -1)


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
        blocks = len(prompt) // BLOCK * BLOCK
        tokens, logprobs = sampled(lambda tokens: self._row(tokens, blocks), prompt, max_tokens)
        if self.fault == "no numbers":
            logprobs = [[dict.fromkeys(each, float("nan")) for each in row] for row in logprobs]
        of_prompt = None if prompt_logprobs is None else self._prompt_logprobs(prompt)
        name = "policy-v9" if self.fault == "wrong name" else model
        return answer(prompt, tokens, logprobs, model=name, prompt_logprobs=of_prompt)

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


def prove(trainer: PeftModel, server: Any, info: BridgeInfo = INFO) -> Proved:
    """Prove an adapter to a server that is a client too."""
    return Proof(trainer, server).prove(info, AdapterChange(trainer, server, server.load, info))


def test_an_honest_server_passes_and_the_weights_are_as_before_bit_for_bit() -> None:
    trainer = tiny_lora()
    fill_b(trainer)
    server = FakeServer(trainer)
    prove(trainer, server)
    untouched = tiny_lora()
    fill_b(untouched)
    states = [get_peft_model_state_dict(model) for model in (trainer, untouched)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert trainer.training
    assert sorted(server.unloaded) == sorted(server.adapters) and len(server.adapters) == 3


@pytest.mark.parametrize(("factors", "enough"), [((1, 4, 64), True), ((1, 4), False)])
def test_proof_adapter_is_made_larger(monkeypatch: pytest.MonkeyPatch, factors: tuple[int, ...], enough: bool) -> None:
    monkeypatch.setattr(proof, "MIN_MOVE", 0.2)
    monkeypatch.setattr(proof, "RELATIVE_SIZES", tuple(2.0**exponent for exponent in range(-12, 3)))
    monkeypatch.setattr(proof, "FACTORS", factors)
    trainer = tiny_lora()
    server = FakeServer(trainer)
    if enough:
        prove(trainer, server)
    else:
        with pytest.raises(BridgeError) as failed:
            prove(trainer, server)
        assert "impossible" in failed.value.field.split()
    assert sum("synthetic" in name for name in server.adapters) == len(factors)
    assert sorted(server.unloaded) == sorted(server.adapters)


@pytest.mark.parametrize(
    ("fault", "is_fresh", "tried", "words"),
    [
        ("base served", False, "(present adapter)", BASE_MODEL),
        ("scaled twice", False, "(present adapter)", "4 times (applied twice)"),
        ("without layers.1.mlp.up_proj", False, "(present adapter)", "without model.layers.1.mlp.up_proj"),
        ("without k_proj", False, "(present adapter)", "without k_proj"),
        ("without layers.0.self_attn", False, "(present adapter)", OTHER_WEIGHTS),
        ("first adapter kept", False, "(synthetic adapter)", f"{EARLIER} (present)"),
        ("synthetic kept", False, "(restored adapter)", f"{EARLIER} (synthetic)"),
        ("stale prefix cache", False, "(synthetic adapter)", STALE_CACHE),
        ("no numbers", False, "(present adapter)", "nan"),
        ("wrong name", True, "", "policy-v9"),
        # B is 0 in a fresh adapter: only the synthetic one shows anything.
        ("base served", True, "(synthetic adapter)", BASE_MODEL),
        ("scaled twice", True, "(synthetic adapter)", "4 times"),
        ("without layers.1.mlp.up_proj", True, "(synthetic adapter)", "without model.layers.1.mlp.up_proj"),
        ("stale prefix cache", True, "(synthetic adapter)", STALE_CACHE),
    ],
)
def test_proof_catches_and_names_each_planted_fault(fault: str, is_fresh: bool, tried: str, words: str) -> None:
    trainer = tiny_lora()
    if not is_fresh:
        fill_b(trainer)
    before = {key: value.clone() for key, value in get_peft_model_state_dict(trainer).items()}
    server = FakeServer(trainer, fault)
    with pytest.raises(BridgeError) as failed:
        prove(trainer, server)
    assert tried in failed.value.field
    assert set(words.split()) <= set(f"{failed.value.summary} {failed.value.got}".split())
    assert sorted(server.unloaded) == sorted(server.adapters)  # a failed proof leaves nothing behind
    after = get_peft_model_state_dict(trainer)
    assert all(torch.equal(after[key], before[key]) for key in before)


LAYERS = 12
NOISY = msgspec.structs.replace(INFO, dtype="bfloat16")


@pytest.mark.complete
@pytest.mark.parametrize("module", ["5.self_attn.k_proj", "11.mlp.down_proj"])
def test_proof_sees_one_missing_module_through_noise(module: str) -> None:
    """One of 84 modules changes the logprobs by less, on average, than what 16 bits do must be allowed to."""
    trainer = tiny_lora(LAYERS)
    server = FakeServer(trainer, f"without layers.{module}", tiny_lora(LAYERS), noise=0.02)
    with pytest.raises(BridgeError) as failed:
        prove(trainer, server, NOISY)
    assert re.fullmatch(rf"\d % of model.layers.{module}", failed.value.got)


@pytest.mark.complete
def test_noise_alone_is_no_missing_module(caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_lora(LAYERS)
    server = FakeServer(trainer, model=tiny_lora(LAYERS), noise=0.02)
    server.random.manual_seed(0)
    with caplog.at_level("INFO"):
        assert 0.005 < prove(trainer, server, NOISY).noise < 0.05
    (proved,) = [record.args for record in caplog.records if record.name == proof.__name__]
    assert isinstance(proved, tuple)
    modules, seen = re.findall(r"\d+", str(proved[4]))
    assert modules == "84" and int(seen) > 42


# ---------------------------------------------------------------- modules that a server lacks, among rounding errors

TOKENS = 279
MODULES = 200


def rounding(number: int) -> Tensor:
    """What one state of the trainer, a sum of effects, is rounded by."""
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(number))


def looked(sizes: Tensor, absent: tuple[int, ...] = (), seed: int = 0) -> Presence:
    """The findings for modules with effects of `sizes` rounding errors, if the server lacks those in `absent`."""
    effects_MN = sizes[:, None] * torch.randn(MODULES, TOKENS, generator=torch.Generator().manual_seed(10_000 + seed))

    def logprobs(present_M: Tensor) -> Tensor:
        state = int((present_M * torch.arange(1, MODULES + 1)).sum())
        return present_M @ effects_MN + rounding(100_000 * seed + state)

    def logprobs_without(names: Sequence[str]) -> Tensor:
        whole_M, none_M = torch.ones(MODULES), functional.one_hot(torch.tensor(list(map(int, names))), MODULES)
        return torch.stack([logprobs(whole_M), *(logprobs(whole_M - each_M) for each_M in none_M)])

    served_M = torch.ones(MODULES)
    served_M[list(absent)] = 0.0
    server_N = served_M @ effects_MN + rounding(-1 - seed)
    return look_for_each_module([str(number) for number in range(MODULES)], server_N, logprobs_without, at_once=7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.0, 0.1, 0.5, 3.0])
def test_presence_rounding_errors_are_no_missing_module(size: float, seed: int) -> None:
    """Effect and difference share them."""
    found = looked(torch.full((MODULES,), size), seed=seed)
    assert (found.wrong, found.seen) == ((), 0 if size < 1.0 else MODULES)


@pytest.mark.parametrize("absent", [(7,), (7, 90), (7, 90, 150)])
def test_presence_finds_effects_a_little_larger_than_rounding(absent: tuple[int, ...]) -> None:
    found = looked(torch.full((MODULES,), 4.0), absent)
    assert {int(name) for name, _ in found.wrong} == set(absent)
    assert all(served < 0.5 for _, served in found.wrong)


@pytest.mark.parametrize("few_kernels", [False, True], ids=["PEFT's layers", "few kernels"])
@torch.no_grad()
def test_each_row_of_a_forward_pass_lacks_one_module(few_kernels: bool) -> None:
    model = tiny_lora().eval()
    fill_b(model)
    if few_kernels:
        assert use_few_kernels(model)
    layers, modules = adapted_layers(model), adapted_modules(model)
    tokens_T = torch.randint(0, model.config.vocab_size, (9,), generator=torch.Generator().manual_seed(0))

    def logits_of(rows: int) -> Tensor:
        return model(input_ids=tokens_T.expand(rows, -1)).logits

    with left_out(list(layers.values())):
        rows_BTV = logits_of(1 + len(layers))
    torch.testing.assert_close(rows_BTV[0], logits_of(1)[0])
    for row_TV, name in zip(rows_BTV[1:], modules, strict=True):
        with multiplied(modules, {name: 0.0}):
            lacking_TV = logits_of(1)[0]
        torch.testing.assert_close(row_TV, lacking_TV)
        assert not torch.allclose(row_TV, rows_BTV[0]), name
    torch.testing.assert_close(logits_of(2)[1], rows_BTV[0])  # the hooks are gone


# ---------------------------------------------------------------- all weights


class Receiver:
    """Serves a copy of all weights, taken when it is sent them; `fault` says what it does wrong."""

    def __init__(self, trainer: nn.Module, fault: str = "") -> None:
        self.trainer = trainer
        self.model: Any = copy.deepcopy(trainer).eval()
        self.fault = fault
        self.version = 3
        self.had_change: list[bool] = []

    @contextmanager
    def sending(self, version: int) -> Iterator[None]:
        yield
        served, present = self.model.state_dict(), self.trainer.state_dict()
        self.had_change.append(any(not torch.equal(served[name], present[name]) for name in served))
        if self.fault == "ends while it is sent them":
            raise ServerError("no answer")
        self.version = version
        is_kept = {"keeps its own": True, "keeps the change": version != PROOF_VERSION}.get(self.fault, False)
        if not is_kept:
            self.model.load_state_dict(present)

    def generate(self, prompt: list[int], *, max_tokens: int, **_: Any) -> GenerateResponse:
        if self.fault == "ends while it is asked" and self.version == PROOF_VERSION:
            raise ServerError("no answer")
        version = 9 if self.fault == "wrong version" else self.version
        return answer(prompt, *sampled(partial(next_logprobs, self.model), prompt, max_tokens), version)


@pytest.mark.parametrize(
    ("fault", "stage", "what"),
    [
        ("", "", ""),
        ("keeps its own", "(synthetic change)", UNSEEN),
        ("keeps the change", "(change undone)", STALE),
        ("wrong version", ": version", ""),
        # a run with other servers goes on with the trainer's weights
        ("ends while it is sent them", "", ""),
        ("ends while it is asked", "", ""),
    ],
)
def test_weight_change_faults_are_caught_and_named(fault: str, stage: str, what: str) -> None:
    model = random_model("qwen2").float().eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    server: Any = Receiver(model, fault)
    refused = nullcontext() if not fault else pytest.raises(ServerError if "ends" in fault else BridgeError)
    with refused as error:
        found = Proof(model, server).prove(INFO, WeightChange(model, 3, server.sending))
        assert server.had_change == [True, True] and server.version == 3
        assert max(found.noise, found.synthetic, found.restored) < 1e-4 < 0.004 <= found.synthetic_moved
    if error is not None and "ends" not in fault:
        assert error.value.field.endswith(stage) and what in error.value.summary
    if "ends" in fault:  # the last: sent as they were
        assert server.had_change == ([True, False] if "sent" in fault else [True, True])
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
