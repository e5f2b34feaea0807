"""Grade-school mathematics: ``grpo env gsm8k serve --env.tokenizer_name MODEL``, or run this file by its path.

Each answer is judged twice. Strictly: it ended before its limit, and is the right number, and nothing else, in the form
that was asked for. Leniently: math-verify, in processes that can be killed, finds the right value anywhere in it. Both
are reported with each step, and `--env.reward` says which one is the reward.

Source: K. Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168. Its solutions end in
`#### NUMBER`.
"""

import sys
from pathlib import Path

if not __package__:  # run by its path: sys.path needs the repository's root instead of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ConfigError
from environments.dataset.data import read_source
from environments.items import Shuffled
from environments.maths.answer_form import AnswerForm, in_the_asked_form, read_number
from environments.maths.judge import MathJudge
from environments.peers.inference import Completion
from environments.running.evaluation import examine_each, with_interval
from environments.trajectory import Message

Split = Literal["train", "test"]

ASKED: Final[dict[AnswerForm, str]] = {
    "boxed": "Think step by step, then give the final answer, a number, as \\boxed{answer}.",
    "hashes": "Think step by step, then give the final answer, a number, on a line of its own after ####.",
}
PERCENT_ASKED: Final = re.compile(r"\b(what|which|how many) ((is|was|are|were|will be) )?(the )?percent", re.IGNORECASE)


class Gsm8kConfig(BaseEnvConfig):
    """Settings of GSM8K."""

    dataset_path: Path | None = Field(default=None, description="folder with train.jsonl and test.jsonl; unset: hub")
    dataset_name: str = Field(default="openai/gsm8k", description="data set on the hub")
    answer_form: AnswerForm = Field(default="boxed", description="\\boxed{18}, or #### 18 on a separate line")
    reward: Literal["strict", "lenient"] = Field(
        default="strict",
        description="which right answers have reward 1: strict, in the asked form; lenient, in any form",
    )
    format_reward: float = Field(default=0.0, ge=0.0, description="reward of the asked form, right or wrong")
    length_penalty: float = Field(default=0.0, ge=0.0, description="penalty of the longest answer, right or wrong")
    length_free: float = Field(
        default=0.5, ge=0.0, lt=1.0, description="share of the longest answer that costs no penalty"
    )
    eval_questions: int | None = Field(default=None, ge=1, description="number of test questions; unset: all 1,319")
    eval_samples: int = Field(default=1, ge=1, description="samples per test question")
    eval_temperature: float = Field(default=0.0, ge=0.0, description="evaluation temperature; 0: greedy")
    judge_workers: int = Field(default=2, ge=1, description="processes that judge answers")


@dataclass(frozen=True, slots=True)
class Question:
    """One exercise and the number that solves it."""

    text: str
    gold: str

    @classmethod
    def of(cls, question: str, answer: str) -> "Question":
        """Return the question of a row of the data set; raise ValueError if its solution has no `#### NUMBER`.

        Solutions write no units. If the question asks for a percentage, the number is one: 60 and 60 % are right.
        """
        gold = in_the_asked_form(answer, "hashes")
        number = None if gold is None else read_number(gold)
        if number is None:
            raise ValueError(f"a solution that does not end in '#### NUMBER': {answer[-60:]!r}")
        asks_percent = PERCENT_ASKED.search(question) is not None and not number.percent
        return cls(question, number.text + ("%" if asks_percent else ""))


def read_questions(config: Gsm8kConfig, split: Split) -> list[Question]:
    """Return the questions of a split, from the hub or from `dataset_path`, or raise ConfigError. For the training
    split that may also be the file itself."""
    if (path := config.dataset_path) is None:
        field = f"--env.dataset_name {config.dataset_name}"
        try:
            rows = read_source(field, config.dataset_name, split, "main").rows
        except ConfigError as error:
            fix = "set --env.dataset_path to a folder with train.jsonl and test.jsonl"
            raise ConfigError.of([replace(error.problems[0], fix=fix)]) from None
    else:
        file = path / f"{split}.jsonl" if path.is_dir() else path
        field = f"--env.dataset_path {file}"
        if not file.is_file() or (split == "test" and file == path):
            wanted = f'a folder with {split}.jsonl, one {{"question": …, "answer": "… #### 18"}} a line'
            raise ConfigError(field="--env.dataset_path", got=path, wanted=wanted)
        rows = read_source(field, str(file)).rows
    questions = []
    for number in range(len(rows)):
        row = rows[number]
        try:
            questions.append(Question.of(str(row["question"]), str(row["answer"])))
        except (KeyError, ValueError) as error:
            where = f"{field}, {rows.place(number)}"
            raise ConfigError(field=where, got=error, wanted="a row of GSM8K: question and answer") from None
    return questions


