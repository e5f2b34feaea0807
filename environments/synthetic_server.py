"""The environment of `grpo bench loop`: ``python -m environments.synthetic_server serve --env.tokenizer_name MODEL``.

It has no task. Prompts are random and of one length. Completions end at some of the vocabulary's token ids. A model
with random weights samples all ids about equally often, so completion lengths are geometric. The reward is the parity
of the length. Everything else is an environment's normal work: `BaseEnv`, tokenizer, both clients.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.peers.inference import Completion, Sampling

SIGNS = string.ascii_letters + string.digits
"""Characters of prompts. Each is one token for the tokenizers of `grpo bench`; spaces are not."""


class SyntheticConfig(BaseEnvConfig):
    """Settings of the synthetic environment."""

    prompt_tokens: int = Field(default=256, ge=1, description="characters of a prompt, one token each for `bench`")
    completion_mean: float = Field(
        default=350.0, ge=1.0, description="mean length of completions in tokens, before truncation to max_token_length"
    )


def stop_token_ids(vocabulary: int, mean: float, eos: int) -> tuple[int, ...]:
    """Return ids that end a completion. If all ids are equally likely, the completion's length is geometric.

    Each token ends it with probability `ids / vocabulary`, so the mean length is `vocabulary / ids` tokens.

    Args:
        vocabulary: number of ids.
        mean: wanted mean length in tokens; at least one id is returned.
        eos: the id at which the server always stops; it is the first.
    """
    count = max(1, round(vocabulary / mean))
    return tuple((eos + place) % vocabulary for place in range(count))


class SyntheticEnv(BaseEnv[int, SyntheticConfig]):
    """Random prompts, random lengths, rewards by parity: it measures a run's speed and teaches nothing."""

    name = "synthetic"
    env_config_cls = SyntheticConfig

    async def setup(self) -> None:
        """Choose the ids at which completions end."""
        self.items = count(1)
        eos = self.tokenizer.eos_token_id
        assert isinstance(eos, int), "the tokenizers of `grpo bench` have one"
        self.stops = stop_token_ids(len(self.tokenizer), self.config.completion_mean, eos)

    def prompt(self, item: int) -> str:
        """Return random characters that depend on item and seed."""
        return "".join(random.Random(f"{self.config.seed}/{item}").choices(SIGNS, k=self.config.prompt_tokens))

    def sampling(self, room: int) -> Sampling:
        """Return the common sampling, which also ends at the stop ids."""
        return replace(super().sampling(room), stop_token_ids=self.stops)

    async def score_group(self, item: int, completions: Sequence[Completion]) -> list[float]:
        """Return 1.0 for an even number of tokens, else 0.0: rewards vary, and no policy learns them."""
        return [float(len(completion.token_ids) % 2 == 0) for completion in completions]

    async def evaluate(self) -> dict[str, float]:
        """Return the mean reward of one more group."""
        completions = await self.complete(self.prompt(0), self.config.group_size)
        return {"accuracy": fmean(await self.score_group(0, completions))}


if __name__ == "__main__":
    SyntheticEnv.cli()
