"""The environment behind ``grpo run --data D --reward R``: rows of a data set, scored by reward functions.

Without a trainer: ``grpo env dataset process --data problems.jsonl --reward my.py:f``, or ``evaluate``, which scores
all rows if none are held out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import ClassVar

from pydantic import Field

from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ConfigError, UnusableRow, require_data
from environments.dataset.data import Columns, Data, Prompt, Row, listed, read_data
from environments.dataset.rewards import Asked, Score, TrainerState, load_reward, weighted_sum
from environments.items import Shuffled
from environments.maths.judge import MathJudge
from environments.peers.inference import Completion
from environments.running.evaluation import examine_each, mean_with_interval
from environments.running.state import DataSet, refuse_changed
from environments.scoring import gathered
from environments.trajectory import Message

log = logging.getLogger(__name__)

SPLIT_SEED = 20261128
"""A constant, not the run's seed: a row that one run trains on is not held out in another."""
MESSAGE_BYTES = 32
"""More than the tokens that a chat template adds to each message, such as its role and its ends."""
LOOKED_AT = 100
"""Prompts by which `--data.chat auto` decides."""
OUR_METRICS = ("reward", "rows")
"""Beginnings of the names of the environment's own metrics."""
LONGEST_EXTRA = 1000
"""Characters of a value of `log_extra` that are kept."""


class DatasetConfig(BaseEnvConfig):
    """Settings of the environment of a data set, beside the tables ``[data]`` and ``[[rewards]]``."""

    eval_samples: int = Field(default=1, ge=1, description="samples per held-out row")
    eval_temperature: float = Field(default=0.0, ge=0.0, description="evaluation temperature; 0: greedy")
    judge_workers: int = Field(default=2, ge=1, description="processes of the built-in rewards math and regex")