def too_long(tokens: int, room: int, free: float) -> float:
    """Return how much of the penalised part of its room an answer uses: 0 up to the share `free`, 1 at the end.

    Linear, as in C. Yu et al., DAPO, arXiv 2503.14476, section 3.4.
    """
    start = free * room
    if tokens <= start:
        return 0.0
    return 1.0 if tokens >= room else (tokens - start) / (room - start)


class Gsm8kEnv(BaseEnv[Question, Gsm8kConfig]):
    """GSM8K: word problems whose answer is a number."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig
    judge: MathJudge | None = None

    async def setup(self) -> None:
        """Read the training questions; the test questions are read with the first evaluation."""
        self.judge = MathJudge(self.config.judge_workers)
        self.items = Shuffled(await asyncio.to_thread(read_questions, self.config, "train"), self.config.seed)
        self._test: list[Question] = []

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()

    def prompt(self, item: Question) -> str | list[Message]:
        """Return a chat if the model has a chat template, else plain text."""
        system = ASKED[self.config.answer_form] if self.config.system_prompt is None else ""
        if not self.tokenizer.chat_template:
            return "\n\n".join(filter(None, [system, f"Question: {item.text}\nAnswer:"]))
        question = {"role": "user", "content": item.text}
        return [{"role": "system", "content": system}, question] if system else [question]

    async def score_group(self, item: Question, completions: Sequence[Completion]) -> list[float]:
        """Return 1 for a right answer, plus the format's reward and minus the length's penalty."""
        judged = await asyncio.gather(*(self._judge(item, completion) for completion in completions))
        for figures in judged:
            for name, value in figures.items():
                self.measures.add(name, value)
        return [figures["score"] for figures in judged]

    async def _judge(self, item: Question, completion: Completion) -> dict[str, float]:
        """Return an answer's figures. Only one that ended before its limit is strictly right, or formed: one number in
        the form that was asked for, right or wrong."""
        assert self.judge is not None, "set up"
        config, answer = self.config, self.answer_of(completion)
        verdict = await self.judge.judge(item.gold, answer, config.answer_form)
        ended, final = completion.finish_reason != "length", in_the_asked_form(answer, config.answer_form)
        strict, formed = verdict.strict and ended, ended and final is not None and read_number(final) is not None
        room = self.sampling(config.max_token_length - len(completion.prompt_token_ids)).max_tokens
        excess = too_long(len(completion.token_ids), room, config.length_free)
        right = strict if config.reward == "strict" else verdict.lenient
        return {
            "strict": strict,
            "lenient": verdict.lenient,
            "formed": formed,
            "ended": ended,
            "unjudged": not verdict.judged,
            "score": right + config.format_reward * formed - config.length_penalty * excess,
        }

    async def evaluate(self) -> dict[str, float]:
        """Return the share of right answers to test questions, with its 95 % confidence interval.

        The interval counts questions, not samples: several answers to one question are not independent trials.
        """
        if not self._test:
            self._test = await asyncio.to_thread(read_questions, self.config, "test")
        asked, failed = await examine_each(self, self._test[: self.config.eval_questions], self._examine)
        judged = [figures for answers in asked for figures in answers]
        return {
            **with_interval("accuracy", fmean(each["strict"] for each in judged), len(asked)),
            **with_interval("lenient", fmean(each["lenient"] for each in judged), len(asked)),
            "ended": fmean(each["ended"] for each in judged),
            "length_mean": fmean(each["length"] for each in judged),
            "questions": len(asked),
            **failed,
            "samples": len(judged),
        }

    async def _examine(self, question: Question) -> list[dict[str, float]]:
        count, temperature = self.config.eval_samples, self.config.eval_temperature
        completions = await self.complete(self.prompt(question), count, temperature=temperature)
        judged = await asyncio.gather(*(self._judge(question, completion) for completion in completions))
        return [{**each, "length": len(done.token_ids)} for each, done in zip(judged, completions, strict=True)]


if __name__ == "__main__":
    Gsm8kEnv.cli()
