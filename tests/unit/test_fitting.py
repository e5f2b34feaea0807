"""Which layers are compiled and recomputed: decided from memory, and without a trace in what is learnt."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from grpo_trainer.config.bridge import LoraOnly
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model import compiled, fitting
from grpo_trainer.model.activations import Kept, LayerMemory, Recomputation, measure
from grpo_trainer.model.compiled import compile_layers
from grpo_trainer.model.forward import Forward, build_forward
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.trainer import Trainer
from tests.unit.factories import TinyModel
from tests.unit.test_packing import gradients, one_step, settings, tiny
from tests.unit.test_trainer import EVERYTHING, assert_same, full_rollouts
from tests.unit.tiny_lora import fill_b, tiny_lora, tiny_qwen


def test_recomputed_layers_by_hand() -> None:
    # 10 layers; a token keeps 100 bytes in each, 10 if only the layer's input is kept; 50 bytes whatever the tokens.
    # And 5 bytes in each whatever the tokens, if all is kept.
    memory = LayerMemory(10, {Kept.ALL: 100, Kept.INPUT: 10}, {Kept.ALL: 5, Kept.INPUT: 0})
    # Nothing recomputed: 10 x (4 x 100 + 5), and 4 x 100 of gradients: 4450
    assert memory.needed(4, Recomputation()) == 4450
    # 3 recomputed: 7 x 405 + 3 x 40 + 400 = 3355; 9: 9 x 40 + 405 + 400 = 1165, and all of them 1205
    assert memory.needed(4, Recomputation(3)) == 3355
    assert memory.needed(4, Recomputation(9)) == 1165 and memory.needed(4, Recomputation(10)) == 1205
    plans = [memory.plan(4, free) for free in (4450, 4449, 3355, 1165, 3)]
    assert plans == [Recomputation(count) for count in (0, 1, 3, 9, 10)]


def test_layers_keep_as_much_as_fits_by_hand() -> None:
    kept = {Kept.ALL: 100, Kept.PRODUCTS: 60, Kept.NARROW: 20, Kept.INPUT: 10}
    memory = LayerMemory(layers=4, token_bytes=kept)
    # 2 keep products, 2 all: 2 x 60 + 2 x 100 + 100 = 420. All keep products: 4 x 60 and, of the one that is at work,
    # what it lacked and gradients: 2 x 100. 3 narrow and 1 products: 3 x 20 + 60 + 200. 1 input, 3 narrow: 70 + 200.
    for plan, needed in {
        Recomputation(2, Kept.PRODUCTS, Kept.ALL): 420,
        Recomputation(4, Kept.PRODUCTS, Kept.ALL): 440,
        Recomputation(3, Kept.NARROW, Kept.PRODUCTS): 320,
        Recomputation(1, Kept.INPUT, Kept.NARROW): 270,
    }.items():
        assert memory.needed(1, plan) == needed
    plans = [memory.plan(1, free) for free in (500, 460, 420, 379, 320, 270, 0)]
    assert plans == [
        Recomputation(0, Kept.PRODUCTS, Kept.ALL),
        Recomputation(1, Kept.PRODUCTS, Kept.ALL),
        Recomputation(2, Kept.PRODUCTS, Kept.ALL),
        Recomputation(2, Kept.NARROW, Kept.PRODUCTS),  # 3 that keep products, 1 all: 380; this: 2 x 20 + 2 x 60 + 200
        Recomputation(3, Kept.NARROW, Kept.PRODUCTS),
        Recomputation(1, Kept.INPUT, Kept.NARROW),
        Recomputation(4),
    ]


@given(
    kept=st.lists(st.integers(1, 1000), min_size=2, max_size=4),
    layers=st.integers(1, 12),
    tokens=st.integers(1, 100),
    share=st.floats(0, 1.2),
)
def test_a_plan_fits_if_any_does_and_less_memory_never_means_less_work(
    kept: list[int], layers: int, tokens: int, share: float
) -> None:
    levels = [Kept.ALL, *([Kept.PRODUCTS, Kept.NARROW][: len(kept) - 2]), Kept.INPUT]
    memory = LayerMemory(layers, dict(zip(levels, sorted(kept, reverse=True), strict=True)))
    most, least = (memory.needed(tokens, plan) for plan in (Recomputation(), Recomputation(layers)))
    plan = memory.plan(tokens, share * most)
    assert memory.needed(tokens, plan) <= max(share * most, least)
    work = sum(plan.of(layer) for layer in range(layers))
    less = memory.plan(tokens, 0.9 * share * most)
    assert sum(less.of(layer) for layer in range(layers)) >= work


class Keeper(nn.Module):
    """Keeps 48 bytes a token, and 400 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.table = torch.ones(100, requires_grad=True)

    def run(self, tokens: int) -> torch.Tensor:
        rows = torch.ones(tokens, 3) * self.weight  # keeps the ones: 12 bytes a token
        twice = rows.exp() * rows.detach().clone()  # keeps exp's result and the clone: 24 bytes a token
        return twice.exp().sum() + (self.table + 0).square().sum()  # 12 bytes a token; and 400 of the table


