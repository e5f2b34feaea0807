"""Compiled layers, whatever they keep or compute again, make the same step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.engine import compiled
from grpo_trainer.engine.compiled import compile_layers, learn
from grpo_trainer.engine.fitting import compile_ahead
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.engine.recompute import Kept, LayerMemory, Recomputation, measure
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import build_without_weights
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.trainer import Trainer
from tests.conftest import counted_graphs
from tests.unit.test_memory_fit import Gpu, fitted, fitting_of, flags
from tests.unit.test_packing import gradients, one_step, settings, tiny
from tests.unit.test_trainer import EVERYTHING, assert_same, full_rollouts
from tests.unit.tiny_lora import fill_b, tiny_qwen

PACKED: dict[str, Any] = {"packing": "on", "max_tokens_per_microbatch": 40}
LORA = {"lora_r": 8, "lora_target_modules": "v_proj,down_proj"}
"""Few modules, since torch traces each for seconds."""


@pytest.fixture(scope="module")
def traced() -> Iterator[Any]:
    """Graphs with their backward passes. Tests on the same model share them, since each takes seconds to trace.

    torch first takes the layers' floats for symbols, which no graph here keeps, and then traces all again without.
    """
    with counted_graphs("aot_eager") as counted, dynamo_config.patch(specialize_float=True):
        yield counted


@pytest.mark.parametrize("plan", [Recomputation(2, Kept.INPUT, Kept.NARROW), Recomputation(2, Kept.PRODUCTS)], ids=str)
def test_whatever_compiled_layers_keep_the_step_is_the_same(
    plan: Recomputation, traced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_qwen(depth=3).requires_grad_(True)
    wanted = one_step(copy.deepcopy(base), settings(**PACKED, checkpointing=None))
    Gpu(monkeypatch, 1e9)
    monkeypatch.setattr(LayerMemory, "plan", lambda *_: plan)
    before = traced["unique_graphs"]
    trainer = Trainer(copy.deepcopy(base), settings(**PACKED, checkpointing=None, compile="on"))
    assert_same(wanted, (reduce(trainer.step(full_rollouts(), 0).metrics), gradients(trainer)))
    assert trainer.forward.compiled is not None
    assert trainer.forward.recomputation == plan == trainer.forward.compiled.plan
    assert not counters["graph_break"]
    # two of the head; of layers: all kept, for the trial; one for each other level, of which those between are measured
    levels = {plan.less, plan.more, Kept.PRODUCTS, Kept.NARROW} - {Kept.ALL}
    assert traced["unique_graphs"] - before <= 2 + 1 + len(levels)


def test_what_compiled_layers_keep_is_what_they_are_told_to(traced: Any) -> None:
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


def test_memory_decides_what_compiled_layers_keep(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for free in (1e9, 30e6, 1e5):
        Gpu(monkeypatch, free)
        forward = fitted(settings(checkpointing=None, packing="on", compile="on"))
        assert forward.compiled is not None and forward.compiled.plan == forward.recomputation
        assert flags(forward) == [False] * 4
        plans.append(forward.recomputation)
    work = [sum(plan.of(layer) for layer in range(4)) for plan in plans]
    assert work[0] == 0 and work[-1] == 4 * Kept.INPUT and work[0] < work[1] < work[2]


def test_what_is_cast_in_a_graph_is_not_kept_by_layers_that_compute_it_again(traced: Any) -> None:
    """Weights in fp32 that compute in bfloat16, as mode `none` has them."""
    model = tiny_qwen(depth=2).requires_grad_(True)
    forward = build_forward(model, settings(packing="on"))
    tried = fitting_of(forward)

    def cast(tokens: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tried.run(tokens)

    forward.compiled = compile_layers(tried.layers, lambda: learn(cast(64)))
    assert forward.compiled is not None
    fixed = {}
    for kept in (Kept.ALL, Kept.INPUT):
        assert forward.compiled.try_out(Recomputation(2, kept), lambda: learn(cast(64))) is None
        with forward.learning():
            fixed[kept] = measure(forward.model, cast)[1]
    # q 32 x 32, k and v 32 x 16, o 32 x 32, three of 32 x 64: 9,216 weights of 2 bytes in each of two layers
    assert fixed[Kept.ALL] > 2 * 2 * 9216
    assert fixed[Kept.INPUT] < 0.1 * fixed[Kept.ALL]


def test_an_adapters_compiled_layers_compute_all_again(graphs: Any) -> None:
    """With every term of the loss."""
    results, lora = [], BridgeConfig.model_validate({**LORA, "weight_bridge_mode": "lora_only"})
    for choice, checkpointing in (("off", False), ("on", True)):
        model = add_adapter(tiny_qwen(), lora, seed=0)
        fill_b(model)
        loss = {"loss": "grpo", **EVERYTHING}
        config = settings(packing="on", loss=loss, compile=choice, checkpointing=checkpointing)
        trainer = Trainer(model, config)
        results.append((reduce(trainer.step(full_rollouts(), 0).metrics), gradients(trainer)))
    assert_same(*results)
    assert trainer.forward.compiled is not None and trainer.forward.compiled.plan == Recomputation(2)
    assert flags(trainer.forward) == [False, False]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_steps_are_the_same(checkpointing: bool, graphs: Any) -> None:
    base = tiny("qwen2", num_hidden_layers=3)
    wanted = one_step(copy.deepcopy(base), settings(**PACKED, checkpointing=checkpointing))
    config = settings(**PACKED, checkpointing=checkpointing, compile="on")
    trainer = Trainer(model := copy.deepcopy(base), config)
    # before the first step: one for all layers and lengths; two of the head; none of adamw's, weights being fp32
    assert graphs["unique_graphs"] == 3
    assert all(parameter.grad is None for parameter in trainer.parameters)
    assert_same(wanted, (reduce(trainer.step(full_rollouts(), 0).metrics), gradients(trainer)))
    assert graphs["unique_graphs"] == 3
    assert not counters["graph_break"]
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    assert graphs["unique_graphs"] == 3  # what is no step of training is not compiled


def test_fit_of_what_torch_cant_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> Any:
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


def test_fit_where_checkpoints_do(
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


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only"])
def test_what_is_compiled_before_there_are_weights_serves_the_model(mode: str, graphs: Any) -> None:
    options = {**LORA, "share_base": True} if mode == "lora_only" else {}
    config = settings(**PACKED, compile="on", weight_bridge_mode=mode, **options)
    base = tiny("qwen2", num_hidden_layers=3)
    before = torch.get_rng_state()
    compile_ahead(config, build_without_weights(base.config, torch.float32, "sdpa", torch.device("cpu")))
    assert torch.equal(before, torch.get_rng_state())
    layers = graphs["unique_graphs"]
    assert layers == (2 if mode == "lora_only" else 1)  # the first one's input has no gradient under an adapter
    lora = BridgeConfig.model_validate(options) if mode == "lora_only" else None
    model = base if lora is None else add_adapter(base.requires_grad_(False), lora, seed=0)
    Trainer(model, config).step(full_rollouts(), 0)
    assert graphs["unique_graphs"] == layers + 2  # and the head


def test_nothing_is_compiled_ahead_where_nothing_is_to_be(graphs: Any) -> None:
    base = tiny("qwen2")
    skeleton = build_without_weights(base.config, torch.float32, "sdpa", torch.device("cpu"))
    compile_ahead(settings(packing="on", compile="off"), skeleton)
    compile_ahead(settings(packing="on", compile="auto"), skeleton)  # it is small, and on a CPU
    assert graphs["unique_graphs"] == 0
