"""`BaseEnv`: what there is to write for an environment of one's own.

The least of them has items, a prompt for each and a score for each answer:

    class Capitals(BaseEnv[Country]):
        name = "capitals"

        async def setup(self) -> None:
            self.countries = cycle(load_countries())

        async def get_next_item(self) -> Country:
            return next(self.countries)

        def prompt(self, item: Country) -> str:
            return f"The capital of {item.name} is "

        def score(self, item: Country, answer: str) -> float:
            return float(answer.strip() == item.capital)

    if __name__ == "__main__":
        Capitals.cli()

An environment that needs more than one question and one answer writes `collect_trajectories` itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast

from typing_extensions import TypeVar

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, PromptTooLong
from environments.measures import Measures
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


class BaseEnv(ABC, Generic[Item, Config]):
    """An environment: where prompts come from and what answers are worth.

    Names follow Atropos' `BaseEnv`. The runner calls `setup` once, `get_next_item` and `collect_trajectories` for
    every group (several groups at a time, in one event loop), and `evaluate` when asked to.

    Attributes:
        config: The environment's settings.
        server: Client of the inference server.
        tokenizer: The model's tokenizer.
        curr_step: The trainer's step, as last heard; 0 without a trainer.
        measures: Figures to be told with each step: `self.measures.add("strict", 1.0)`.
        threads: Calls functions that take their time: `await self.threads.call(function, argument)`.
        scoring: Gives up a group that scores for too long: `await self.scoring.within(item, coroutine)`.
    """

    name: ClassVar[str]
    program: ClassVar[str | None] = None  # how messages call its command, where it is not the class's own module
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    score_in_thread: ClassVar[bool] = True  # False: it takes no time, or uses signals, which only the main thread may

    def __init__(self, config: Config, server: Inference, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Subclasses that need a constructor of their own call this one; most need only `setup`."""
        self.config = config
        self.server = server
        self.tokenizer = tokenizer
        self.curr_step = 0
        self.measures = Measures()
        self.threads = Threads(config.max_threads)
        self.scoring = Scoring(config.score_timeout)
        self.teacher = Teacher.of(config)
        self._text = lru_cache(maxsize=1024)(self._decode)  # each answer is wanted twice: to score and to show it

    async def setup(self) -> None:
        """Loads what is needed, once, before anything else is called."""
        return

    @abstractmethod
    async def get_next_item(self) -> Item | None:
        """The next item to work on; None when there are no more."""

    def state(self) -> dict[str, Any]:
        """What to save beside the trainer's checkpoints, as JSON can hold it; empty: nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave in a run that is resumed; called after `setup`."""
        return

    async def close(self) -> None:
        """Gives back what `setup` took, once, after everything else; also when `setup` failed."""
        return

    def prompt(self, item: Item) -> str | list[Message]:
        """The item's prompt: plain text, or messages for the model's chat template."""
        raise NotImplementedError(f"{type(self).__name__} writes neither prompt() nor collect_trajectories()")

    def score(self, item: Item, answer: str) -> float:
        """What one answer (see `decode`) is worth.

        Runs in a thread, the answers of a group one after another, several groups at a time (`score_in_thread`).
        """
        raise NotImplementedError(f"{type(self).__name__} writes neither score() nor collect_trajectories()")

    async def score_group(self, item: Item, completions: Sequence[Completion]) -> list[float]:
        """What each answer of a group is worth: where `score` needs to wait, or to see how an answer ended."""
        answers = [self.decode(completion) for completion in completions]
        if self.score_in_thread:
            return await self.threads.call(self._scores, item, answers)
        return self._scores(item, answers)

    def _scores(self, item: Item, answers: Sequence[str]) -> list[float]:
        return [self.score(item, answer) for answer in answers]

    def sampling(self, room: int) -> Sampling:
        """How answers are sampled, where `room` tokens are left by the prompt; by default all, at temperature 1."""
        return Sampling(max_tokens=room)

    async def collect_trajectories(self, item: Item) -> wire.ScoredData | None:
        """One scored group for the item, or None if it came to nothing (which the runner counts)."""
        prompt = self.prompt(item)
        completions = await self.complete(prompt, self.config.group_size)
        with stage("score"):
            scores = await self.scoring.within(item, self.score_group(item, completions))
        pairs = zip(completions, scores, strict=True)
        return scored_group([self.trajectory(prompt, completion, score) for completion, score in pairs])

    async def scored(self, item: Item) -> wire.ScoredData | None:
        """The item's group as it is sent: with what a teacher says of it, if there is one."""
        group = await self.collect_trajectories(item)
        return group if group is None or self.teacher is None else await self.teacher.annotate(group)

    @abstractmethod
    async def evaluate(self) -> dict[str, float]:
        """Metrics of the policy as it is now; `accuracy` should be among them."""

    async def complete(self, prompt: str | list[Message], n: int) -> list[Completion]:
        """`n` sampled answers to a prompt."""
        token_ids = self.encode(prompt)
        room = self.config.max_token_length - len(token_ids)
        return await self.server.generate(token_ids, n, self.sampling(room))

    def trajectory(self, prompt: str | list[Message], completion: Completion, score: float) -> Trajectory:
        """A completion with its score, and with its messages if they are wanted."""
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = {"role": "assistant", "content": self.decode(completion)}
        return Trajectory.of(completion, score, [*asked, said] if self.config.include_messages else [])

    def tokenize(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt, of whatever length."""
        if isinstance(prompt, str):
            return cast("list[int]", self.tokenizer.encode(prompt))
        token_ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        return cast("list[int]", token_ids)

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptTooLong: It leaves no room for an answer within `max_token_length`.
        """
        token_ids = self.tokenize(prompt)
        self.check_room(token_ids)
        return token_ids

    def check_room(self, token_ids: list[int]) -> None:
        """Refuses a prompt that leaves no room.

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
        """A completion's text without the token that ended it.

        Other special tokens stay visible: a policy must not be paid for what nobody sees.
        """
        token_ids = completion.token_ids
        if not token_ids:  # a server that tells no ids: enough for an evaluation
            return completion.text
        if token_ids[-1] == self.tokenizer.eos_token_id:
            token_ids = token_ids[:-1]
        return self._text(tuple(token_ids))

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @classmethod
    def cli(cls, arguments: Sequence[str] | None = None) -> None:
        """Runs the environment as a program (``serve``, ``process`` or ``evaluate``) and exits."""
        from environments.running.cli import main  # the command line knows environments, not the other way round

        main(cls, arguments)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model folder or hub name.

    Raises:
        ConfigError: There is none.
    """
    from transformers import AutoTokenizer  # imports torch where it is installed: seconds, so not at the top

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        is_path = name.startswith((".", "/", "~"))
        reason = "no such folder" if is_path and not Path(name).is_dir() else str(error).splitlines()[0]
        raise ConfigError(
            field="--env.tokenizer_name", got=f"{name} ({reason})", wanted="a tokenizer", fix="name a model's folder"
        ) from None
