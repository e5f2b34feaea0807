"""The arithmetic environment: ``python -m environments.arithmetic_server serve --env.tokenizer_name MODEL``.

It needs no download. Its reward is exact: 1 for the right number and nothing else, 0 otherwise.
"""

from statistics import fmean

from pydantic import Field

from environments.arithmetic import Operation, Problem, ProblemSet, reward
from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ConfigError
from environments.items import Shuffled
from environments.peers.inference import Sampling
from environments.running.evaluation import examine_each
from environments.running.runner import Failures


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
        """List the problems."""
        config = self.config
        try:
            self.problems = ProblemSet.of(config.low, config.high, config.operation)
        except ValueError as error:
            raise ConfigError(
                str(error), field="--env.low, --env.high", got=f"{config.low} and {config.high}"
            ) from None
        longest = max(len(problem.answer) for part in (self.problems.train, self.problems.held_out) for problem in part)
        # The number, its end token, and one more token that reveals a longer answer.
        self.max_tokens = config.max_tokens or longest + 2
        self.items = Shuffled(self.problems.train, config.seed)
        self._failures = Failures()

    def prompt(self, item: Problem) -> str:
        """Return plain text: ``12+34=``."""
        return item.prompt

    def sampling(self, room: int) -> Sampling:
        """Return sampling of a few tokens at the configured temperature."""
        return super().sampling(min(room, self.max_tokens))

    def score(self, item: Problem, answer: str) -> float:
        """Return 1.0 for the right number and nothing else."""
        return reward(item, answer)

    async def evaluate(self) -> dict[str, float]:
        """Return the sampled accuracy on the held-out problems, which are never trained on."""
        found, failed = await examine_each(self.name, self.problems.held_out, self._examine, self._failures)
        scores = [score for own in found for score in own]
        return {"accuracy": fmean(scores), "samples": len(scores), "questions_failed": failed}

    async def _examine(self, problem: Problem) -> list[float]:
        completions = await self.complete(problem.prompt, self.config.eval_samples)
        return [self.score(problem, self.decode(completion)) for completion in completions]


if __name__ == "__main__":
    ArithmeticEnv.cli()