def fitting_of(forward: Forward) -> fitting.Fitting:
    """Of a model on the CPU, whose memory is not counted."""
    layers = fitting.decoder_list(forward)
    assert layers is not None
    return fitting.Fitting(forward, layers, settings(packing="on"), [])


def test_what_is_kept_is_measured() -> None:
    keeper = Keeper()
    assert measure(keeper, keeper.run) == (48, 400)


def test_a_models_layers_keep_what_their_shapes_say() -> None:
    """fp32, hidden 32, 4 heads of 8 (2 for keys and values), inner 64."""
    model = tiny_qwen().requires_grad_(True)
    forward = build_forward(model, settings(packing="on"))
    token_bytes = measure(model, fitting_of(forward).run)[0] / 2
    # A norm keeps its input, its scale and its result (x 2); q, k, v, rotated, and attention's result; gate, its
    # sigmoid, up, product: about 4 x (6 x 32 + 2 x (32 + 2 x 16) + 32 + 4 x 64) = 2432 bytes, give or take copies.
    assert 0.7 * 2432 < token_bytes < 1.5 * 2432


def test_inputs_of_layers_are_as_wide_as_they_are() -> None:
    """Embeddings of fp32 weights are fp32, in whatever the layers compute."""
    for dtype, nbytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        model: Any = tiny_qwen()
        model.to(dtype)
        forward = build_forward(model, settings(packing="on"))
        tried = fitting_of(forward)
        assert fitting.input_bytes(tried.layers, tried.run) == nbytes * tried.head.weight.shape[1]


# ---------------------------------------------------------------- what follows from it


