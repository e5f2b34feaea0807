"""Word problems: ``grpo env word_problems serve --env.tokenizer_name MODEL``.

It needs no data set. Its reward is exact: 1 if an answer ended before its limit and its last number is right.
`--env.level auto` draws problems of the levels at which the policy is right between 20 and 80 % of the time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ConfigError
from environments.intervals import with_interval
from environments.peers.inference import Completion
from environments.running.evaluation import examine_each
from environments.running.runner import Failures
from environments.trajectory import Message
from environments.word_problems import LEVELS, Ladder, WordProblem, held_out_problems, is_right, levels_of, make_problem

ASKED = "End with the number."


class WordProblemsConfig(BaseEnvConfig):
    """Settings of the word problems."""

    level: str = Field(
        default="auto",
        description=f"1 to {len(LEVELS)}, a range such as 1-2, or auto: levels at which answers are sometimes right",
    )
    max_tokens: int | None = Field(default=64, ge=1, description="longest answer in tokens")
    eval_questions: int = Field(default=200, ge=1, le=10_000, description="held-out problems of an evaluation")
    eval_temperature: float = Field(default=0.0, ge=0.0, description="evaluation temperature; 0: greedy")


class WordProblemsEnv(BaseEnv[WordProblem, WordProblemsConfig]):
    """Word problems of one to three steps, whose answer is a whole number."""

    name = "word_problems"
    env_config_cls = WordProblemsConfig
    score_in_thread = False

    async def setup(self) -> None:
        """Read the levels from the settings."""
        try:
            levels = levels_of(self.config.level)
        except ValueError:
            raise ConfigError(
                field="--env.level",
                got=self.config.level,
                wanted=f"auto, 1 to {len(LEVELS)}, or a range such as 1-2",
                fix="choose one of these",
            ) from None
        self.levels = levels
        self.ladder = Ladder(levels)
        self.position = 0
        self._failures = Failures()

    async def get_next_item(self) -> WordProblem:
        """Return the next problem. Seed and number determine it, so a resumed run continues with new ones."""
        self.position += 1
        rng = random.Random(f"{self.config.seed}/{self.position}")
        level = self.ladder.draw(rng) if self.config.level == "auto" else rng.choice(self.levels)
        return make_problem(level, "train", rng)

    def state(self) -> dict[str, Any]:
        """Return the number of generated problems and each level's mean reward."""
        return {"position": self.position, "means": {str(level): mean for level, mean in self.ladder.means.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the problems that were generated."""
        ladder = Ladder(self.levels, {int(level): float(mean) for level, mean in state["means"].items()})
        self.position, self.ladder = int(state["position"]), ladder

    def prompt(self, item: WordProblem) -> str | list[Message]:
        """Return a chat if the model has a chat template, else plain text."""
        question = f"{item.text} {ASKED}"
        return [{"role": "user", "content": question}] if self.tokenizer.chat_template else f"{question}\nAnswer:"

    async def score_group(self, item: WordProblem, completions: Sequence[Completion]) -> list[float]:
        """Return 1 for each right answer that ended before its limit, else 0."""
        scores = [self._score(item, completion) for completion in completions]
        mean = fmean(scores)
        self.ladder.note(item.level, mean)
        self.measures.add("level", item.level)
        self.measures.add(f"accuracy_level_{item.level}", mean)
        return scores

    def _score(self, item: WordProblem, completion: Completion) -> float:
        return float(completion.finish_reason != "length" and is_right(item, self.answer_of(completion)))

    async def evaluate(self) -> dict[str, float]:
        """Return the share of right answers to held-out problems of every level, with its 95 % confidence interval."""
        problems = held_out_problems(self.levels, self.config.eval_questions)
        scored, failed = await examine_each(self.name, problems, self._examine, self._failures)
        by_level = {
            f"accuracy_level_{level}": fmean(found)
            for level in self.levels
            if (found := [score for problem, score in scored if problem.level == level])
        }
        return {
            **with_interval("accuracy", fmean(score for _, score in scored), len(scored)),
            **by_level,
            "questions": len(scored),
            "questions_failed": failed,
        }

    async def _examine(self, problem: WordProblem) -> tuple[WordProblem, float]:
        prompt = self.encode(self.prompt(problem))
        room = self.config.max_token_length - len(prompt)
        sampling = replace(self.sampling(room), temperature=self.config.eval_temperature)
        (completion,) = await self.server.generate(prompt, 1, sampling)
        return problem, self._score(problem, completion)


if __name__ == "__main__":
    WordProblemsEnv.cli()
