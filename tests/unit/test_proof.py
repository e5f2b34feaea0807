"""The bridge proof against servers made of the same model, with faults planted in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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
    left_out,
    look_for_each_module,
    multiplied,
)
from grpo_trainer.alignment.drift import MARGIN_QUANTISED, drift_alarm
from grpo_trainer.alignment.probes import FAILED, computed_in_fp8
from grpo_trainer.alignment.proof import (
    BASE_MODEL,
    NOISE_LIMIT_QUANTISED,
    NOISE_MARGIN,
    OTHER_WEIGHTS,
    Change,
    Proof,
    Proved,
)
from grpo_trainer.config.options import build
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.launch.plan import server_process
from grpo_trainer.model.lora import use_few_kernels
from tests.unit.factories import bridge_info
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.protocol import BridgeInfo, GenerateResponse

INFO = msgspec.structs.replace(bridge_info(), device="cpu", dtype="float32", lora_dtype="float32", workers=[])

SCALING = 32 / 8
"""lora_alpha / r of the trainer."""


DRAFTS = 2
"""Forward passes that stand for one a token."""


def sampled(
    logprobs_of: Callable[[list[int]], Tensor],
    prompt: list[int],
    count: int,
    draw: torch.Generator | None = None,
) -> tuple[list[int], Any]:
    """Return tokens after a prompt, and the logprob of each.

    Each token is drawn from the logprobs `[token, V]` that it has after the draft before, at first the prompt's
    beginning. Each pass makes one more token a sample of the model; the first passes make the others nearly one.
    """
    tokens = [prompt[place % len(prompt)] for place in range(count)]
    for done in range(min(DRAFTS, count)):
        rows_NV = logprobs_of([*prompt, *tokens])[-count - 1 : -1]
        again = torch.multinomial(rows_NV[done:].exp(), 1, generator=draw)[:, 0].tolist()
        tokens = [*tokens[:done], *again]
    rows_NV = logprobs_of([*prompt, *tokens])[-count - 1 : -1]
    return tokens, [[{token: float(row_V[token])}] for token, row_V in zip(tokens, rows_NV, strict=True)]


def answer(prompt: list[int], tokens: list[int], logprobs: Any, version: int = 0, **fields: Any) -> GenerateResponse:
    """What a server says of tokens that it has sampled."""
    made: dict[str, Any] = {"text": [""], "prompt": None, "finish_reasons": ["length"], "model": "m"}
    made |= {"prompt_token_ids": prompt, "token_ids": [tokens], "logprobs": [logprobs], "policy_version": version}
    return GenerateResponse(**made | fields)


@torch.no_grad()
def next_logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Return the logprobs of what follows each token, `[token, V]`."""
    return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], -1)


SLOTS = 3
"""For adapters that are loaded at one time."""

BLOCK = 16
"""Tokens of a block of the stand-in's KV cache."""


