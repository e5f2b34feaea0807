"""Mixtures of experts on a real server: with the server's choice replayed, its logprobs are the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from environments.api import groups, wire
from environments.config import ServerConfig
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.batch.batching import prepare
from grpo_trainer.batch.microbatches import split
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.engine.routing import CHANGED
from grpo_trainer.rollouts.filter import misfit
from grpo_trainer.rollouts.groups import Group, RolloutBatch, to_group
from tests.golden.models import CONFIGS, SIZES
from tests.integration.serving import save_tiny_model, serve
from vllm_server.protocol.routed_experts import unpack

pytestmark = pytest.mark.timeout(400)

EXACT = 1e-5  # nats a token, float32 on both sides
PROMPTS = [[21, 14, 21, 32] * 9, [21, 14, 21, 32] * 9 + [7, 8, 9]]  # the second begins with the first; a block is 32
LAYERS = 4
TOKENS = 48
WAYS = [(kind, dtype) for kind in ("mixtral", "qwen3_moe") for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(way))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, str, list[Completion]]:
    """A model of near-ties, and completions of it, some of which the engine batches."""
    kind, dtype = request.param
    folder = tmp_path_factory.mktemp("moe")
    model = near_ties(kind, folder, getattr(torch, dtype))
    with mixture_server(folder, dtype, "--return-routed-experts") as url:
        return model, dtype, completions_of(url, folder)


def completions_of(url: str, folder: Path) -> list[Completion]:
    """Completions of a server of the model in `folder`."""

    async def sample() -> list[list[Completion]]:
        client = InferenceClient(ServerConfig(base_url=url, model_name=str(folder)), patience=5.0)
        try:
            sampling = Sampling(max_tokens=TOKENS)
            first = await asyncio.gather(*(client.generate(each, 4, sampling) for each in PROMPTS))
            return [*first, await client.generate(PROMPTS[1], 2, sampling)]  # a prompt from the cache
        finally:
            await client.close()

    return [each for some in asyncio.run(sample()) for each in some]


@contextmanager
def mixture_server(folder: Path, dtype: str, *flags: str) -> Iterator[str]:
    """A server of the model in `folder`; yields its URL."""
    limits = ["--max-model-len", "128", "--block-size", "32", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
    more = ["--dtype", dtype, "--logits-dtype", "float32"]
    with serve(folder, folder, *limits, *more, *flags) as server:
        yield server.url


def near_ties(kind: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A random model, saved in `folder`, whose routers prefer four experts of eight for a token, almost alike."""
    config_class, fields = CONFIGS[kind]
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "initializer_range": 0.1}
    sizes |= {key: 8 for key in ("num_local_experts", "num_experts") if key in fields}
    config = config_class(**SIZES | fields | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter[:2].repeat_interleave(4, 0) + 0.02 * parameter)
            if name.endswith("down_proj"):
                parameter.mul_(2.0)
    model = model.to(dtype).eval()
    save_tiny_model(folder)  # for its tokenizer
    model.save_pretrained(folder)
    return model


def at_the_trainer(completions: list[Completion]) -> Group:
    data = scored_group([Trajectory.of(each, float(score)) for score, each in enumerate(completions)])
    kept = groups.read(wire.encode_group(data), wire.MSGPACK)
    return to_group(wire.decode(kept.payload, wire.PackedGroup, wire.MSGPACK))


def gaps(model: nn.Module, dtype: Any, group: Group, replay: Any) -> tuple[Tensor, float]:
    """The trainer's logprobs minus the server's, token by token, and the share of experts that it would change."""
    config = TrainConfig(model_name="m", dtype=dtype, logits_dtype="float32", routing_replay=replay)
    forward = build_forward(model, config)
    chosen = prepare(RolloutBatch("b", (group,)), config, 128).sequences
    found, changed = [], []
    with torch.no_grad():
        for microbatch in split(chosen, 4, packed=forward.packed):
            moved = microbatch.to(next(model.parameters()).device)
            found.append((forward.scores(moved).logprobs_N - moved.rollout_logprobs_N).cpu())
            changed += [] if forward.routing is None else [forward.routing.metrics()[CHANGED].value()]
    return torch.cat(found), float(np.mean(changed)) if changed else 0.0


def test_the_trainer_computes_with_the_servers_experts(served: tuple[nn.Module, str, list[Completion]]) -> None:
    model, dtype, completions = served
    group = at_the_trainer(completions)
    shape, rows = unpack(completions[0].routed_experts or b"")
    assert (shape.layers, shape.top_k, shape.experts) == (LAYERS, 2, 8)
    assert len(rows) == shape.row_bytes * (len(PROMPTS[0]) + len(completions[0].token_ids) - 1)
    assert misfit(group, routed=shape) is None
    without, _ = gaps(model, dtype, group, "off")
    replayed, changed = gaps(model, dtype, group, "server")
    print(
        f"{type(model).__name__} {dtype}: mean gap {float(without.abs().mean()):.2e} without, "
        f"{float(replayed.abs().mean()):.2e} with replay (largest {float(replayed.abs().max()):.2e}); "
        f"{changed:.2%} of the experts changed; {shape.row_bytes} bytes a token"
    )
    if dtype == "float32":
        assert float(replayed.abs().max()) < EXACT and changed < 0.001
    else:
        assert float(replayed.abs().mean()) <= float(without.abs().mean()) / 3
        assert 0 < changed < 0.1
