"""The same distribution on both sides: a real server's logprobs and the trainer's, with top-p, top-k and min-p."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from environments.api import intake, wire
from environments.config import ServerConfig
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.batch.batching import prepare
from grpo_trainer.batch.microbatches import TrainingSequence, split
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.rollouts.decode import to_group
from grpo_trainer.rollouts.filter import misfit
from grpo_trainer.rollouts.types import Group, RolloutBatch
from tests.integration.serving import Serving, shared_server

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

EXACT = 1e-5  # nats a token; float32 on both sides
PROMPT = [21, 14, 21, 32]
PLAIN = Sampling(max_tokens=12)
CUT = {
    "top-p": Sampling(max_tokens=12, top_p=0.9),
    "top-k": Sampling(max_tokens=12, top_k=5),
    "min-p": Sampling(max_tokens=12, min_p=0.05),
    "top-p at 0.7": Sampling(max_tokens=12, top_p=0.9, temperature=0.7),
    "top-k at 0.7": Sampling(max_tokens=12, top_k=5, temperature=0.7),
    "min-p at 0.7": Sampling(max_tokens=12, min_p=0.05, temperature=0.7),
    "all at 0.7": Sampling(max_tokens=12, top_p=0.9, top_k=30, min_p=0.05, temperature=0.7),
}


@pytest.fixture
def server() -> Serving:
    return shared_server()


@pytest.fixture(scope="module")
def published() -> tuple[torch.nn.Module, dict[str, list[Completion]]]:
    """An adapter at the trainer, and completions of each way of sampling, which the engine batches."""
    server = shared_server()
    model, loaded = server.publish()

    async def all_of_them() -> list[list[Completion]]:
        client = InferenceClient(ServerConfig(base_url=server.url, model_name=loaded.adapter_name), patience=5.0)
        try:
            return await asyncio.gather(*(client.generate(PROMPT, 4, each) for each in [PLAIN, *CUT.values()]))
        finally:
            await client.close()

    return model, dict(zip(["plain", *CUT], asyncio.run(all_of_them()), strict=True))


@pytest.fixture
def model(published: tuple[torch.nn.Module, dict[str, list[Completion]]]) -> torch.nn.Module:
    return published[0]


@pytest.fixture
def sampled(published: tuple[torch.nn.Module, dict[str, list[Completion]]]) -> dict[str, list[Completion]]:
    return published[1]


def at_the_trainer(completions: Sequence[Completion]) -> Group:
    """The group, through the rollout API's own reading and packing."""
    data = scored_group([Trajectory.of(each, float(score)) for score, each in enumerate(completions)])
    kept = intake.read_one(wire.encode_group(data), wire.MSGPACK)
    return to_group(wire.decode(kept.payload, wire.PackedGroup, wire.MSGPACK))


def sequences(group: Group) -> tuple[TrainingSequence, ...]:
    assert misfit(group) is None
    return prepare(RolloutBatch("b", (group,)), LossConfig(), 64).sequences


def gaps(model: torch.nn.Module, chosen: Sequence[TrainingSequence]) -> torch.Tensor:
    """The trainer's logprobs minus the server's, token by token."""
    forward = build_forward(model, TrainConfig(model=ModelConfig(name="m", dtype="float32")))
    found = []
    with torch.no_grad():
        for sequence in chosen:
            (microbatch,) = split([sequence], 1, packed=forward.packed)
            found.append(forward.scores(microbatch).logprobs_N - microbatch.rollout_logprobs_N)
    return torch.cat(found)


@pytest.mark.parametrize("way", CUT)
def test_the_trainers_logprobs_are_the_servers(sampled: dict, model: torch.nn.Module, way: str) -> None:
    chosen = sequences(at_the_trainer(sampled[way]))
    assert len(chosen) == 4
    with_masks = gaps(model, chosen)
    assert float(with_masks.abs().max()) < EXACT

    # Without the masks each is off by the log of the kept mass, which the whole distribution gives.
    without = gaps(model, [replace(sequence, masks=None) for sequence in chosen])
    mass = torch.cat([kept_mass(model, sequence) for sequence in chosen])
    torch.testing.assert_close(without, mass.log(), atol=2 * EXACT, rtol=0)
    assert float(without.abs().mean()) > 100 * EXACT


def kept_mass(model: torch.nn.Module, sequence: TrainingSequence) -> torch.Tensor:
    """The probability of all kept tokens together, at each trained position."""
    assert sequence.masks is not None
    with torch.no_grad():
        logits = model(torch.from_numpy(sequence.tokens_T)[None]).logits[0].double() / sequence.temperature
    rows = logits.softmax(-1)[sequence.positions - 1]
    ends = np.cumsum(sequence.masks.counts_T)
    sets = np.split(sequence.masks.ids_M, ends[:-1])
    pairs = zip(rows, sets, strict=True)
    masses = [row[torch.from_numpy(ids).long()].sum() if len(ids) else row.sum() for row, ids in pairs]
    return torch.stack(masses).float()


def test_plain_sampling_has_no_masks(sampled: dict, model: torch.nn.Module, server: Serving) -> None:
    assert all(each.sampling_masks is None for each in sampled["plain"])
    chosen = sequences(at_the_trainer(sampled["plain"]))
    assert all(sequence.masks is None for sequence in chosen)
    assert float(gaps(model, chosen).abs().max()) < EXACT
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 2, "logprobs": 0, "sampling_masks": True}
    assert "sampling_masks" not in server.post("/generate", body).json()


def test_a_cut_request_that_asks_for_none_gets_none(server: Serving) -> None:
    """An environment of another project, whose answers stay as they were."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 2, "logprobs": 2, "top_k": 5, "n": 2}
    answer = server.post("/generate", body).json()
    assert "sampling_masks" not in answer
    assert all(1 <= len(position[0]) <= 3 for out in answer["logprobs"] for position in out)
    chat = {"prompt": "2+2=", "max_tokens": 2, "logprobs": 2, "top_k": 5, "model": str(server.model_folder)}
    assert server.post("/v1/completions", chat).status_code == 200


def test_the_masks_of_another_request_are_noticed(sampled: dict) -> None:
    """Planted fault: two completions of the same length have each other's masks."""
    first, second = sampled["top-k"][:2]
    assert len(first.token_ids) == len(second.token_ids) and first.token_ids != second.token_ids
    swapped = [
        replace(first, sampling_masks=second.sampling_masks),
        replace(second, sampling_masks=first.sampling_masks),
    ]
    problem = misfit(at_the_trainer(swapped))
    assert problem is not None and problem.field == "sequence 0: sampling_masks"


def test_kept_sets_are_those_that_the_parameters_say(sampled: dict) -> None:
    for way in ("top-k", "top-k at 0.7"):
        for sequence in sequences(at_the_trainer(sampled[way])):
            assert sequence.masks is not None and sequence.masks.counts_T.tolist() == [5] * len(sequence.positions)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stream": True}, "sampling_masks"),
        ({"logprobs": None}, "logprobs"),
    ],
)
def test_requests_whose_masks_would_not_help_are_refused(server: Serving, changes: dict, field: str) -> None:
    body = {"prompt": "1", "max_tokens": 2, "logprobs": 0, "top_p": 0.9, "sampling_masks": True}
    refusal = server.post("/generate", {key: value for key, value in (body | changes).items() if value is not None})
    assert refusal.status_code == 422 and refusal.json()["error"]["param"] == field


def test_the_server_says_that_it_gives_masks(server: Serving) -> None:
    assert all(worker["sampling_masks"] for worker in server.get("/bridge/info").json()["workers"])