class FakeServer:
    """Serves adapters by name from a separate model, and as version 1 an adapter of the name "whole".

    Args:
        fault: what it does wrong.
        scale: by which it multiplies adapters.
    """

    def __init__(
        self,
        trainer: PeftModel,
        fault: str = "",
        model: Any = None,
        scale: float = 1.0,
    ) -> None:
        self.trainer = trainer
        self.model = (tiny_lora() if model is None else model).eval()
        self.fault = fault
        self.scale = SCALING if fault == "scaled twice" else scale
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.unloaded: list[str] = []
        self.prefixes: dict[tuple[int, ...], Any] = {}

    def load(self, name: str) -> None:
        assert len(self.adapters) - len(self.unloaded) < SLOTS
        state = {key: value.clone() for key, value in get_peft_model_state_dict(self.trainer).items()}
        state = {key: value * self.scale if "lora_B" in key else value for key, value in state.items()}
        if self.fault.startswith("without "):
            part = self.fault.removeprefix("without ")
            assert any(part in key for key in state)
            state = {key: value * 0 if part in key and "lora_B" in key else value for key, value in state.items()}
        self.adapters[name] = state

    def generate(
        self, prompt: list[int], *, model: str | None, max_tokens: int, prompt_logprobs: int | None = None, **_: Any
    ) -> GenerateResponse:
        version, model = int(model is None), model or "whole"
        served = {
            "base served": None,
            "first adapter kept": next(iter(self.adapters)),
            "synthetic kept": next((name for name in self.adapters if "synthetic" in name), model),
        }.get(self.fault, model)  # fmt: skip
        zeros = {key: value * 0 for key, value in self.adapters[model].items()}
        set_peft_model_state_dict(self.model, zeros if served is None else self.adapters[served])
        logprobs_of = partial(self._logprobs, len(prompt) // BLOCK * BLOCK)
        tokens, logprobs = sampled(logprobs_of, prompt, max_tokens)
        if self.fault == "no numbers":
            logprobs = [[dict.fromkeys(each, float("nan")) for each in row] for row in logprobs]
        of_prompt: list[Any] | None = None
        if prompt_logprobs is not None:
            rows_TV = self._logprobs(0, prompt)
            of_prompt = [None, *({each: float(row_V[each])} for each, row_V in zip(prompt[1:], rows_TV, strict=False))]
        name = "policy-v9" if self.fault == "wrong name" else model
        return answer(prompt, tokens, logprobs, version, model=name, prompt_logprobs=of_prompt)

    @torch.no_grad()
    def _logprobs(self, cached: int, tokens: list[int]) -> Tensor:
        """As `next_logprobs`. A stale cache has keys and values of the first adapter that had this prompt's blocks."""
        prefix = None
        if self.fault == "stale prefix cache" and cached:
            key = tuple(tokens[:cached])
            if key not in self.prefixes:
                self.prefixes[key] = self.model(input_ids=torch.tensor([key]), use_cache=True).past_key_values
            prefix, tokens = copy.deepcopy(self.prefixes[key]), tokens[cached:]
        ids = torch.tensor([tokens])
        logits_TV = self.model(input_ids=ids, past_key_values=prefix, use_cache=bool(prefix)).logits[0]
        return torch.log_softmax(logits_TV, -1)

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


# ---------------------------------------------------------------- modules that a server lacks, among rounding errors

TOKENS = 279
MODULES = 200


def rounding(number: int) -> Tensor:
    """What one state of the trainer, a sum of effects, is rounded by."""
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(number))


def looked(
    sizes: Tensor, absent: tuple[int, ...] = (), seed: int = 0, outlier: float = 0.0, servers: float = 1.0
) -> Presence:
    """The findings for modules with effects of `sizes` rounding errors, if the server lacks those in `absent`, and if
    the trainer's whole pass has an `outlier` in one token. The server's rounding errors are `servers` times as large.
    """
    effects_MN = sizes[:, None] * torch.randn(MODULES, TOKENS, generator=torch.Generator().manual_seed(10_000 + seed))

    def logprobs(present_M: Tensor) -> Tensor:
        state = int((present_M * torch.arange(1, MODULES + 1)).sum())
        return present_M @ effects_MN + rounding(100_000 * seed + state)

    def logprobs_without(names: Sequence[str]) -> Tensor:
        whole_M, none_M = torch.ones(MODULES), functional.one_hot(torch.tensor(list(map(int, names))), MODULES)
        first = functional.one_hot(torch.tensor(3), TOKENS) * outlier
        return torch.stack([logprobs(whole_M) + first, *(logprobs(whole_M - each_M) for each_M in none_M)])

    served_M = torch.ones(MODULES)
    served_M[list(absent)] = 0.0
    server_N = served_M @ effects_MN + servers * rounding(-1 - seed)
    return look_for_each_module([str(number) for number in range(MODULES)], server_N, logprobs_without, at_once=7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.0, 0.1, 0.5, 3.0])
def test_presence_rounding_errors_are_no_missing_module(size: float, seed: int) -> None:
    """Effect and difference share them."""
    found = looked(torch.full((MODULES,), size), seed=seed)
    assert (found.wrong, found.seen) == ((), 0 if size < 1.0 else MODULES)


