"""The reference: other weights in the same modules, for the time of a forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import load_all_weights
from grpo_trainer.model.lora import add_adapter, save_adapter
from grpo_trainer.model.reference import AdapterOff, FrozenWeights, build_reference, check_room
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, sample
from tests.unit.tiny_lora import fill_b, save_tiny, tiny_lora, tiny_qwen

TOKENS = torch.tensor([[1, 2, 3, 4]])


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_compute_as_the_model_that_has_them(dtype: torch.dtype) -> None:
    frozen = tiny_qwen(seed=1)
    for parameter in frozen.parameters():
        parameter.copy_(parameter.to(dtype))  # what the copy can hold
    wanted = logits(frozen)
    model = tiny_qwen(seed=2)
    own, places = logits(model), [parameter.data_ptr() for parameter in model.parameters()]
    weights = {name: parameter.detach().to(dtype) for name, parameter in frozen.named_parameters()}
    reference = FrozenWeights(model, weights, list(model.model.layers))
    with reference.active():
        assert torch.equal(logits(model), wanted)
        assert torch.equal(model.lm_head.weight, frozen.lm_head.weight)  # also for who multiplies by it himself
    assert torch.equal(logits(model), own)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_a_forward_pass_that_fails_leaves_the_policys_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen()
    own, places = logits(model), [parameter.data_ptr() for parameter in model.parameters()]
    weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(model.model.layers[1].mlp, "forward", fail)
        with FrozenWeights(model, weights, list(model.model.layers)).active():
            logits(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert torch.equal(logits(model), own)


def test_without_its_adapter_a_model_is_the_base_and_what_was_accumulated_stays() -> None:
    model = tiny_lora()
    base = logits(model)
    fill_b(model)
    assert not torch.allclose(logits(model), base)
    model(input_ids=TOKENS).logits.sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [None if p.grad is None else p.grad.clone() for p in trained]
    with AdapterOff(model).active():
        assert torch.equal(logits(model), base)
    assert [p for p in model.parameters() if p.requires_grad] == trained
    assert all(
        p.grad is not None and b is not None and torch.equal(p.grad, b) for p, b in zip(trained, before, strict=True)
    )


def config(path: Path, **loss: object) -> TrainConfig:
    values = {"model_name": str(path), "device": "cpu", "lr": 1e-2, **loss}
    return TrainConfig.model_validate(values)


ROLLOUTS = batch(
    [sample([1, 2], [3, 4], 1.0), sample([1, 2], [5], 0.0)], [sample([1], [6], 1.0), sample([1], [7], 1.0)]
)


@pytest.mark.parametrize("options", [{"kl_beta": 0.1}, {"log_kl": True, "ref_offload": True}])
def test_where_all_weights_are_trained_it_is_the_model_that_the_run_began_with(
    tmp_path: Path, options: dict[str, object]
) -> None:
    settings = config(save_tiny(tmp_path), **options)
    trainer = Trainer(load_all_weights(settings), settings)
    kls = [reduce(trainer.step(ROLLOUTS, 0).metrics)["alignment/kl_reference"] for _ in range(3)]
    assert kls[0] == 0 < kls[1] < kls[2]
    resumed = load_all_weights(settings)
    nudge(resumed)
    again = reduce(Trainer(resumed, settings).step(ROLLOUTS, 0).metrics)["alignment/kl_reference"]
    assert again > 1e-4  # not from where this process began


@pytest.mark.parametrize(("reference", "first"), [("start", 0.0), ("base", None)])
def test_kl_reference_of_a_started_adapter(tmp_path: Path, reference: str, first: float | None) -> None:
    base, adapter = save_tiny(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    trained = tiny_lora()
    fill_b(trained)
    save_adapter(trained, adapter)
    given = {"model_name": str(base), "device": "cpu", "weight_bridge_mode": "lora_only", "lora_adapter": str(adapter)}
    settings = build(TrainConfig, given | {"kl_beta": 0.1, "kl_reference": reference, "lr": 1e-2})
    assert settings.weight_bridge_mode == "lora_only"
    trainer = Trainer(add_adapter(tiny_qwen(), settings, seed=5), settings)
    kls = [reduce(trainer.step(ROLLOUTS, 0).metrics)["alignment/kl_reference"] for _ in range(3)]
    if first is None:
        assert kls[0] > 1e-4
    else:
        assert kls[0] == first < kls[1] < kls[2]
    resumed = add_adapter(tiny_qwen(), settings, seed=5)
    nudge(resumed)
    again = reduce(Trainer(resumed, settings).step(ROLLOUTS, 0).metrics)["alignment/kl_reference"]
    assert again > 1e-4, "a resumed run keeps the reference of its start"


def test_there_is_none_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert build_reference(tiny_qwen(), config(tmp_path / "nowhere")) is None
    assert isinstance(build_reference(tiny_lora(), config(tmp_path / "nowhere", log_kl=True)), AdapterOff)


def test_a_penalty_pulls_the_policy_back(tmp_path: Path) -> None:
    """Without a spread of rewards there is the penalty alone."""
    settings = config(save_tiny(tmp_path), kl_beta=1.0, kl_estimator="k2")
    model = load_all_weights(settings)
    nudge(model)
    trainer = Trainer(model, settings)
    dull = batch([sample([1, 2], [3, 4], 1.0), sample([1, 2], [5, 6], 1.0)])
    losses = [reduce(trainer.step(dull, step).metrics)["loss/kl"] for step in range(5)]
    assert losses[-1] < 0.5 * losses[0]


def test_other_files_than_the_trained_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        build_reference(tiny_qwen(depth=3), config(save_tiny(tmp_path), log_kl=True))
    assert (refused.value.field, refused.value.got) == ("--model-name", str(tmp_path))


def test_a_copy_that_does_not_fit_is_refused_with_what_to_do() -> None:
    check_room(2**30, free=2**30)
    with pytest.raises(ConfigError) as refused:
        check_room(3 * 2**30, free=1.5 * 2**30)
    assert refused.value.field == "--kl-beta, --log-kl" and "--ref-offload" in refused.value.fix
    assert refused.value.got.startswith("1.5 GiB") and refused.value.wanted == "3.0 GiB"
