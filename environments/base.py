"""`BaseEnv`: the base class of environments.

The smallest environment has items, a prompt for each item and a score for each answer. This is a whole file,
`capitals.py`, which `grpo run --env capitals.py` trains on:

    from environments.base import BaseEnv
    from environments.items import Shuffled

    class Capitals(BaseEnv[tuple[str, str]]):
        def setup(self):
            self.items = Shuffled([("France", "Paris"), ("Japan", "Tokyo")], self.config.seed)

        def prompt(self, item):
            return f"The capital of {item[0]} is "

        def score(self, item, answer):
            return float(answer.strip() == item[1])

An environment that needs more than one question and one answer overrides `collect_trajectories`.
"""

import asyncio
import logging
import math
import threading
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import cycle, islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Generic, SupportsFloat, cast

from typing_extensions import TypeVar

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, PromptTooLong
from environments.data_config import DataConfig, RewardConfig
from environments.items import Shuffled, Stream
from environments.peers.inference import Completion, Inference, Sampling, Teacher
from environments.running.groups import Failures
from environments.running.state import DataSet
from environments.scoring import Scoring, Threads
from environments.tokenizers import (
    THINK,
    after_thinking,
    count_texts,
    is_special,
    known_tokens,
    opens_thinking,
    prompt_ids,
    stop_tokens,
    turn_end,
    with_system_prompt,
)
from environments.trajectory import (
    Message,
    Trajectory,
    check_whole_vocabulary,
    scored_group,
    truncated_of,
    without,
)
from grpo_common.trace import stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MADE_UP = ("The answer is 42.", "I do not know.")
"""Answers whose scores a trial asks for, with a right one where the environment knows it."""

Item = TypeVar("Item")
Found = TypeVar("Found")
Config = TypeVar("Config", bound=BaseEnvConfig, default=BaseEnvConfig)


class Measures:
    """Figures that an environment measures while it works: values by name until `take`. Several threads may use it."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._refused: set[str] = set()

    def add(self, name: str, value: float) -> None:
        """Add a value; True counts as 1. One that is not finite is left out, as it would hide all others."""
        if self.accepts(name, float(value)):
            with self._lock:
                self._values[name].append(float(value))

    def accepts(self, name: str, value: float, taken: tuple[str, ...] = ()) -> bool:
        """Return whether a value is finite and its name begins as no taken one; else log an error, once a name."""
        if name.startswith(taken):
            problem = f"got its name, wanted one that does not begin with {' or '.join(taken)}"
        elif not math.isfinite(value):
            problem = f"got {value}, wanted a finite number"
        else:
            return True
        if name not in self._refused:
            self._refused.add(name)
            log.error("the metric %s is left out: %s (logged once)", name, problem)
        return False

    def take(self) -> dict[str, float]:
        """Return each name's mean since the last call."""
        with self._lock:
            means = {name: fmean(values) for name, values in self._values.items()}
            self._values.clear()
        return means


