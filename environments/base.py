"""`BaseEnv`: the base class of environments.

The smallest environment has items, a prompt for each item and a score for each answer:

    class Capitals(BaseEnv[Country]):
        name = "capitals"

        async def setup(self) -> None:
            self.items = Shuffled(load_countries(), self.config.seed)

        def prompt(self, item: Country) -> str:
            return f"The capital of {item.name} is "

        def score(self, item: Country, answer: str) -> float:
            return float(answer.strip() == item.capital)

    if __name__ == "__main__":
        Capitals.cli()

An environment that needs more than one question and one answer overrides `collect_trajectories`.
"""

import threading
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast

from typing_extensions import TypeVar

from environments.api import wire
from environments.config import BaseEnvConfig, PromptTooLong
from environments.items import Shuffled, Stream
from environments.peers.inference import Completion, Inference, Sampling
from environments.peers.teacher import Teacher
from environments.scoring import Scoring
from environments.threads import Threads
from environments.trajectory import Message, Trajectory, scored_group
from grpo_common.trace import stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Config = TypeVar("Config", bound=BaseEnvConfig, default=BaseEnvConfig)


@dataclass(slots=True)
class Measures:
    """Figures that an environment measures while it works: values by name until `take`. Several threads may use it."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, value: float) -> None:
        """Add a value; True counts as 1."""
        with self._lock:
            self.values[name].append(float(value))

    def take(self) -> dict[str, float]:
        """Return each name's mean since the last call."""
        with self._lock:
            means = {name: fmean(values) for name, values in self.values.items()}
            self.values.clear()
        return means


