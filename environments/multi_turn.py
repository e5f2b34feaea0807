"""`MultiTurnEnv`: environments that talk with the policy for several turns, and give it tools.

A class has `opening`, `respond` and `score_conversation`; docs/environments.md shows one. `tools()` returns Python
functions that the policy may call. Their results become messages to the policy.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, Literal

from pydantic import AliasChoices, Field
from typing_extensions import TypeVar

from environments.api import wire
from environments.base import BaseEnv, Item
from environments.config import BaseEnvConfig, ConfigError, UnusableRow
from environments.conversation import Conversation
from environments.peers.http import PeerError
from environments.scoring import OF_CODE, ScoreTimeout, error_of_code, gathered
from environments.tokenizers import render
from environments.tool_calls import ToolCall, ToolFormat, tool_calls, tool_format
from environments.trajectory import Message, Trajectory, group_without_failed
from grpo_common.trace import lane, stage

log = logging.getLogger(__name__)

Tool = Callable[..., Any]


class MultiTurnConfig(BaseEnvConfig):
    """Settings of environments with several turns."""

    max_turns: int = Field(default=8, ge=1, description="limit of the policy's turns")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        validation_alias=AliasChoices("max_tokens", "max_tokens_per_turn"),
        description="longest turn in tokens; unset: what max_token_length leaves",
    )
    tool_format: Literal["auto"] | ToolFormat = Field(
        default="auto", description="form in which the policy calls tools; auto: that of the chat template"
    )
    tool_timeout: float = Field(default=60.0, gt=0.0, description="time limit of one tool call, in seconds")


Config = TypeVar("Config", bound=MultiTurnConfig, default=MultiTurnConfig)


class MultiTurnEnv(BaseEnv[Item, Config], Generic[Item, Config]):
    """An environment whose items are conversations. Only the policy's own turns are trained."""

    name = ""
    env_config_cls = MultiTurnConfig
    _template_checked = False

    @abstractmethod
    def opening(self, item: Item) -> list[Message]:
        """Return the messages that the policy answers first."""

    async def respond(self, item: Item, talk: Conversation) -> list[Message] | None:
        """Return the messages that follow the policy's turn, or None if it was the last turn.

        By default these are the results of the tools that it called; None if it called none.
        """
        return await self.call_tools(talk.messages[-1]["content"]) or None

    @abstractmethod
    async def score_conversation(self, item: Item, talk: Conversation) -> float:
        """Return the score of the end, to which the rewards of single turns (`talk.reward`) are added."""

    def tools(self) -> Sequence[Tool]:
        """Return the functions that the policy may call; each has types, and a docstring in Google's style."""
        return ()

    async def call_tools(self, text: str) -> list[Message]:
        """Call the tools of a turn one after another and return their results; an error of a tool is its result.

        `--env.tool_format` says how the turn writes calls. A call inside thinking does not count.
        Coroutines are awaited. All other functions run in threads (`--env.max_threads`). `--env.tool_timeout` limits
        each call.
        """
        known = {tool.__name__: tool for tool in self.tools()}
        form = self.config.tool_format
        if form == "auto":
            form = tool_format(self.tokenizer.chat_template)
        schemas = [_schema(tool) for tool in known.values()] if form == "qwen3_coder" else ()
        messages: list[Message] = []
        for call in tool_calls(text, form, schemas) if known else ():
            if isinstance(call, str):
                messages.append({"role": "tool", "content": call})
            else:
                content = await self._call(known.get(call.name), call, list(known))
                messages.append({"role": "tool", "name": call.name, "content": content})
        return messages

    async def _call(self, tool: Tool | None, call: ToolCall, known: list[str]) -> str:
        if tool is None:
            return f"no such tool; known: {known}"
        try:
            result = await self.threads.call(partial(tool, **call.arguments), timeout=self.config.tool_timeout)
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except Exception as error:  # the policy chose the arguments, so it gets the error to read
            return f"{type(error).__name__}: {error}"

    async def collect_trajectories(self, item: Item) -> wire.ScoredData | None:
        """Return a group of `group_size` concurrent conversations about the item.

        A conversation whose code raises an error is tried again once. If it fails again, it counts as unscored: the
        others are trained on.

        Raises:
            Exception: the last error, if all conversations failed.
        """
        # An error that is raised here is one of the settings or of the server, and the others may still run.
        talks = await gathered(self._try(item, number) for number in range(self.config.group_size))
        return group_without_failed(talks)

    async def _try(self, item: Item, number: int) -> Trajectory | Exception:
        """Return a conversation, or its error if it fails twice; raise an error that is not of this one alone."""
        for is_last in (False, True):
            try:
                with lane(f"conversation {number}"):
                    trajectory = await self.converse(item)
                self.measures.add("failed", 0.0)
                return trajectory
            except (ConfigError, PeerError, UnusableRow):
                raise
            except OF_CODE as raised:
                error = error_of_code(raised)
                self.failures.log(self.name, item, error)
                if is_last or isinstance(error, ScoreTimeout):  # which has taken long enough
                    break
        self.measures.add("failed", 1.0)
        return error

    def begin(self, item: Item) -> Conversation:
        """Return the conversation about an item before the policy's first turn.

        Raises:
            PromptTooLong: Its messages leave no room for an answer.
            PromptRefused: The chat template refuses them.
        """
        opening, schemas = self.asked(self.opening(item)), [_schema(tool) for tool in self.tools()]
        assert not isinstance(opening, str), "an opening consists of messages"
        variables = self.config.chat_template_kwargs
        if schemas and not self._template_checked and self.tokenizer.chat_template:
            with_tools, without = (render(self.tokenizer, opening, tools, variables) for tools in (schemas, None))
            if with_tools == without:
                log.warning(
                    "the chat template of %s ignores tools(): the policy does not know of %s; take a model whose "
                    "template writes them, or name them in opening()",
                    self.config.tokenizer_name,
                    ", ".join(tool.__name__ for tool in self.tools()),
                )
        self._template_checked = True
        talk = Conversation(self.tokenizer, opening, schemas, variables)
        self.check_room(talk.tokens)
        return talk

    async def rehearse(self, item: Item, doing: Callable[[str], None]) -> str:
        """Try the beginning of a conversation without a server; see `BaseEnv.rehearse`."""
        doing("opening()")
        tokens = len(self.begin(item).tokens)
        doing("sampling()")
        room = self.config.max_token_length - tokens
        self.check_sampling(room)
        return f"a beginning of {tokens} tokens"

    async def converse(self, item: Item) -> Trajectory:
        """Run one conversation until it is over, or until its turns or its room are used up."""
        talk, longest = self.begin(item), self.config.max_token_length
        while True:
            room = longest - len(talk.tokens)
            (completion,) = await self.server.generate(talk.tokens, 1, self.sampling(room))
            talk.say(completion, self.decode(completion))
            heard = await self.respond(item, talk)
            if heard is None or talk.turns == self.config.max_turns or not talk.hear(heard, longest):
                break
        with stage("score"):
            score = await self.scoring.within(item, self.score_conversation(item, talk))
        self.measures.add("turns", talk.turns)
        return talk.trajectory(score, with_messages=self.config.include_messages)


@lru_cache(maxsize=256)  # parsed from the docstring, and needed for each conversation
def _schema(tool: Tool) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    return get_json_schema(tool)