class Gpu:
    """What `fit` asks of a GPU, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float, allocated: float = 0.0) -> None:
        monkeypatch.setattr(fitting, "on_gpu", lambda _: True)
        monkeypatch.setattr(fitting, "free_bytes", lambda _: free)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated)


def fitted(config: TrainConfig, model: nn.Module | None = None) -> Forward:
    model = tiny_qwen(depth=4).requires_grad_(True) if model is None else model
    forward = build_forward(model, config)
    fitting.fit(forward, config, [p for p in model.parameters() if p.requires_grad])
    return forward


def flags(forward: Forward) -> list[bool]:
    layers = fitting.decoder_list(forward)
    assert layers is not None
    return [bool(layer.gradient_checkpointing) for layer in layers]


def test_as_few_layers_as_memory_allows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(checkpointing=None)
    counts = []
    for free in (1e9, 35e6, 28e6, 20e6, 1e5):
        Gpu(monkeypatch, free)
        forward = fitted(config)
        count = forward.recomputation.count
        counts.append(count)
        assert flags(forward) == [number < count for number in range(4)]
        assert (forward.plan.kept_bytes > 0) == (count == 0)
    assert counts[0] == 0 and counts[-1] == 4 and counts == sorted(counts) and len(set(counts)) > 2
    assert "lower --max-tokens-per-microbatch" in caplog.text


def test_a_limit_counts_what_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 1e9, allocated=0.49e9)
    assert fitted(settings(checkpointing=None, trainer_memory_gb=10.0)).recomputation.count == 0
    assert fitted(settings(checkpointing=None, trainer_memory_gb=0.5)).recomputation.count > 0


def test_what_was_asked_for_is_done() -> None:
    assert flags(fitted(settings(checkpointing=True))) == [True] * 4
    assert flags(fitted(settings(checkpointing=False))) == [False] * 4
    assert flags(fitted(settings(checkpointing=None))) == [False] * 4  # on a CPU
    assert flags(fitted(settings(checkpointing=None, activation_offload=True))) == [True] * 4
    assert fitted(settings(), TinyModel()).recomputation.count == 0


def test_states_gradients_and_master_weights_are_counted() -> None:
    weights = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))]

    def held(optimizer: str, *, master: bool = False, grad_dtype: str = "weights") -> float:
        config = TrainConfig.model_validate(
            {
                "model": ModelConfig(name="tiny"),
                "optimizer": {"optimizer": optimizer},
                "compute": {"grad_dtype": grad_dtype},
                "bridge": {"mode": "shared_vllm", "master_weights": master},
            }
        )
        return fitting.held_later(weights, config)

    # 1000 weights: gradients 2 bytes each; states 8, or 2 and a scale of 4 bytes for each 256
    assert held("adamw") == 10_000 and held("adafactor") == 2000
    assert held("adamw_8bit") == 1000 * (2 + 2 + 2 * 4 / 256)
    assert held("adamw", master=True, grad_dtype="float32") == 1000 * (4 + 8 + 4)


def test_offloaded_and_recomputed_steps_are_the_same() -> None:
    base = tiny("qwen2")
    wanted = one_step(copy.deepcopy(base), settings(packing="on"))
    for offload, checkpointing in ((True, None), (False, True)):
        config = settings(packing="on", activation_offload=offload, checkpointing=checkpointing)
        assert_same(wanted, one_step(copy.deepcopy(base), config))


def test_dropout_of_an_adapter_is_the_same_when_recomputed() -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_lora(dropout=0.5)
        fill_b(model)
        torch.manual_seed(5)
        results.append(one_step(model, settings(packing="on", checkpointing=checkpointing)))
    assert_same(*results)


# ---------------------------------------------------------------- compiled


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch's compiler but for its code generator; counts graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_steps_are_the_same(checkpointing: bool, graphs: Any) -> None:
    base = tiny("qwen2", num_hidden_layers=3)
    packed = {"packing": "on", "max_tokens_per_microbatch": 40, "checkpointing": checkpointing}
    wanted = one_step(copy.deepcopy(base), settings(**packed))
    config = settings(**packed, compile="on")
    model = copy.deepcopy(base)
    assert_same(wanted, one_step(model, config))
    # one for all layers and lengths; two of the head; two of adamw's arithmetic are not, weights being fp32
    assert graphs["unique_graphs"] == 3
    assert not counters["graph_break"]
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    assert graphs["unique_graphs"] == 3  # what is no step of training is not compiled


LEVELS = [
    Recomputation(1, Kept.PRODUCTS),
    Recomputation(2, Kept.INPUT, Kept.NARROW),
    Recomputation(1, Kept.NARROW, Kept.PRODUCTS),
]


@pytest.mark.parametrize("plan", LEVELS, ids=str)
def test_whatever_compiled_layers_keep_the_step_is_the_same(
    plan: Recomputation, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny("qwen2", num_hidden_layers=3)
    packed = {"packing": "on", "max_tokens_per_microbatch": 40, "checkpointing": None}
    wanted = one_step(copy.deepcopy(base), settings(**packed))
    Gpu(monkeypatch, 1e9)
    monkeypatch.setattr(LayerMemory, "plan", lambda *_: plan)
    trainer = Trainer(copy.deepcopy(base), settings(**packed, compile="on"))
    assert_same(wanted, (reduce(trainer.step(full_rollouts(), 0).metrics), gradients(trainer)))
    assert trainer.forward.compiled is not None
    assert trainer.forward.recomputation == plan == trainer.forward.compiled.plan
    assert not counters["graph_break"]
    # of layers: all kept, for the trial; one for each other level, of which those between are measured at the most
    assert graphs["unique_graphs"] <= 2 + 1 + len({plan.less, plan.more, Kept.PRODUCTS, Kept.NARROW} - {Kept.ALL})


def test_what_compiled_layers_keep_is_what_they_are_told_to(graphs: Any) -> None:
    """fp32, hidden 32, 4 heads of 8 (2 for keys and values), inner 64; 4 bytes of each."""
    totals = {kept: [] for kept in Kept}
    for depth in (2, 3):
        forward = build_forward(tiny_qwen(depth=depth).requires_grad_(True), settings(packing="on"))
        tried = fitting_of(forward)
        forward.compiled = compile_layers(tried.layers, tried.trial)
        assert forward.compiled is not None
        for kept, found in totals.items():
            forward.compiled.plan = Recomputation(depth, kept)
            with forward.learning():
                found.append(measure(forward.model, tried.run)[0])
    a_layer = {kept: more - less for kept, (less, more) in totals.items()}
    # The input (32); q, k, v (32, 16, 16), attention (32, and 4 normalisers), o (32), gate and up (2 x 64): not down's
    # result, nobody's to keep. The MLP's inner ones are wider than the hidden state.
    assert a_layer[Kept.PRODUCTS] == 4 * (32 + 64 + 36 + 32 + 128)
    assert a_layer[Kept.NARROW] == 4 * (32 + 64 + 36 + 32)
    assert a_layer[Kept.INPUT] == 4 * 32
    assert a_layer[Kept.ALL] > 1.2 * a_layer[Kept.PRODUCTS]


def test_memory_decides_what_compiled_layers_keep(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for free in (1e9, 33e6, 30e6, 27e6, 1e5):
        Gpu(monkeypatch, free)
        forward = fitted(settings(checkpointing=None, packing="on", compile="on"))
        assert forward.compiled is not None and forward.compiled.plan == forward.recomputation
        assert flags(forward) == [False] * 4
        plans.append(forward.recomputation)
    work = [sum(plan.of(layer) for layer in range(4)) for plan in plans]
    assert work[0] == 0 and work[-1] == 4 * Kept.INPUT and work == sorted(work) and len(set(work)) >= 3


def test_compiled_adapters_every_loss_term(graphs: Any) -> None:
    results = []
    for choice in ("off", "on"):
        model = add_adapter(tiny_qwen(), LoraOnly(mode="lora_only", r=8), seed=0)
        fill_b(model)
        config = settings(packing="on", loss={"loss": "grpo", **EVERYTHING}, compile=choice, checkpointing=False)
        results.append(one_step(model, config))
    assert_same(*results)
    # layers: the first, whose input has no gradient, the others, and both without gradient and adapter; head: two
    assert graphs["unique_graphs"] <= 6


def test_what_torch_cant_compile_is_trained_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("uncompilable\nand more")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    torch._dynamo.reset()
    base = tiny("qwen2")
    wanted = one_step(copy.deepcopy(base), settings())
    with caplog.at_level(logging.WARNING):
        trainer = Trainer(base, settings(compile="on"))
    (warned,) = [record for record in caplog.records if "uncompilable" in str(record.args)]
    assert warned.levelname == "WARNING"
    assert not trainer.forward.plan.is_compiled
    assert_same(wanted, one_step(base, settings()))


def test_what_is_cast_in_a_graph_is_not_kept_by_layers_that_compute_it_again(graphs: Any) -> None:
    """Weights in fp32 that compute in bfloat16, as mode `none` has them."""
    model = tiny_qwen(depth=2).requires_grad_(True)
    forward = build_forward(model, settings(packing="on"))
    tried = fitting_of(forward)

    def cast(tokens: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tried.run(tokens)

    forward.compiled = compile_layers(tried.layers, lambda: cast(64))
    assert forward.compiled is not None
    fixed = {}
    for kept in (Kept.ALL, Kept.PRODUCTS, Kept.INPUT):
        assert forward.compiled.try_out(Recomputation(2, kept), lambda: cast(64)) is None
        with forward.learning():
            fixed[kept] = measure(forward.model, cast)[1]
    # q 32 x 32, k and v 32 x 16, o 32 x 32, three of 32 x 64: 9,216 weights of 2 bytes in each of two layers
    assert fixed[Kept.ALL] > 2 * 2 * 9216
    assert fixed[Kept.PRODUCTS] < 0.1 * fixed[Kept.ALL] and fixed[Kept.INPUT] < 0.1 * fixed[Kept.ALL]


def test_an_adapters_compiled_layers_compute_all_again(graphs: Any) -> None:
    results = []
    for choice, checkpointing in (("off", False), ("on", True)):
        model = add_adapter(tiny_qwen(), LoraOnly(mode="lora_only", r=8), seed=0)
        fill_b(model)
        config = settings(packing="on", compile=choice, checkpointing=checkpointing)
        trainer = Trainer(model, config)
        results.append((reduce(trainer.step(full_rollouts(), 0).metrics), gradients(trainer)))
    assert_same(*results)
    assert trainer.forward.compiled is not None and trainer.forward.compiled.plan == Recomputation(2)
    assert flags(trainer.forward) == [False, False]


def test_what_compiled_layers_cant_recompute_checkpoints_do(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("graphless")

    monkeypatch.setattr(compiled, "_recomputing", lambda _: broken)
    base = tiny("qwen2", num_hidden_layers=4)
    wanted = one_step(copy.deepcopy(base), settings(packing="on"))
    Gpu(monkeypatch, 1e5)
    config = settings(checkpointing=None, packing="on", compile="on")
    forward = fitted(config)
    warned = [record for record in caplog.records if "Unsupported: " in str(record.args)]  # as Dynamo says
    assert len({record.msg for record in warned}) == 2  # for what lies between all and the input, and for the input
    assert forward.recomputation == Recomputation(4) and flags(forward) == [True] * 4
    assert forward.compiled is not None and forward.compiled.plan == Recomputation()
    assert all(parameter.grad is None for parameter in forward.model.parameters())
    assert_same(wanted, one_step(copy.deepcopy(base), config))
    # And so if it was asked for: the layers stay compiled.
    asked = fitted(settings(checkpointing=True, packing="on", compile="on"))
    assert asked.compiled is not None and flags(asked) == [True] * 4