class BaseEnv(Generic[Item, Config]):
    """An environment: the source of prompts and the scores of answers.

    Names follow Atropos' `BaseEnv`. The runner calls `setup` once, then `get_next_item` and `collect_trajectories` for
    every group (several groups at a time, in one event loop), and `evaluate` when an evaluation is due. `setup` and
    `get_next_item` may be plain functions or coroutine functions.

    Attributes:
        name: The environment's name in logs and metrics; unset: the class's, in small letters.
        config: The environment's settings.
        server: Client of the inference server.
        tokenizer: The model's tokenizer.
        data, rewards: The tables ``[data]`` and ``[[rewards]]``, for an environment that `takes_data`.
        items: Where items come from, if `setup` sets it, such as `Shuffled(rows, self.config.seed)`.
        curr_step: The trainer's last known step; 0 without a trainer.
        num_steps: The trainer's last step; 0 if it is not known.
        measures: Figures to report with each step: `self.measures.add("strict", 1.0)`.
        failures: Logs each distinct error of the environment's code once.
        threads: Calls slow functions: `await self.threads.call(function, argument)`.
        scoring: Gives up a group that takes too long to score: `await self.scoring.within(item, coroutine)`.
    """

    items: Iterator[Item]
    data: DataConfig = DataConfig()
    rewards: tuple[RewardConfig, ...] = ()
    name: ClassVar[str] = ""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    score_in_thread: ClassVar[bool] = True  # False: `score` is fast, or uses signals
    no_evaluation: ClassVar[str] = "evaluate() has no metrics"  # a warning's words
    takes_data: ClassVar[bool] = False  # True: it reads `data` and `rewards`; otherwise these options are refused

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Name a class without a name."""
        super().__init_subclass__(**keywords)
        if not cls.name and "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __init__(self, config: Config, server: Inference, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Create the environment. A subclass with a constructor must call this one; most need only `setup`."""
        self.config = config
        self.server = server
        self.tokenizer = tokenizer
        self.curr_step = 0
        self.num_steps = 0
        self._saw_unknown = False
        self.measures = Measures()
        self.failures = Failures()
        self.threads = Threads(config.max_threads)
        self.scoring = Scoring(config.score_timeout)
        self.is_set_up = False
        self.teacher = Teacher.of(config)
        self._text = lru_cache(maxsize=1024)(self._decode)  # each answer is decoded twice: to score it and to show it

    def setup(self) -> Awaitable[None] | None:
        """Load what the environment needs; called once, before any other method."""
        return asyncio.sleep(0)  # a subclass may await it

    def get_next_item(self) -> Awaitable[Item | None] | Item | None:
        """Return the next item; None if there are no more. By default it is the next of `items`."""
        if not hasattr(self, "items"):
            name = type(self).__name__
            raise NotImplementedError(f"{name} needs self.items, an iterator that setup() sets, or get_next_item()")
        return next(self.items, None)

    def state(self) -> dict[str, Any]:
        """Return what to save with the trainer's checkpoints, as JSON values; empty to save nothing.

        By default it is the position in `items`, if they are `Shuffled` or a `Stream`.
        """
        items = getattr(self, "items", None)
        return {"position": items.position} if isinstance(items, Shuffled | Stream) else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state` in a resumed run; called after `setup`. If it raises an error, an older one
        follows."""
        if isinstance(items := getattr(self, "items", None), Shuffled | Stream):
            position = state["position"]
            if type(position) is not int or position < 0:
                raise ValueError(f"position: got {position!r}, wanted a whole number from 0")
            items.position = position

    async def close(self) -> None:
        """Release what `setup` took; called once, after everything else, also if `setup` failed."""
        return

    def data_sets(self) -> Sequence[DataSet]:
        """Return which data sets it reads, if it can tell; called after `setup`."""
        return ()

    def prompt(self, item: Item) -> str | list[Message]:
        """Return the item's prompt: plain text, or messages for the model's chat template."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither prompt() nor collect_trajectories()")

    def score(self, item: Item, answer: str) -> float | None:
        """Return the score of one answer (see `decode`); None if no reward applies to it.

        It runs in a thread: the answers of a group one after another, several groups at a time (`score_in_thread`).
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither score() nor collect_trajectories()")

    async def score_group(self, item: Item, completions: Sequence[Completion]) -> Sequence[float | None]:
        """Return the score of each answer of a group; None for an answer to which no reward applies.

        Override it where scoring must wait, or must see how an answer ended.
        """
        answers = [self.decode(completion) for completion in completions]

        def scores() -> list[float | None]:
            return [self.score(item, answer) for answer in answers]

        return await self.threads.call(scores) if self.score_in_thread else scores()

    @property
    def scores_in_threads(self) -> bool:
        """Whether scoring a group begins when a thread is free, and its time limit with it."""
        return self.score_in_thread and type(self).score_group is BaseEnv.score_group

    async def scored_within(self, item: Item, work: Awaitable[Found]) -> Found:
        """Return the result of `work`, which scores an item's group, or raise ScoreTimeout."""
        async with self.threads.slot() if self.scores_in_threads else nullcontext():
            with stage("score"):
                return await self.scoring.within(item, work)

    def sampling(self, room: int) -> Sampling:
        """Return how to sample answers when the prompt leaves `room` tokens.

        By default `--env.max_tokens` of them, or all, at `--env.temperature`, up to a stop token of the model or of
        `more_stops`.
        """
        return Sampling(
            max_tokens=min(room, self.config.max_tokens or room),
            temperature=self.config.temperature,
            stop_token_ids=self.more_stops,
        )

    def check_sampling(self, room: int) -> None:
        """Raise a ConfigError if `sampling` leaves out tokens of the vocabulary."""
        check_whole_vocabulary(self.sampling(room).to_body(), f"{type(self).__name__}: sampling()")

    @cached_property
    def more_stops(self) -> tuple[int, ...]:
        """Tokens at which an answer ends besides the model's stop tokens: the end of a turn, unless it is one of them
        or `--env.stop_at_turn_end` is off."""
        end = turn_end(self.tokenizer, self.config.chat_template_kwargs) if self.config.stop_at_turn_end else None
        if end is None or end in stop_tokens(self.config.tokenizer_name, self.tokenizer):
            return ()
        why = "it ends a turn in the chat template, but is no stop token of the model"
        log.info("answers also stop at %s: %s", self.tokenizer.decode([end]), why)
        return (end,)

    async def collect_trajectories(self, item: Item) -> wire.ScoredData | None:
        """Return one scored group for the item, or None if there is none (the runner counts these)."""
        prompt = self.prompt(item)
        completions = await self.complete(prompt, self.config.group_size)
        scores = await self.scored_within(item, self.score_group(item, completions))
        pairs = zip(completions, scores, strict=True)
        return scored_group([self.trajectory(prompt, completion, score) for completion, score in pairs])

    async def scored(self, item: Item) -> wire.ScoredData | None:
        """Return the item's group for the trainer: without truncated answers if the settings say so, and annotated by
        the teacher if there is one."""
        group = await self.collect_trajectories(item)
        if group is None:
            return None
        for truncated in truncated_of(group):
            self.measures.add("truncated", truncated)
        # A policy must not be rewarded for tokens without text, which no score sees.
        unknown = [max(mask, default=-1) >= self._texts for mask in group.masks]
        if any(unknown):
            group = without(group, unknown, scored=False)
        if any(unknown) and not self._saw_unknown:
            self._saw_unknown = True
            log.warning(
                "%s: answers with token ids from %d on are left out, as %s has no text for them "
                "(the metric unknown_tokens is their share; said once)",
                self.name,
                self._texts,
                self.config.tokenizer_name,
            )
        for is_unknown in unknown if self._saw_unknown else ():
            self.measures.add("unknown_tokens", is_unknown)
        if self.config.mask_truncated:
            group = without(group, truncated_of(group), scored=True)
        return group if self.teacher is None else await self.teacher.annotate(group)

    @cached_property
    def _texts(self) -> int:
        return count_texts(self.tokenizer)

    @property
    def compares_answers(self) -> bool:
        """Whether what is learnt is only which answers of a group score higher than others, so that a group of one
        teaches nothing. An environment that makes its groups itself may give advantages, or answers to imitate."""
        return type(self).collect_trajectories is BaseEnv.collect_trajectories

    async def rehearse(self, item: Item, doing: Callable[[str], None]) -> str:
        """Try an item without a server: its prompt, and the scores of made-up answers. Return what was seen, in words.

        Args:
            doing: called with the name of each step that begins.

        Raises:
            PromptTooLong: The prompt leaves no room for an answer.
            ConfigError: The class can't score, the prompt has tokens that the model does not know, or a score is no
                number.
        """
        cls, name = type(self), type(self).__name__
        scores_groups = cls.score_group is not BaseEnv.score_group
        if self.compares_answers and not scores_groups and cls.score is BaseEnv.score:
            raise ConfigError(field=name, got="neither score() nor score_group()", wanted="one", fix="write score()")
        if cls.prompt is BaseEnv.prompt:
            if self.compares_answers:
                raise ConfigError(field=name, got="no prompt()", wanted="prompt(), or collect_trajectories()")
            return "an item"
        doing("prompt()")
        prompt = self.prompt(item)
        token_ids = self.encode(prompt)
        vocabulary = known_tokens(self.config.tokenizer_name)
        if vocabulary is not None and max(token_ids, default=0) >= vocabulary:
            raise ConfigError(
                field="--env.tokenizer_name",
                got=f"{self.config.tokenizer_name}: a prompt with token {max(token_ids)}",
                wanted=f"ids below {vocabulary}, which is all that the model knows",
                fix="use the tokenizer that belongs to the model",
            )
        room = self.config.max_token_length - len(token_ids)
        seen = f"a prompt of {len(token_ids)} tokens, room for {room}"
        doing("sampling()")
        self.check_sampling(room)
        for token in set(self.more_stops).difference(self.sampling(room).stop_token_ids):
            seen += f"; {self.tokenizer.decode([token])} ends a turn, but sampling() leaves out "
            seen += "stop_token_ids=self.more_stops: answers do not stop there"
        if not self.compares_answers:
            return seen
        doing("score_group()" if scores_groups else "score()")
        right = [] if (known := self.right_answer(item)) is None else [known]
        texts = [*MADE_UP, *right]
        completions = self.made_up(token_ids, len(MADE_UP), *right)
        scores = await self.scored_within(item, self.score_group(item, completions))
        for score in scores if isinstance(scores, Sequence) and len(scores) == len(texts) else [scores]:
            if score is not None and not (isinstance(score, SupportsFloat) and math.isfinite(score)):
                raise ConfigError(
                    field=f"{name}: score{'_group' if scores_groups else ''}()",
                    got=repr(score)[:200],
                    wanted=f"{len(texts)} finite numbers, or None" if scores_groups else "a finite number, or None",
                )
        scored_group([self.trajectory(prompt, *pair) for pair in zip(completions, scores, strict=True)])
        shown = ["no reward" if score is None else f"{float(score):g}" for score in scores]
        said = (f"{text[:60]!r} scores {score}" for text, score in zip(texts, shown, strict=True))
        seen += f"; of made-up answers, {', '.join(said)}"
        numbers = [-math.inf if score is None else float(score) for score in scores]
        wrong = [number for text, number in zip(texts[:-1], numbers, strict=False) if right and right[0] not in text]
        if wrong and numbers[-1] < max(wrong):
            seen += "; WARNING: the last is right and scores less than another: are the rewards as you mean them?"
        return seen

    def right_answer(self, item: Item) -> str | None:
        """Return a right answer to an item, for a trial to score; None: none is known."""
        return None

    def made_up(self, token_ids: list[int], n: int, *right: str) -> list[Completion]:
        """Return `n` answers to a prompt that nobody sampled, and right ones, for a trial."""
        found = []
        for text in (*islice(cycle(MADE_UP), n), *right):
            ids = cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False))
            found.append(Completion(token_ids, ids, [0.0] * len(ids), text, "stop", None, self.config.temperature))
        return found

    async def evaluate(self) -> dict[str, float]:
        """Return metrics of the current policy; `accuracy` should be among them. By default there are none."""
        return {}

    async def complete(self, prompt: str | list[Message], n: int, **changes: Any) -> list[Completion]:
        """Return `n` sampled answers to a prompt.

        Args:
            changes: what differs from `sampling`, such as `temperature=0.0` in an evaluation.
        """
        token_ids = self.encode(prompt)
        sampling = self.sampling(self.config.max_token_length - len(token_ids))
        return await self.server.generate(token_ids, n, replace(sampling, **changes))

    def trajectory(self, prompt: str | list[Message], completion: Completion, score: float | None) -> Trajectory:
        """Return a completion with its score, and with its messages if the settings include them."""
        prompt = self.asked(prompt)
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said: Message = {"role": "assistant", "content": self.decode(completion)}
        if completion.extra:
            said["extra"] = completion.extra
        return Trajectory.of(completion, score, [*asked, said] if self.config.include_messages else [])

    def asked(self, prompt: str | list[Message]) -> str | list[Message]:
        """Return a prompt as the policy gets it: with `--env.system_prompt`, if that is set."""
        return with_system_prompt(self.tokenizer, prompt, self.config.system_prompt)

    def tokenize(self, prompt: str | list[Message]) -> list[int]:
        """Return the token ids of a prompt of any length.

        Raises:
            PromptRefused: The chat template refuses it.
        """
        return prompt_ids(self.tokenizer, self.asked(prompt), variables=self.config.chat_template_kwargs)

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            PromptTooLong: It leaves no room for an answer within `max_token_length`.
            PromptRefused: The chat template refuses it.
        """
        token_ids = self.tokenize(prompt)
        self.check_room(token_ids)
        return token_ids

    def check_room(self, token_ids: list[int]) -> None:
        """Refuse a prompt that leaves no room for an answer.

        Raises:
            PromptTooLong: It has `max_token_length` tokens or more.
        """
        if len(token_ids) >= self.config.max_token_length:
            raise PromptTooLong(
                field="--env.max_token_length",
                got=self.config.max_token_length,
                wanted=f"more than the {len(token_ids)} tokens of a prompt",
                fix="raise it (in grpo run: --seq-len), or shorten the prompts",
            )

    def decode(self, completion: Completion) -> str:
        """Return a completion's text without its end token: the special token at which sampling stopped.

        Models may have several, and the end of a turn need not be the tokenizer's `eos_token` (Gemma, Phi-3). Other
        special tokens stay visible: a policy must not be rewarded for tokens that the score does not see.
        """
        token_ids = completion.token_ids
        if not token_ids:  # a server without token ids: enough for an evaluation
            return completion.text
        if completion.finish_reason != "length" and is_special(self.tokenizer, token_ids[-1]):
            token_ids = token_ids[:-1]
        return self._text(array("I", token_ids).tobytes())  # 4 bytes a token; a tuple takes 36

    def answer_of(self, completion: Completion) -> str:
        """Return a completion's text without its thinking (`<think>…</think>`, or `<think>…` to the end)."""
        opened = THINK if opens_thinking(self.tokenizer, completion.prompt_token_ids) else ""
        return after_thinking(opened + self.decode(completion))

    def _decode(self, token_ids: bytes) -> str:
        return str(self.tokenizer.decode(array("I", token_ids).tolist(), skip_special_tokens=False))

    @classmethod
    def cli(cls, arguments: Sequence[str] | None = None) -> None:
        """Run the environment as a program (``serve``, ``process`` or ``evaluate``) and exit.

        Args:
            arguments: Of a call within another program; None: those of this process.
        """
        from environments.running.cli import main  # clients of the API and of servers, which only a program needs

        main(cls, arguments)
