"""Routing replay at the trainer: given experts are used, forwards and backwards, and wrong ones are noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from grpo_trainer.alignment.drift import DriftAlarm
from grpo_trainer.batch.microbatches import MicroBatch, split
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.forward import Forward, build_forward
from grpo_trainer.engine.routing import CHANGED, ROUTERS
from grpo_trainer.errors import ConfigError, DriftError
from grpo_trainer.rollouts.groups import RoutedExperts, Sample
from grpo_trainer.trainer import Trainer
from tests.golden.models import SIZES, random_model
from tests.unit.factories import batch, refusing, sample
from vllm_server.protocol.routed_experts import RoutedShape

KINDS = ["mixtral", "qwen2_moe", "qwen3_moe"]
PROMPT = [5, 9, 17, 3, 44, 8]


def forward_of(model: nn.Module, source: str, packing: str = "off", share: str = "off") -> Forward:
    options = {"model_name": "m", "dtype": "float32", "routing_replay": source}
    return build_forward(model, TrainConfig.model_validate({**options, "packing": packing, "share_prompts": share}))


def sequences(count: int = 3, length: int = 40) -> list[Sample]:
    """Completions of one prompt, of different lengths."""
    generator = np.random.default_rng(0)
    made = []
    for index in range(count):
        tokens = np.array([*PROMPT, *generator.integers(2, 90, length - 3 * index)])
        places = np.arange(len(PROMPT), len(tokens))
        made.append(Sample(tokens, places, rollout_logprobs=np.zeros(len(places), np.float32), version=1))
    return made


def choices(model: nn.Module, tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """What the model chooses for each token of one sequence alone, and in each layer."""
    found: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, ROUTERS)]
    handles = [router.register_forward_hook(lambda _, __, output: found.append(output[2])) for router in routers]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens)[None])
    for handle in handles:
        handle.remove()
    return torch.stack(found, 1).numpy().astype(np.uint8)


def with_experts(model: nn.Module, chosen: Sequence[Sample]) -> list[Sample]:
    rows = [choices(model, sequence.tokens_T) for sequence in chosen]
    shape = RoutedShape(rows[0].shape[1], *shape_of(model))
    return [replace(one, experts=RoutedExperts(shape, own)) for one, own in zip(chosen, rows, strict=True)]


def model_of(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return random_model(kind).float().eval()


def other_router(model: nn.Module) -> nn.Module:
    """The same model, whose routers choose otherwise."""
    other = copy.deepcopy(model)
    torch.manual_seed(7)
    for router in (module for module in other.modules() if isinstance(module, ROUTERS)):
        nn.init.normal_(router.weight, std=0.3)
    return other


def result(forward: Forward, microbatch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs, and the gradient of each parameter."""
    forward.model.zero_grad(set_to_none=True)
    with forward.learning():
        logprobs = forward.scores(microbatch).logprobs_N
        logprobs.square().sum().backward()
    return logprobs.detach(), {
        name: each.grad.clone() for name, each in forward.model.named_parameters() if each.grad is not None
    }


