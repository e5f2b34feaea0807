"""The environment of `grpo bench loop`: lengths, prompts and scores of its groups."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from environments.peers.inference import Completion, Sampling
from environments.synthetic import SyntheticConfig, SyntheticEnv, draw_length
from environments.tokenizers import load_tokenizer
from grpo_trainer.bench.models import SHAPES, ensure_model


class Drawn(random.Random):
    """Draws these numbers."""

    def __init__(self, *numbers: float) -> None:
        self.random = iter(numbers).__next__  # pyright: ignore[reportAttributeAccessIssue]


def test_draw_length_is_geometric_together_with_the_end_token() -> None:
    # 1/2 of all tokens are the last, 1/10 are the end token: the limit ends 4/9 of the others, 1/2 = 9/10 * 5/9
    # P(length > 1) = 5/9 = 0.556, P(length > 2) = 25/81 = 0.309
    lengths = [draw_length(Drawn(1 - above), 2.0, 10) for above in (1.0, 0.56, 0.55, 0.31, 0.30)]
    assert lengths == [1, 1, 2, 2, 3]
    assert draw_length(Drawn(0.99), 1.0, 10) == 1  # each token is the last
    assert draw_length(Drawn(0.5), 1000.0, 10) > 10**6  # the end token alone is too frequent


class Answering:
    """A server whose completions have the lengths that they may have."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt_token_ids, sampling))
        length = sampling.max_tokens
        return [Completion(prompt_token_ids, [5] * length, [-0.5] * length, "", "length", 3)] * n

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise AssertionError("nobody teaches here")

    async def close(self) -> None: ...


def test_a_group_of_the_synthetic_environment(tmp_path: Path) -> None:
    ensure_model(SHAPES["tiny"], tmp_path / "m", torch.float32)
    server = Answering()
    config = SyntheticConfig(
        tokenizer_name="m", group_size=3, prompt_tokens=20, completion_mean=12, max_token_length=50
    )
    env = SyntheticEnv(config, server, load_tokenizer(str(tmp_path / "m")))

    async def scene() -> list[Any]:
        await env.setup()
        items = [next(env.items) for _ in range(400)]
        return [*[await env.collect_trajectories(item) for item in items], await env.evaluate()]

    *groups, evaluation = asyncio.run(scene())
    lengths = [sampling.max_tokens for _, sampling in server.asked]
    assert [[len(tokens) - 20 for tokens in group.tokens] for group in groups[:2]] == [lengths[:3], lengths[3:6]]
    assert groups[0].scores == [float(length % 2 == 0) for length in lengths[:3]]  # even lengths are paid for
    assert groups[0].policy_versions == [3, 3, 3]
    assert evaluation == {"accuracy": pytest.approx(sum(length % 2 == 0 for length in lengths[-3:]) / 3)}
    # the limit ends a token with p = (1/12 - 1/98) / (1 - 1/98) = 0.0739: mean (1 - (1 - p)^30) / p = 12.2
    assert (min(lengths), max(lengths)) == (1, 30) and 11 < sum(lengths) / len(lengths) < 13.4
    prompts = {tuple(prompt) for prompt, _ in server.asked}
    assert len(prompts) == 401 and {len(prompt) for prompt in prompts} == {20}
