"""The environment of `grpo bench loop`: ``python -m environments.synthetic serve --env.tokenizer_name MODEL``.

It has no task. Prompts are random and of one length. Lengths of completions are geometric: each completion is a request
whose limit of tokens is drawn for it, so lengths are the same in every run of a seed, and no policy changes them. The
reward is the parity of the length. Everything else is an environment's normal work: `BaseEnv`, tokenizer, both clients.
"""

import asyncio
import math
import random
import string
from collections.abc import Sequence
from itertools import count
from typing import Any

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.items import Stream
from environments.peers.inference import Completion
from environments.trajectory import Message

SIGNS = string.ascii_letters + string.digits
"""Characters of prompts. Each is one token for the tokenizers of `grpo bench`; spaces are not."""


class SyntheticConfig(BaseEnvConfig):
    """Settings of the synthetic environment."""

    prompt_tokens: int = Field(default=256, ge=1, description="characters of a prompt, one token each for `bench`")
    completion_mean: float = Field(
        default=350.0, ge=1.0, description="mean length of completions in tokens, before truncation to max_token_length"
    )


class SyntheticEnv(BaseEnv[int, SyntheticConfig]):
    """Random prompts, random lengths, rewards by parity: it measures a run's speed and teaches nothing."""

    name = "synthetic"
    env_config_cls = SyntheticConfig

    async def setup(self) -> None:
        self.items = Stream(count(1))

    def prompt(self, item: int) -> str:
        """Return random characters that depend on item and seed."""
        return "".join(random.Random(f"{self.config.seed}/{item}").choices(SIGNS, k=self.config.prompt_tokens))

    async def complete(self, prompt: str | list[Message], n: int, **changes: Any) -> list[Completion]:
        """Return `n` answers. Each comes from a separate request, since a request has one limit of tokens."""
        token_ids = self.encode(prompt)
        room = self.config.max_token_length - len(token_ids)
        draw, mean, vocabulary = random.Random(str(prompt)), self.config.completion_mean, len(self.tokenizer)
        # A model with random weights samples all ids about equally often, so each token is the end token with
        # probability 1 / `vocabulary`. The limit ends a completion with the rest of 1 / `mean`, which is at most
        # `vocabulary`: so lengths are geometric with this mean.
        rest = max(1e-12, (1 / mean - 1 / vocabulary) / (1 - 1 / vocabulary))
        scale = math.log(1 - rest) if rest < 1 else -math.inf
        limits = [min(room, 1 + int(math.log(1 - draw.random()) / scale)) for _ in range(n)]
        requests = (self.server.generate(token_ids, 1, self.sampling(limit)) for limit in limits)
        return [completion for (completion,) in await asyncio.gather(*requests)]

    async def score_group(self, item: int, completions: Sequence[Completion]) -> list[float]:
        """Return 1.0 for an even number of tokens, else 0.0: rewards vary, and no policy learns them."""
        return [float(len(completion.token_ids) % 2 == 0) for completion in completions]


if __name__ == "__main__":
    SyntheticEnv.cli()
