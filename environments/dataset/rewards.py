"""Reward functions of TRL's signature (its GRPOTrainer's `_calculate_rewards`), and the built-in ones.

A function is called once for each group, with the keywords of `OURS` and each column of the data set, repeated for
each answer; `**kwargs` leaves out a column named prompt. It returns a score for each answer, or None or NaN where it
does not apply.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from environments.config import ConfigError
from environments.data_config import REGEX, RewardConfig
from environments.dataset.data import listed, shown
from environments.maths.answer_form import final_number, in_the_asked_form, read_number
from environments.maths.judge import MathJudge
from environments.scoring import Threads, settled
from environments.user_modules import function_of, module_of
from grpo_common.errors import UserError
from grpo_common.suggest import did_you_mean

Score = float | None
OURS: Final = ("completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keywords that every function may have besides the columns. `log_extra(column, values)` is text for the pages that
show samples, `log_metric(name, value)` a metric."""
NOT_PASSED: Final = ("prompt", "completion")
"""Columns that functions get only by name, and not by `**kwargs`, as in TRL."""
OF_THREADS: Final = ("signal only works in main thread", "doesn't support threaded environment")
"""Parts of the messages of functions that need the main thread: Python's and math-verify's."""


class RewardError(UserError, ValueError):
    """A reward function raised an error, or returned something else than a score for each answer."""


@dataclass(frozen=True)
class TrainerState:
    """The part of transformers' `TrainerState` that is known here; `max_steps` is 0 if it is not known."""

    global_step: int
    max_steps: int = 0


@dataclass(frozen=True)
class Asked:
    """A group's answers, as rewards see them."""

    keywords: Mapping[str, Any]  # the arguments of functions, by name
    texts: Sequence[str]
    finals: Sequence[str]  # the texts without thinking
    answer: str | None  # the right one; None if the row has none


@dataclass(frozen=True)
class Reward:
    """A reward: its settings, and what computes the scores of a group."""

    config: RewardConfig
    compute: Callable[[Asked], Awaitable[Any]]
    in_thread: bool = False

    async def scores(self, asked: Asked) -> list[Score]:
        """Return a score, or None, for each answer; raise RewardError if the function returned something else."""
        given = await self.compute(asked)
        count, field = len(asked.texts), f"--reward {self.config.function}"
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise RewardError(field=field, got=shown(given), wanted=f"a list of {count} numbers")
        values = list(given)
        if len(values) != count:
            raise RewardError(field=field, got=f"{len(values)} scores", wanted=f"{count}, one for each answer")
        return [_score(f"{field}, answer {number}", value) for number, value in enumerate(values, start=1)]


def _score(field: str, value: Any) -> Score:
    try:
        score = math.inf if isinstance(value, str | bytes) else math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.inf
    if math.isinf(score):
        raise RewardError(
            field=field, got=shown(value), wanted="a finite number, or None or NaN where the reward does not apply"
        )
    return None if math.isnan(score) else score  # TRL turns None into NaN, so functions return both


def weighted_sum(rewards: Sequence[Reward], scores: Sequence[Sequence[Score]]) -> list[Score]:
    """Return each answer's weighted sum over the rewards that apply to it; None if none does."""
    totals: list[Score] = []
    for of_answer in zip(*scores, strict=True):
        pairs = zip(rewards, of_answer, strict=True)
        parts = [reward.config.weight * score for reward, score in pairs if score is not None]
        totals.append(sum(parts) if parts else None)
    return totals


def load_reward(
    config: RewardConfig,
    columns: Sequence[str],
    answer_column: str | None,
    threads: Threads,
    judge: Callable[[], MathJudge],
) -> Reward:
    """Return the reward of its settings.

    Raise a ConfigError if there is no such function, its file can't be imported, it needs an argument that is no
    column, or a built-in has no right answers to compare with.
    """
    name, field = config.function, f"--reward {config.function}"
    if name.startswith(REGEX):
        pattern = re.compile(name.removeprefix(REGEX)).pattern
        return Reward(config, partial(_regex, judge(), field, pattern))
    if config.compares:
        if answer_column is None:
            raise ConfigError(
                "it compares with right answers",
                field=field,
                got=f"the columns {listed(columns)}",
                wanted="answer, solution or label",
                fix="name the column by --data.answer_column",
            )
        return Reward(config, _exact_match if name == "exact_match" else partial(_math, judge()))
    where, _, function_name = name.rpartition(":")
    function = function_of(field, module_of(field, where), function_name)
    names = _keywords_of(field, function, [*OURS, *columns])
    in_thread = not (config.main_thread or inspect.iscoroutinefunction(function))
    return Reward(config, partial(_call, config, function, names, threads), in_thread)


def _keywords_of(field: str, function: Callable[..., Any], known: Sequence[str]) -> list[str]:
    """Return which of the known keywords a function gets; raise ConfigError if it needs an argument that is none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C
        return list(known)
    for each in parameters.values():
        if each.kind is each.POSITIONAL_ONLY:
            raise ConfigError(field=field, got=f"{each.name}, positional only", wanted="arguments with names")
        needed = each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if needed and each.name not in known:
            raise ConfigError(
                "an argument is neither a column nor one of TRL's",
                field=field,
                got=each.name,
                wanted=f"one of {listed(known)}",
                fix=did_you_mean(each.name, known, "give it a default, or rename the column"),
            )
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return [name for name in known if name in parameters or (takes_all and name not in NOT_PASSED)]


async def _call(
    config: RewardConfig, function: Callable[..., Any], names: Sequence[str], threads: Threads, asked: Asked
) -> Any:
    keywords = {name: asked.keywords[name] for name in names if name in asked.keywords}
    for name, value in keywords.items():
        if isinstance(value, list):  # what a function changes must change neither the data set nor what others get
            keywords[name] = [copy.deepcopy(each) if isinstance(each, list | dict) else each for each in value]
    try:
        if config.main_thread:
            return await settled(function(**keywords))
        return await threads.call(partial(function, **keywords))
    except Exception as error:
        if any(part in str(error) for part in OF_THREADS):
            error.add_note(
                f"--reward {config.function} runs in a thread, where signals don't work: pass math_verify "
                "parsing_timeout=None and timeout_seconds=None, or set main_thread = true in its [[rewards]]"
            )
        raise


async def _regex(judge: MathJudge, field: str, pattern: str, asked: Asked) -> list[float]:
    """Search in a process that can be ended: a search that goes back and forth blocks all threads of its process."""
    try:
        return [float(found) for found in await judge.search(pattern, asked.texts)]
    except TimeoutError as error:
        raise RewardError(
            "the search for the pattern is given up",
            field=field,
            got=error,
            wanted="a pattern that matches in one way",
            fix="repeat nothing that itself repeats, as (a+)+ does",
        ) from None


async def _exact_match(asked: Asked) -> list[Score]:
    return [None if asked.answer is None else float(text.strip() == asked.answer) for text in asked.finals]


async def _math(judge: MathJudge, asked: Asked) -> list[Score]:
    """Return 1 for each right answer.

    If the right answer is a number, the answer's box, or without a box its last number, must be that number. Otherwise
    math-verify compares expressions.
    """
    if asked.answer is None:
        return [None] * len(asked.finals)
    gold = (in_the_asked_form(asked.answer, "boxed") or asked.answer).strip().strip("$").strip()
    if (number := read_number(gold)) is not None:
        return [float(number.accepts(final_number(text))) for text in asked.finals]
    verdicts = await asyncio.gather(*(judge.judge(gold, text, "boxed") for text in asked.finals))
    return [float(verdict.lenient) for verdict in verdicts]
