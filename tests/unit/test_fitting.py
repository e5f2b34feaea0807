"""Which layers are compiled and recomputed: decided from memory, and without a trace in what is learnt."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from grpo_trainer.config.bridge import LoraOnly
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.model import fitting
from grpo_trainer.model.activations import LayerMemory, measure
from grpo_trainer.model.forward import Forward, build_forward
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.trainer import Trainer
from tests.unit.factories import TinyModel
from tests.unit.test_packing import one_step, settings, tiny
from tests.unit.test_trainer import EVERYTHING, assert_same
from tests.unit.tiny_lora import fill_b, tiny_lora, tiny_qwen


def test_recomputed_layers_by_hand() -> None:
    # 10 layers; a token keeps 100 bytes in each, 10 if only the layer's input is kept; 50 bytes whatever the tokens.
    memory = LayerMemory(layers=10, token_bytes=100, input_bytes=10, fixed_bytes=50)
    # Nothing recomputed: 50 + 4 x (10 x 100 + 100 of gradients) = 4450
    assert memory.needed(4, 0) == 4450
    # 3 recomputed: 50 + 4 x (7 x 100 + 3 x 10 + 100) = 3370; 9: 50 + 4 x (9 x 10 + 200) = 1210, and all of them 1250
    assert memory.needed(4, 3) == 3370 and memory.needed(4, 10) == 1250
    assert [memory.recomputed(4, free) for free in (4450, 4449, 3370, 1210, 3)] == [0, 1, 3, 9, 10]


class Keeper(nn.Module):
    """Two layers that keep 24 bytes a token each, and 400 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.table = torch.ones(100, requires_grad=True)

    def run(self, tokens: int) -> torch.Tensor:
        rows = torch.ones(tokens, 3) * self.weight  # keeps the ones: 12 bytes a token
        twice = rows.exp() * rows.detach().clone()  # keeps exp's result and the clone: 24 bytes a token
        return twice.exp().sum() + (self.table + 0).square().sum()  # 12 bytes a token; and 400 of the table


def test_what_is_kept_is_measured() -> None:
    keeper = Keeper()
    found = measure(keeper, layers=2, hidden_bytes=12, run=keeper.run)
    assert found.token_bytes == 24 and found.input_bytes == 12 and found.layers == 2
    assert found.fixed_bytes == 400


def test_a_models_layers_keep_what_their_shapes_say() -> None:
    """fp32, hidden 32, 4 heads of 8 (2 for keys and values), inner 64."""
    model = tiny_qwen().requires_grad_(True)
    forward = build_forward(model, settings(packing="on"))
    found = measure(model, 2, 128, fitting._runner(forward))
    # A norm keeps its input, its scale and its result (x 2); q, k, v, rotated, and attention's result; gate, its
    # sigmoid, up, product: about 4 x (6 x 32 + 2 x (32 + 2 x 16) + 32 + 4 x 64) = 2432 bytes, give or take copies.
    assert 0.7 * 2432 < found.token_bytes < 1.5 * 2432


def test_inputs_of_layers_are_as_wide_as_they_are() -> None:
    """Embeddings of fp32 weights are fp32, in whatever the layers compute."""
    for dtype, nbytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        model: Any = tiny_qwen()
        model.to(dtype)
        forward = build_forward(model, settings(packing="on"))
        layers = fitting.decoder_list(forward)
        assert layers is not None
        assert fitting.input_bytes(layers, fitting._runner(forward)) == nbytes * forward.head.weight.shape[1]  # type: ignore[union-attr]


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
        counts.append(forward.recomputed)
        assert flags(forward) == [number < forward.recomputed for number in range(4)]
        assert (forward.plan.kept_bytes > 0) == (forward.recomputed == 0)
    assert counts[0] == 0 and counts[-1] == 4 and counts == sorted(counts) and len(set(counts)) > 2
    assert "lower --max-tokens-per-microbatch" in caplog.text


def test_a_limit_counts_what_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 1e9, allocated=0.49e9)
    assert fitted(settings(checkpointing=None, trainer_memory_gb=10.0)).recomputed == 0
    assert fitted(settings(checkpointing=None, trainer_memory_gb=0.5)).recomputed > 0


def test_what_was_asked_for_is_done() -> None:
    assert flags(fitted(settings(checkpointing=True))) == [True] * 4
    assert flags(fitted(settings(checkpointing=False))) == [False] * 4
    assert flags(fitted(settings(checkpointing=None))) == [False] * 4  # on a CPU
    assert flags(fitted(settings(checkpointing=None, activation_offload=True))) == [True] * 4
    assert fitted(settings(), TinyModel()).recomputed == 0


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
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    torch._dynamo.reset()
    base = tiny("qwen2")
    wanted = one_step(copy.deepcopy(base), settings())
    with caplog.at_level(logging.WARNING):
        trainer = Trainer(base, settings(compile="on"))
    assert "decoder layers are not compiled" in caplog.text and "no compiler here" in caplog.text
    assert not trainer.forward.plan.is_compiled
    assert_same(wanted, one_step(base, settings()))