class BaseEnv(ABC, Generic[Item, Config]):
    """An environment: the source of prompts and the scores of answers.

    Names follow Atropos' `BaseEnv`. The runner calls `setup` once, then `get_next_item` and `collect_trajectories` for
    every group (several groups at a time, in one event loop), and `evaluate` when an evaluation is due.

    Attributes:
        config: The environment's settings.
        server: Client of the inference server.
        tokenizer: The model's tokenizer.
        items: Where items come from, if `setup` sets it, such as `Shuffled(rows, self.config.seed)`.
        curr_step: The trainer's last known step; 0 without a trainer.
        measures: Figures to report with each step: `self.measures.add("strict", 1.0)`.
        threads: Calls slow functions: `await self.threads.call(function, argument)`.
        scoring: Gives up a group that takes too long to score: `await self.scoring.within(item, coroutine)`.
    """

    items: Iterator[Item]
    name: ClassVar[str]
    program: ClassVar[str | None] = None  # its command in messages; None: the class's module
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    score_in_thread: ClassVar[bool] = True  # False: `score` is fast, or uses signals

    def __init__(self, config: Config, server: Inference, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Create the environment. A subclass with a constructor must call this one; most need only `setup`."""
        self.config = config
        self.server = server
        self.tokenizer = tokenizer
        self.curr_step = 0
        self.measures = Measures()
        self.threads = Threads(config.max_threads)
        self.scoring = Scoring(config.score_timeout)
        self.teacher = Teacher.of(config)
        self._text = lru_cache(maxsize=1024)(self._decode)  # each answer is decoded twice: to score it and to show it

    async def setup(self) -> None:
        """Load what the environment needs; called once, before any other method."""
        return

    async def get_next_item(self) -> Item | None:
        """Return the next item; None if there are no more. By default it is the next of `items`."""
        return next(self.items, None)

    def state(self) -> dict[str, Any]:
        """Return what to save with the trainer's checkpoints, as JSON values; empty to save nothing.

        By default it is the position in `items`, if they are `Shuffled` or a `Stream`.
        """
        items = getattr(self, "items", None)
        return {"position": items.position} if isinstance(items, Shuffled | Stream) else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state` in a resumed run; called after `setup`."""
        if isinstance(items := getattr(self, "items", None), Shuffled | Stream):
            items.position = state["position"]

    async def close(self) -> None:
        """Release what `setup` took; called once, after everything else, also if `setup` failed."""
        return

    def prompt(self, item: Item) -> str | list[Message]:
        """Return the item's prompt: plain text, or messages for the model's chat template."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither prompt() nor collect_trajectories()")

    def score(self, item: Item, answer: str) -> float:
        """Return the score of one answer (see `decode`).

        It runs in a thread: the answers of a group one after another, several groups at a time (`score_in_thread`).
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither score() nor collect_trajectories()")

    async def score_group(self, item: Item, completions: Sequence[Completion]) -> list[float]:
        """Return the score of each answer of a group.

        Override it where scoring must wait, or must see how an answer ended.
        """
        answers = [self.decode(completion) for completion in completions]
        if self.score_in_thread:
            return await self.threads.call(self._scores, item, answers)
        return self._scores(item, answers)

    def _scores(self, item: Item, answers: Sequence[str]) -> list[float]:
        return [self.score(item, answer) for answer in answers]

    def sampling(self, room: int) -> Sampling:
        """Return how to sample answers when the prompt leaves `room` tokens; by default all, at temperature 1."""
        return Sampling(max_tokens=room)

    async def collect_trajectories(self, item: Item) -> wire.ScoredData | None:
        """Return one scored group for the item, or None if there is none (the runner counts these)."""
        prompt = self.prompt(item)
        completions = await self.complete(prompt, self.config.group_size)
        with stage("score"):
            scores = await self.scoring.within(item, self.score_group(item, completions))
        pairs = zip(completions, scores, strict=True)
        return scored_group([self.trajectory(prompt, completion, score) for completion, score in pairs])

    async def scored(self, item: Item) -> wire.ScoredData | None:
        """Return the item's group for the trainer, annotated by the teacher if there is one."""
        group = await self.collect_trajectories(item)
        return group if group is None or self.teacher is None else await self.teacher.annotate(group)

    @abstractmethod
    async def evaluate(self) -> dict[str, float]:
        """Return metrics of the current policy; `accuracy` should be among them."""

    async def complete(self, prompt: str | list[Message], n: int) -> list[Completion]:
        """Return `n` sampled answers to a prompt."""
        token_ids = self.encode(prompt)
        room = self.config.max_token_length - len(token_ids)
        return await self.server.generate(token_ids, n, self.sampling(room))

    def trajectory(self, prompt: str | list[Message], completion: Completion, score: float) -> Trajectory:
        """Return a completion with its score, and with its messages if the settings include them."""
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = {"role": "assistant", "content": self.decode(completion)}
        return Trajectory.of(completion, score, [*asked, said] if self.config.include_messages else [])

    def tokenize(self, prompt: str | list[Message]) -> list[int]:
        """Return the token ids of a prompt of any length."""
        if isinstance(prompt, str):
            return cast("list[int]", self.tokenizer.encode(prompt))
        token_ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        return cast("list[int]", token_ids)

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            PromptTooLong: It leaves no room for an answer within `max_token_length`.
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
                fix="raise it, or shorten the prompts",
            )

    def decode(self, completion: Completion) -> str:
        """Return a completion's text without its end token: the special token at which sampling stopped.

        Models may have several, and the end of a turn need not be the tokenizer's `eos_token` (Gemma, Phi-3). Other
        special tokens stay visible: a policy must not be rewarded for tokens that the score does not see.
        """
        token_ids = completion.token_ids
        if not token_ids:  # a server without token ids: enough for an evaluation
            return completion.text
        last = token_ids[-1:]
        if completion.finish_reason != "length" and not self.tokenizer.decode(last, skip_special_tokens=True):
            token_ids = token_ids[:-1]
        return self._text(array("I", token_ids).tobytes())  # 4 bytes a token; a tuple takes 36

    def _decode(self, token_ids: bytes) -> str:
        return str(self.tokenizer.decode(array("I", token_ids).tolist(), skip_special_tokens=False))

    @classmethod
    def cli(cls, arguments: Sequence[str] | None = None) -> None:
        """Run the environment as a program (``serve``, ``process`` or ``evaluate``) and exit."""
        from environments.running.cli import main  # clients of the API and of servers, which only a program needs

        main(cls, arguments)