def assert_same(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], wanted[0], atol=1e-5, rtol=1e-5)
    assert got[1].keys() == wanted[1].keys()
    for name in wanted[1]:
        torch.testing.assert_close(got[1][name], wanted[1][name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_replay_of_its_own_choice_changes_nothing(kind: str, layout: str) -> None:
    """Through each layout of a microbatch."""
    model = model_of(kind)
    form = {"packing": "off" if layout == "padded" else "on", "share": "on" if layout == "shared" else "off"}
    plain, server = (forward_of(copy.deepcopy(model), source, **form) for source in ("off", "server"))
    chosen = with_experts(model, sequences())
    bare = [replace(one, experts=None) for one in chosen]
    (without,) = split(bare, 3, packed=plain.packed, shared=plain.shared)
    (given,) = split(chosen, 3, packed=plain.packed, shared=plain.shared)
    assert_same(result(server, given), result(plain, without))
    assert server.routing is not None
    assert server.routing.metrics()[CHANGED].value() == 0.0


def shape_of(model: nn.Module) -> tuple[int, int]:
    router = next(module for module in model.modules() if isinstance(module, ROUTERS))
    return int(router.top_k), int(router.num_experts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_given_choice_is_that_of_a_plain_pass_that_chose_it(kind: str, recomputes: bool) -> None:
    """The plain pass: the other experts' logits are -inf in the routers, which then choose by themselves.

    In float64: the embedding's gradients reach 160, and float32 rounds them by more than 1e-4 on some CPUs.
    """
    model = model_of(kind).double()
    model.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue] # the default one has no float64
    for router in (module for module in model.modules() if isinstance(module, ROUTERS)):
        setattr(router, "norm_topk_prob", True)  # noqa: B010
    (sequence,) = with_experts(other_router(model), sequences(1))
    (microbatch,) = split([sequence], 1)
    assert sequence.experts is not None
    plain = forward_of(forced(copy.deepcopy(model), sequence.experts.ids_TLK), "off")
    replayed = forward_of(model, "server")
    if recomputes:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    assert_same(result(replayed, microbatch), result(plain, replace(microbatch, experts_PLK=None)))
    assert replayed.routing is not None
    assert 0.1 < replayed.routing.metrics()[CHANGED].value() <= 1.0


def forced(model: nn.Module, ids_TLK: NDArray[np.unsignedinteger]) -> nn.Module:
    routers = [module for module in model.modules() if isinstance(module, ROUTERS)]
    for layer, router in enumerate(routers):
        allowed_TE = torch.zeros(len(ids_TLK), router.num_experts, dtype=torch.bool)
        allowed_TE.scatter_(1, torch.from_numpy(ids_TLK[:, layer].astype(np.int64)), True)

        def choose(hidden: Tensor, router: nn.Module = router, allowed_TE: Tensor = allowed_TE) -> tuple[Tensor, ...]:
            logits_TE = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)  # pyright: ignore
            if len(logits_TE) == len(allowed_TE):  # not a trial of `build_forward`
                logits_TE = logits_TE.masked_fill(~allowed_TE, -torch.inf)
            values, indices = logits_TE.softmax(-1).topk(router.top_k)  # pyright: ignore
            return logits_TE, values / values.sum(-1, keepdim=True), indices

        router.forward = choose  # pyright: ignore[reportAttributeAccessIssue]
    return model


Fault = Callable[[Sample, Sample], NDArray[np.unsignedinteger]]
FAULTS: dict[str, Fault] = {
    "another layer": lambda one, other: experts_of(one)[:, ::-1],
    "another request": lambda one, other: experts_of(other),
    "the token before": lambda one, other: np.roll(experts_of(one), 1, axis=0),
}
"""Whose experts a sequence gets, from itself and another one."""


def experts_of(sequence: Sample) -> NDArray[np.unsignedinteger]:
    assert sequence.experts is not None
    return sequence.experts.ids_TLK


def planted(fault: str, chosen: list[Sample]) -> list[Sample]:
    made = []
    for one, other in zip(chosen, chosen[::-1], strict=True):
        assert one.experts is not None
        made.append(replace(one, experts=RoutedExperts(one.experts.shape, FAULTS[fault](one, other))))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_experts_of_something_else_are_noticed(kind: str, fault: str) -> None:
    """Planted faults. Before that, experts of a slightly different router (the server's rounding) raise no alarm."""
    model = model_of(kind)
    forward = forward_of(model, "server")
    rounded = copy.deepcopy(model)
    for router in (module for module in rounded.modules() if isinstance(module, ROUTERS)):
        router.weight.data += 0.02 * router.weight.std() * torch.randn_like(router.weight)
    sound = with_experts(rounded, sequences())
    shape = RoutedShape(int(SIZES["num_hidden_layers"]), *shape_of(model))
    metrics = metrics_of(forward, sound)
    assert metrics[CHANGED].value() < 0.1
    DriftAlarm(0.1, "stop", "lora_only").check_routing(0, metrics, shape)
    metrics = metrics_of(forward, planted(fault, sound))
    with refusing(DriftError, "routed_experts"):
        DriftAlarm(0.1, "stop", "lora_only").check_routing(0, metrics, shape)


@pytest.mark.parametrize("fault", ["", "another layer"])
def test_trainer_stops_before_it_learns_with_experts_of_something_else(fault: str) -> None:
    model = model_of("mixtral")
    trainer = Trainer(model, TrainConfig(model_name="m", dtype="float32", routing_replay="server"))
    trainer.alarm = DriftAlarm(0.0, "stop", "lora_only")
    chosen = with_experts(model, sequences(2))
    chosen = planted(fault, chosen) if fault else chosen
    samples = [
        replace(sample(PROMPT, one.tokens_T[len(PROMPT) :].tolist(), float(number)), experts=one.experts)
        for number, one in enumerate(chosen)
    ]
    before = copy.deepcopy(model.state_dict())
    if not fault:
        assert trainer.step(batch(samples), 0).updated
        return
    with pytest.raises(DriftError):
        trainer.step(batch(samples), 0)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def metrics_of(forward: Forward, chosen: list[Sample]) -> dict:
    (microbatch,) = split(chosen, len(chosen))
    with torch.no_grad():
        forward.scores(microbatch)
    assert forward.routing is not None
    return forward.routing.metrics()


def test_other_passes_choose_by_themselves() -> None:
    """A proof of the bridge calls the model after a step, with other tokens."""
    model = model_of("mixtral")
    forward = forward_of(model, "server")
    chosen = with_experts(other_router(model), sequences())
    (microbatch,) = split(chosen, 3)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(input_ids=tokens).logits
    result(forward, microbatch)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, before)


def test_routing_replay_of_a_dense_model() -> None:
    with refusing(ConfigError, "--routing-replay", words=["qwen2"]):
        forward_of(random_model("qwen2"), "server")
