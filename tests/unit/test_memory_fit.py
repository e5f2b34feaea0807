"""Which layers are compiled and recomputed: decided from memory, and without a trace in what is learnt."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine import allocator, attention, fitting
from grpo_trainer.engine.allocator import shareable, with_segments
from grpo_trainer.engine.forward import Forward, build_forward
from grpo_trainer.engine.recompute import Kept, LayerMemory, Recomputation, known_layers, measure
from grpo_trainer.parallel.shards import is_sharded
from grpo_trainer.parallel.world import World
from tests.unit.factories import TinyModel
from tests.unit.test_packing import settings
from tests.unit.tiny_lora import tiny, tiny_qwen


@pytest.mark.parametrize(("architecture", "compiles"), [("qwen2", True), ("qwen3_5_text", False)])
def test_auto_compiles_attention_but_no_gated_delta_net(architecture: str, compiles: bool) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 4, "vocab_size": 1000}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    asked = {"training_steps": 20}
    assert fitting.is_compiled(settings(**asked), model, on_gpu=True) == compiles
    assert fitting.is_compiled(settings(**asked, compile="on"), model, on_gpu=True)
    assert not fitting.is_compiled(settings(training_steps=19), model, on_gpu=True)  # too short to be worth it


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
def test_plan_less_memory_is_no_less_work(kept: list[int], layers: int, tokens: int, share: float) -> None:
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
    layers = known_layers(forward.decoder)
    assert layers is not None
    return fitting.Fitting(forward, layers, settings(packing="on"), [])


def test_measure_counts_what_is_kept_and_frees_it() -> None:
    """`exp` keeps its own output: a hook that returned it would make a circle that nothing frees."""
    keeper = Keeper()
    assert measure(keeper, keeper.run) == (48, 400)
    model = nn.Linear(4, 4)
    made: list[weakref.ref[torch.Tensor]] = []

    def run(tokens: int) -> torch.Tensor:
        output = model(torch.ones(tokens, 4)).exp()
        made.append(weakref.ref(output))
        return output * 2

    measure(model, run)
    end = time.monotonic() + 30  # a thread that watches stacks may hold the frame for a moment
    while any(each() is not None for each in made) and time.monotonic() < end:
        time.sleep(0.01)
    assert [each() for each in made] == [None, None]


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
    layers = known_layers(forward.decoder)
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


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_warns_of_what_all_processes_find(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of memory, it warns for the process that lacks most: here another one, which lacks 7 GB."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(fitting, "reduced", lambda own, by: torch.full_like(own, 7e9))
    Gpu(monkeypatch, 1e9)
    options = attention.arguments
    deaf = {"shared_prompts": attention.NONE_SHARED}
    with caplog.at_level(logging.INFO):
        fitted(settings(packing="on", checkpointing=None))
        monkeypatch.setattr(attention, "arguments", lambda packed: {**options(packed), **deaf})
        build_forward(tiny("qwen2"), settings(packing="on"))
        assert not is_sharded(World(rank, 2), TrainConfig(model_name="tiny", sharding="full", kl_beta=0.1))
    said = [record.levelno for record in caplog.records for word in WARNED if word in record.getMessage()]
    assert said == [logging.WARNING if rank == 0 else logging.INFO] * len(WARNED)


WARNED = ("7.0 GB", "shared prompts", "--sharding full")


def test_fit_does_what_was_asked_for_and_a_limit_counts_what_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (True, False, None):  # on a CPU
        assert flags(fitted(settings(checkpointing=asked))) == [bool(asked)] * 4
    assert fitted(settings(), TinyModel()).recomputation.count == 0
    Gpu(monkeypatch, 1e9, allocated=0.49e9)
    assert fitted(settings(checkpointing=None, trainer_memory_gb=10.0)).recomputation.count == 0
    assert fitted(settings(checkpointing=None, trainer_memory_gb=0.5)).recomputation.count > 0


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        # 1000 weights: gradients 2 bytes each; states 8, or 2 and a scale of 4 bytes for each 256
        ({"optimizer": "adamw"}, 10_000),
        ({"optimizer": "adamw_8bit"}, 1000 * (2 + 2 + 2 * 4 / 256)),
        ({"optimizer": "adamw", "master_weights": True, "grad_dtype": "float32"}, 1000 * (4 + 8 + 4)),
    ],
)
def test_held_later_counts_states_gradients_and_master_weights(options: dict[str, Any], nbytes: float) -> None:
    weights = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))]
    shared = {"model_name": "tiny", "weight_bridge_mode": "shared_vllm"}
    assert fitting.held_later(weights, TrainConfig.model_validate(shared | options)) == nbytes


def test_fit_counts_memory_when_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    Gpu(monkeypatch, 1e9)
    monkeypatch.setattr(fitting, "free_bytes", lambda _: events.append("count") or 1e9)
    forward = build_forward(tiny_qwen(depth=2).requires_grad_(True), settings(checkpointing=None))
    trained = list(forward.model.parameters())
    fitting.fit(forward, settings(checkpointing=None), trained, lambda: events.append("wait"))
    assert events[0] == "wait" and "count" in events


# settings of torch's allocator of GPU memory ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expandable", "wanted"),
    [
        ("", True, "expandable_segments:True"),
        ("", False, "expandable_segments:False"),
        ("max_split_size_mb:64", True, "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:True,max_split_size_mb:64", False, "max_split_size_mb:64,expandable_segments:False"),
        ("max_split_size_mb:64, expandable_segments:True", False, "max_split_size_mb:64,expandable_segments:False"),
    ],
)
def test_allocator_keeps_other_settings(asked: str, expandable: bool, wanted: str) -> None:
    assert with_segments(asked, expandable=expandable) == wanted


def test_allocator_settings_last_while_a_thread_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setattr(allocator, "_set", lambda *, expandable: said.append(expandable))

    def allocate() -> None:
        with shareable():
            pass

    other = threading.Thread(target=allocate)
    with shareable():
        other.start()
        other.join(0.2)
        assert said == [False]
    other.join()
    assert said == [False, True, False, True]