def test_presence_counts_no_module_that_it_would_not_find() -> None:
    """The server rounds less: what it lacks of an effect is not the rounding, here 1 of 1 + 0, 1 + 1/4 and 1 + 9."""
    sizes = torch.tensor([0.0, 0.5, 3.0]).repeat(MODULES // 3 + 1)[:MODULES]
    assert [looked(sizes, (absent,), servers=0.3).wrong != () for absent in range(3)] == [False, False, True]
    assert looked(sizes, servers=0.3).seen == len(sizes[2::3])


@pytest.mark.parametrize("outlier", [0.0, 60.0], ids=["normal errors", "one huge error"])
@pytest.mark.parametrize("absent", [(), (7,), (7, 90), (7, 90, 150)])
def test_presence_finds_effects_a_little_larger_than_rounding(absent: tuple[int, ...], outlier: float) -> None:
    """One token's error in the trainer's whole pass, which is in each effect, hides nothing and is no finding."""
    found = looked(torch.full((MODULES,), 4.0), absent, outlier=outlier)
    assert {int(name) for name, _ in found.wrong} == set(absent)
    assert all(served < 0.5 for _, served in found.wrong)


@pytest.mark.parametrize("rounding_errors", [0.0, 0.02])
def test_presence_finds_an_effect_on_few_tokens(rounding_errors: float) -> None:
    """As that of a mixture's expert."""
    effects_MN = torch.randn(MODULES, TOKENS, generator=torch.Generator().manual_seed(1))
    effects_MN[7] = 0.0
    effects_MN[7, :3] = torch.tensor([2.0, -3.0, 4.0])

    def logprobs_without(names: Sequence[str]) -> Tensor:
        rows = [torch.zeros(TOKENS), *(effects_MN[int(name)] for name in names)]
        return torch.stack([row + rounding_errors * rounding(number) for number, row in enumerate(rows)])

    server_N = effects_MN[7] + rounding_errors * rounding(-1)
    found = look_for_each_module([str(number) for number in range(MODULES)], server_N, logprobs_without, at_once=7)
    assert [name for name, _ in found.wrong] == ["7"]


@pytest.mark.parametrize("few_kernels", [False, True], ids=["PEFT's layers", "few kernels"])
@torch.no_grad()
def test_each_row_of_a_forward_pass_lacks_one_module(few_kernels: bool) -> None:
    model = tiny_lora().eval()
    fill_b(model)
    if few_kernels:
        assert use_few_kernels(model)
    layers = adapted_layers(model)
    modules = {name: layer.lora_B["default"].weight for name, layer in layers.items()}
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


# ---------------------------------------------------------------- a server in 8 bits


def trainer_of(**given: object) -> TrainConfig:
    return build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only", **given})


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
    kinds = ({}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "bfloat16"})
    assert [msgspec.structs.replace(INFO, **said).in_8_bits for said in kinds] == [False, True, True, False]
    coarse = of_a_run(quantization="fp8", kv_cache_dtype="fp8")
    words = server_words(coarse)
    assert coarse.server.in_8_bits
    assert words[words.index("--quantization") + 1] == words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--return-routed-experts" in server_words(trainer_of(routing_replay="server"))


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
    model, tokens = Model(), torch.tensor([[448.0, 17.0], [0.0, 34.0], [0.0, 0.0]])
    exact = [448.0 * 448 + 17 * 17, 34.0 * 17, 0.0]
    with torch.no_grad(), computed_in_fp8(model):
        # 448 is the greatest number of e4m3: the scale is 1. Three bits stay after the leading one, so 17 becomes 16.
        # The second token's scale is its own: 34 is its greatest number, which is exact.
        assert model.layer(tokens)[:, 0].tolist() == pytest.approx([448.0 * 448 + 16 * 16, 34.0 * 16, 0.0])
        for other in (model.lora_A, model.lm_head):
            assert other(tokens)[:, 0].tolist() == exact
    assert model.layer(tokens)[:, 0].tolist() == exact
    for dtype in (torch.bfloat16, torch.float16):  # no scale is 0 in 16 bits either
        with torch.no_grad(), computed_in_fp8(model.to(dtype)):
            assert not model.layer(torch.zeros(1, 2, dtype=dtype)).any()


