"""The environment of `grpo bench loop`: ``python -m environments.synthetic_server serve --env.tokenizer_name MODEL``.

It has no task. Prompts are random and of one length; completions end at some of the vocabulary's token ids, so that a
model with random weights, which samples all ids about equally often, answers in lengths that are geometric; the reward
is the parity of the length. Everything else is what an environment costs: `BaseEnv`, tokenizer, both clients.
"""

import random
import string
from collections.abc import Sequence
from statistics import fmean

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.peers.inference import Completion, Sampling

SIGNS = string.ascii_letters + string.digits
"""What prompts are made of: a token each for the tokenizers of `grpo bench`, whose words they are; spaces are not."""


class SyntheticConfig(BaseEnvConfig):
    """Settings of the synthetic environment."""

    prompt_tokens: int = Field(default=256, ge=1, description="signs of a prompt, a token each for models of `bench`")
    completion_mean: float = Field(
        default=350.0, ge=1.0, description="mean length of completions in tokens, before max_token_length cuts them"
    )


def stop_token_ids(vocabulary: int, mean: float, eos: int) -> tuple[int, ...]:
    """Return ids that end a completion, so that its length is geometric where all ids are equally likely.

    Each token ends it with probability `ids / vocabulary`, so the mean length is `vocabulary / ids` tokens.

    Args:
        vocabulary: number of ids.
        mean: wanted mean length in tokens; one id is the least there is.
        eos: the id that the server stops at in any case; it is the first.
    """
    count = max(1, round(vocabulary / mean))
    return tuple((eos + place) % vocabulary for place in range(count))


class SyntheticEnv(BaseEnv[int, SyntheticConfig]):
    """Random prompts, random lengths, rewards by parity: measures a run, teaches nothing."""

    name = "synthetic"
    env_config_cls = SyntheticConfig

    async def setup(self) -> None:
        """Chooses the ids at which completions end."""
        self.items = 0
        eos = self.tokenizer.eos_token_id
        assert isinstance(eos, int), "the tokenizers of `grpo bench` have one"
        self.stops = stop_token_ids(len(self.tokenizer), self.config.completion_mean, eos)

    async def get_next_item(self) -> int:
        """The number of a prompt; each comes once."""
        self.items += 1
        return self.items

    def prompt(self, item: int) -> str:
        """Random signs, others for each item and seed."""
        return "".join(random.Random(f"{self.config.seed}/{item}").choices(SIGNS, k=self.config.prompt_tokens))

    def sampling(self, room: int) -> Sampling:
        """All ids at temperature 1 until one of those that end it, or until the room is used up."""
        return Sampling(max_tokens=room, stop_token_ids=self.stops)

    async def score_group(self, item: int, completions: Sequence[Completion]) -> list[float]:
        """1.0 for an even number of tokens, else 0.0: groups with a spread that no policy learns to keep."""
        return [float(len(completion.token_ids) % 2 == 0) for completion in completions]

    async def evaluate(self) -> dict[str, float]:
        """The mean reward of one more group."""
        completions = await self.complete(self.prompt(0), self.config.group_size)
        return {"accuracy": fmean(await self.score_group(0, completions))}


if __name__ == "__main__":
    SyntheticEnv.cli()