class DatasetEnv(BaseEnv[int, DatasetConfig]):
    """Rows of a data set, scored by reward functions. An item is the number of a row."""

    name = "dataset"
    env_config_cls = DatasetConfig
    no_evaluation = "no held-out rows; add --data.held_out N, or --data.held_out_split"
    takes_data = True
    asks_rows: ClassVar[bool] = True  # False: a row is a task, which has no prompt, and may need no reward function
    _judge: MathJudge | None = None

    async def setup(self) -> None:
        """Read and check the data, and import the rewards."""
        require_data(self.data.path is not None, bool(self.rewards) or not self.asks_rows)
        compares = any(each.compares for each in self.rewards)
        self._source, other = await asyncio.to_thread(read_data, self.data, prompts=self.asks_rows, answers=compares)
        self._evaluated = other or self._source
        if self.config.data_record is not None:
            refuse_changed(self.config.data_record, self.data_sets(), allowed=self.data.allow_changed)
        there = self._source.rows.columns
        self.columns = Columns.of(self.data, self._source, prompts=self.asks_rows, answers=compares)
        self._rewards = [
            load_reward(each, there, self.columns.answer, self.threads, self._math_judge) for each in self.rewards
        ]
        columns = self._evaluated.rows.columns
        if compares and self.columns.answer not in columns:
            raise ConfigError(
                "a reward compares with right answers",
                field=f"--data.held_out_split {self.data.held_out_split}",
                got=f"the columns {listed(columns)}",
                wanted=self.columns.answer or "",
                fix="add the column, or evaluate other rows",
            )
        self._chat = self._asks_in_chat()
        usable = await asyncio.to_thread(self._usable, self._source)
        if other is None:
            usable, self._held_out = self._split(usable, len(self._source.rows))
        else:
            self._held_out = await asyncio.to_thread(self._usable, other)
        await asyncio.to_thread(self._warn_of_shared, usable)
        self.items = Shuffled(usable, self.config.seed)
        form = "as plain text" if not self._chat else "as a user message (--data.chat off: as plain text)"
        rewards = ", ".join(f"{each.config.label} (weight {each.config.weight:g})" for each in self._rewards)
        rewards = rewards or "what the agent returns"
        self._described = (
            f"{len(usable):,} rows of {self._source.name} to train on, {len(self._held_out):,} held out; "
            f"{self.columns}, {'messages' if self.columns.as_messages else form}; rewards: {rewards}"
        )
        log.info("%s", self._described)

    async def rehearse(self, item: int, doing: Callable[[str], None]) -> str:
        """Try an item without a server; return what the rows, the columns and the rewards are, and what was seen."""
        return f"{self._described}; {await super().rehearse(item, doing)}"

    def data_sets(self) -> Sequence[DataSet]:
        """Return the data set, and that of `held_out_split`."""
        read = [self._source, self._evaluated] if self._evaluated is not self._source else [self._source]
        return [DataSet(each.name, len(each.rows), each.fingerprint) for each in read]

    async def close(self) -> None:
        if self._judge is not None:
            await self._judge.close()

    def _math_judge(self) -> MathJudge:
        self._judge = self._judge or MathJudge(self.config.judge_workers)
        return self._judge

    # ------------------------------------------------------------ prompts

    def _asks_in_chat(self) -> bool:
        """Return whether a text prompt is sent as a user message."""
        chat = self.data.chat
        if not self.tokenizer.chat_template:
            if self.columns.as_messages or chat == "on":
                raise ConfigError(
                    field=f"--env.tokenizer_name {self.config.tokenizer_name}",
                    got="a tokenizer without a chat template",
                    wanted="a chat template, which messages need",
                    fix="use an instruction-tuned model, or prompts that are text",
                )
            return False
        in_chat = chat == "on" or (chat == "auto" and not self._is_rendered())
        if not in_chat and not self.columns.as_messages and self.config.system_prompt:
            got = "--data.chat off" if chat == "off" else "prompts that have the template's special tokens"
            raise ConfigError(
                "it is a message of the chat template",
                field="--env.system_prompt",
                got=f"{got}, so that prompts are sent as plain text",
                wanted="one of the two",
                fix="put its text into the prompts, such as by --data.prompt_template, or use --data.chat on",
            )
        return in_chat and not self.columns.as_messages

    def _is_rendered(self) -> bool:
        """Return whether most of the first prompts contain special tokens of the model, as rendered prompts do."""
        marks = [str(token) for token in self.tokenizer.all_special_tokens if len(str(token)) > 1]
        numbers, found = self._source.checked()[:LOOKED_AT], 0
        for number in numbers:
            try:
                prompt = self.columns.prompt_of(self._source.rows[number])
            except UnusableRow:  # reported when all rows are checked
                continue
            found += any(mark in prompt for mark in marks if isinstance(prompt, str))
        return 2 * found > len(numbers)

    def _prompt(self, data: Data, number: int) -> tuple[Row, Prompt]:
        """Return a row, and its prompt as it is in the data set; raise UnusableRow if it has none."""
        row, where = data.rows[number], f"--data {data.name}, {data.rows.place(number)}"
        try:
            return row, self.columns.prompt_of(row)
        except UnusableRow as error:
            problem = error.problems[0]
            raise UnusableRow.of([replace(problem, field=f"{where}, column {problem.field}")]) from None
        except KeyError as error:
            raise UnusableRow(field=where, got=f"no column {error}", wanted="the same columns") from None

    def _asked(self, prompt: Prompt) -> Prompt:
        """Return a prompt as the model gets it."""
        return [{"role": "user", "content": prompt}] if self._chat and isinstance(prompt, str) else prompt

    def right_answer(self, item: int) -> str | None:
        return self.columns.answer_of(self._source.rows[item])

    def prompt(self, item: int) -> str | list[Message]:
        return self._asked(self._prompt(self._source, item)[1])

    # ------------------------------------------------------------ rows

    def _usable(self, data: Data) -> Sequence[int]:
        """Return the numbers of the rows whose prompts leave room for an answer.

        Of large data only the first rows are checked: the others are when they are drawn. Raise a ConfigError if a row
        has no prompt, or if no prompt leaves room.
        """
        room, fitting, longest, skipped = self.config.max_token_length, array("Q"), 0, 0
        shortest: Prompt = [{"role": "user", "content": "1"}] if self.columns.as_messages else self._asked("1")
        free = room - len(self.tokenize(shortest))  # without template and system prompt
        for number in data.checked():
            try:
                row, prompt = self._prompt(data, number)
                self.columns.answer_of(row)
            except UnusableRow as error:
                raise ConfigError.of([replace(error.problems[0], fix="correct or remove the row")]) from None
            # A token has one byte or more.
            parts = [{"content": prompt}] if isinstance(prompt, str) else prompt
            size = sum(len(str(each.get("content", "")).encode()) + MESSAGE_BYTES for each in parts)
            if size > free and (length := len(self.tokenize(self._asked(prompt)))) >= room:
                longest, skipped = max(longest, length), skipped + 1
            else:
                fitting.append(number)
        if skipped:
            log.warning(
                "%s: %d prompts leave no room for an answer and are skipped; the longest has %d tokens, and "
                "--env.max_token_length is %d; --seq-len of grpo run above %d keeps them all",
                *(data.name, skipped, longest, room, longest),
            )
        if not fitting:
            raise ConfigError(
                field="--env.max_token_length",
                got=f"{room}, and prompts of {longest} tokens at most",
                wanted="room for an answer to one prompt or more",
                fix="raise it (in grpo run: --seq-len), or shorten the prompts",
            )
        fitting.extend(range(len(data.checked()), len(data.rows)))
        return fitting

    def _split(self, usable: Sequence[int], rows: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the usable rows to train on and the held-out ones, always the same of the same data."""
        count = self.data.held_out
        chosen = set(random.Random(SPLIT_SEED).sample(range(rows), count)) if count < rows else set(usable)
        train, held_out = (
            array("Q", (number for number in usable if (number in chosen) is kept)) for kept in (False, True)
        )
        if not train or (count and not held_out):
            raise ConfigError(
                field="--data.held_out",
                got=count,
                wanted=f"a number that leaves some of {len(usable)} usable rows to train on, and some to evaluate",
                fix="change it",
            )
        return train, held_out

    def _warn_of_shared(self, usable: Sequence[int]) -> None:
        """Warn if prompts of held-out rows are trained on, too; large data are not compared."""
        if not self._held_out or not (self._source.whole and self._evaluated.whole):
            return
        trained = {hash(repr(self._prompt(self._source, number)[1])) for number in usable}
        held_out = (hash(repr(self._prompt(self._evaluated, number)[1])) for number in self._held_out)
        if shared := sum(each in trained for each in held_out):
            log.warning(
                "%d of %d held-out rows have a prompt that is trained on, too: their scores say little about others",
                *(shared, len(self._held_out)),
            )

    # ------------------------------------------------------------ scores

    async def score_group(self, item: int, completions: Sequence[Completion]) -> list[Score]:
        """Return the weighted sum of the rewards for each answer; None where none applies."""
        totals, metrics = await self._scores_of(self._source, item, completions)
        for name, value in metrics:
            self.measures.add(name, value)
        return totals

    @property
    def scores_in_threads(self) -> bool:
        """True if there is a function that is neither a coroutine function nor built in."""
        return any(each.in_thread for each in self._rewards)

    async def _scores_of(
        self, data: Data, number: int, completions: Sequence[Completion]
    ) -> tuple[list[Score], list[tuple[str, float]]]:
        """Return the answers' weighted sums, and the metrics: each reward's scores, and what functions passed to
        `log_metric`. What they pass to `log_extra` becomes the completions' `extra`."""
        row, prompt = self._prompt(data, number)
        texts, count = [self.decode(completion) for completion in completions], len(completions)
        metrics: list[tuple[str, float]] = []

        def log_metric(name: str, value: float) -> None:
            if self.measures.accepts(name := str(name), value := float(value), OUR_METRICS):
                metrics.append((name, value))

        def log_extra(column: str, values: Sequence[object]) -> None:
            if len(values) == count:
                for completion, value in zip(completions, values, strict=True):
                    completion.extra[str(column)] = str(value)[:LONGEST_EXTRA]

        said = [[{"role": "assistant", "content": text}] for text in texts] if self.columns.as_messages else texts
        keywords = {
            **{name: [value] * count for name, value in row.items()},
            "completions": said,
            "prompts": [prompt] * count,
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "trainer_state": TrainerState(self.curr_step, self.num_steps),
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        finals = [self.answer_of(completion) for completion in completions]
        asked = Asked(keywords, texts, finals, self.columns.answer_of(row))
        scores = await gathered(each.scores(asked) for each in self._rewards)
        for reward, of_reward in zip(self._rewards, scores, strict=True):
            metrics += [(f"reward_{reward.config.label}", score) for score in of_reward if score is not None]
        return weighted_sum(self._rewards, scores), metrics

    # ------------------------------------------------------------ evaluation

    async def evaluate(self) -> dict[str, float]:
        """Return the mean rewards of answers to the held-out rows, with 95 % confidence intervals.

        Rows whose prompt is too long or whose scoring fails are counted as `rows_failed`, and not in the means.
        The intervals count rows, not samples: several answers to one row are not independent. Without a trainer and
        without held-out rows it scores all rows.
        """
        numbers = self._held_out
        if not numbers and not self.curr_step:
            numbers = await asyncio.to_thread(self._usable, self._source)
        if not numbers:
            return {}
        examined, failed = await examine_each(self, numbers, self._examine)
        metrics: dict[str, float] = {}
        for name in dict.fromkeys(name for figures in examined for name in figures):
            metrics |= mean_with_interval(name, [figures[name] for figures in examined if name in figures])
        return {**metrics, "rows": len(examined), **failed}

    async def _examine(self, number: int) -> dict[str, float]:
        """Return the means over the answers to one held-out row, by metric."""
        prompt, config = self._asked(self._prompt(self._evaluated, number)[1]), self.config
        completions = await self.complete(prompt, config.eval_samples, temperature=config.eval_temperature)
        work = self._scores_of(self._evaluated, number, completions)
        totals, metrics = await self.scored_within(number, work)
        return self._means(totals, metrics)

    def _means(self, totals: Sequence[Score], metrics: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Return the means of the reward and of other figures of the answers to one held-out row."""
        only = f"reward_{self._rewards[0].config.label}" if len(self._rewards) == 1 else ""  # it is the reward itself
        values: defaultdict[str, list[float]] = defaultdict(list)
        for name, value in [*(("reward", total) for total in totals if total is not None), *metrics]:
            if name != only:
                values[name].append(value)
        return {name: fmean(each) for name, each in values.items()}