def matrices(model: nn.Module) -> list[nn.Linear]:
    named = model.named_modules()
    return [each for name, each in named if isinstance(each, nn.Linear) and name.endswith("base_layer")]


def in_fp8(model: nn.Module, fault: bool) -> Any:
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


@pytest.mark.parametrize(
    ("said", "fault", "limit", "passes"),
    [
        ("fp8", False, None, True),
        # A model that moves far: its own logprobs in fp8 say how far its server may be off.
        ("fp8", False, 0.01, True),
        ("fp8", True, 0.01, False),
        ("awq", False, 0.01, False),
        # what the server does not say, and another fault
        (None, False, None, False),
        ("fp8", True, None, False),
    ],
)
def test_proof_measures_the_offset_of_8_bits_and_bounds_it(
    trainer: PeftModel,
    said: str | None,
    fault: bool,
    limit: float | None,
    passes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if limit is not None:
        monkeypatch.setattr(proof, "NOISE_LIMIT_QUANTISED", limit)
    info, server = msgspec.structs.replace(INFO, quantization=said), FakeServer(trainer, model=in_fp8(trainer, fault))
    if not passes:
        with pytest.raises(BridgeError) as caught:
            prove(trainer, server, info)
        assert caught.value.field.startswith(FAILED)
        return
    noise = prove(trainer, server, info).noise
    assert (limit or 1e-3) < noise < NOISE_LIMIT_QUANTISED  # more than rounding to 32 bits: the test shows something
    alarm = drift_alarm(trainer_of(quantization="fp8"), noise, trainer)
    assert alarm is not None and alarm.limit == pytest.approx(max(0.01, MARGIN_QUANTISED * noise))


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0, 4.0])
def test_proof_sees_a_wrong_scale_through_noise_of_a_quarter_of_a_nat(scale: float) -> None:
    """Without the comparison of scales each of the three wrong ones passes."""
    torch.manual_seed(0)
    info, trainer = msgspec.structs.replace(INFO, quantization="awq"), tiny_lora()
    noisy, random = copy.deepcopy(trainer), torch.Generator().manual_seed(100)
    with torch.no_grad():
        for layer in matrices(noisy):
            layer.weight.add_(0.3 * layer.weight.std() * torch.randn(layer.weight.shape, generator=random))
    server = FakeServer(trainer, model=noisy, scale=scale)
    if scale == 1.0:
        assert prove(trainer, server, info).noise > 0.2
        return
    with pytest.raises(BridgeError) as caught:
        prove(trainer, server, info)
    assert caught.value.field.startswith(FAILED)


@pytest.mark.parametrize(
    ("quantization", "fault", "passes"), [("fp8", False, True), ("fp8", True, False), ("awq", False, False)]
)
def test_proof_of_a_relaunched_server_in_fp8_allows_as_much(
    trainer: PeftModel, monkeypatch: pytest.MonkeyPatch, quantization: str, fault: bool, passes: bool
) -> None:
    monkeypatch.setattr(proof, "NOISE_LIMIT_QUANTISED", 0.01)
    info, server = (
        msgspec.structs.replace(INFO, quantization=quantization),
        FakeServer(trainer, model=in_fp8(trainer, fault)),
    )
    server.load("whole")
    made = Proof(trainer, server, "float32")  # pyright: ignore[reportArgumentType]
    if not passes:
        with pytest.raises(BridgeError):
            made.compare(info, Change(trainer, 1))
        return
    noise, allowed = made.compare(info, Change(trainer, 1))
    assert 0.01 < noise <= allowed
    again, allowed = made.compare(info, Change(trainer, 1))  # the second launch
    assert again <= allowed == pytest.approx(NOISE_MARGIN * noise)
