"""The arithmetic environment: ``grpo env arithmetic serve --env.tokenizer_name MODEL``.

It needs no data set and no download, so a whole training run works on a machine without a network. Its reward is exact:
1 for the right number and nothing else, 0 otherwise. A fixed split divides the problems into a training and an
evaluation part.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from statistics import fmean
from typing import Literal

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ConfigError
from environments.items import Shuffled
from environments.peers.inference import Sampling
from environments.running.evaluation import examine_each

Operation = Literal["+", "-", "*"]

COMPUTE: dict[Operation, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
SPLIT_SEED = 20240203
"""A constant of the task and not of a run: a problem that any run trains on is never held out in another."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One exercise, such as ``12+34=``."""

    left: int
    right: int
    operation: Operation = "+"

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.operation}{self.right}="

    @property
    def answer(self) -> str:
        return str(COMPUTE[self.operation](self.left, self.right))


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """All problems of one operand range and operation, in two disjoint parts."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    @classmethod
    def of(cls, low: int, high: int, operation: Operation = "+", held_out_share: float = 0.1) -> "ProblemSet":
        """Return every pair of operands in ``[low, high]``, with a fixed pseudo-random share held out.

        Raise a ConfigError if the range is too small to leave a problem in each part.
        """
        operands = range(low, high + 1)
        problems = [Problem(left, right, operation) for left in operands for right in operands]
        random.Random(SPLIT_SEED).shuffle(problems)
        cut = round(len(problems) * held_out_share)
        if not 0 < cut < len(problems):
            raise ConfigError(
                field="low, high",
                got=f"{low} to {high}, which has {len(problems)} problems",
                wanted=f"enough problems for a training part and a held-out share of {held_out_share}",
            )
        return cls(train=tuple(problems[cut:]), held_out=tuple(problems[:cut]))


def reward(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion is exactly the answer (apart from surrounding white space), else 0.0."""
    return float(completion.strip() == problem.answer)


class ArithmeticConfig(BaseEnvConfig):
    """Settings of the arithmetic environment."""

    low: int = Field(default=10, description="smallest operand")
    high: int = Field(default=49, description="largest operand")
    operation: Operation = Field(default="+", description="arithmetic operation")
    max_tokens: int | None = Field(
        default=None, ge=1, description="longest answer in tokens; unset: what the longest number needs, plus one"
    )
    eval_samples: int = Field(default=4, ge=1, description="samples per held-out problem in an evaluation")


class ArithmeticEnv(BaseEnv[Problem, ArithmeticConfig]):
    """Sums of two numbers, such as 12+34=. With one token per digit, a model learns them on two cores."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    score_in_thread = False

    async def setup(self) -> None:
        config = self.config
        self.problems = ProblemSet.of(config.low, config.high, config.operation)
        longest = max(len(problem.answer) for problem in self.problems.train + self.problems.held_out)
        # The number, its end token, and one more token that reveals a longer answer.
        self.max_tokens = config.max_tokens or longest + 2
        self.items = Shuffled(self.problems.train, config.seed)

    def prompt(self, item: Problem) -> str:
        return item.prompt

    def sampling(self, room: int) -> Sampling:
        return super().sampling(min(room, self.max_tokens))

    def score(self, item: Problem, answer: str) -> float:
        return reward(item, answer)

    async def evaluate(self) -> dict[str, float]:
        """Return the sampled accuracy on the held-out problems, which are never trained on."""
        found, failed = await examine_each(self, self.problems.held_out, self._examine)
        scores = [score for own in found for score in own if score is not None]
        return {"accuracy": fmean(scores), "samples": len(scores), **failed}

    async def _examine(self, problem: Problem) -> Sequence[float | None]:
        return await self.score_group(problem, await self.complete(problem.prompt, self.config.eval_samples))


if __name__ == "__main__":
    ArithmeticEnv.cli()
