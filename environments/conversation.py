"""A conversation of several turns, token by token, as the policy saw and sampled it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from environments.api import wire
from environments.config import ConfigError, PromptRefused
from environments.peers.inference import Completion
from environments.tokenizers import THINK, Tools, is_special, longest_token, opens_thinking, prompt_ids, render
from environments.trajectory import Message, Trajectory, TurnReward, ids_of, oldest_version
from vllm_server.protocol.routed_experts import joined

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """The conversation so far, as messages and as exact tokens.

    Sampled tokens stay as the server returned them. Of later messages, only the text that the chat template adds after
    the policy's turn is tokenised; the policy's own text is never tokenised again. Some templates drop thinking from
    earlier turns. Here it stays, because the policy must be trained on what it saw.

    A turn has one end token: the one that the policy sampled, or else the template's.

    Attributes:
        messages: All messages, for people and for scoring. A turn whose thinking the template opened, by `<think>` at
            the end of the prompt, begins with `<think>`.
        tokens: All messages as token ids; the next prompt.
        trained: Whether the policy sampled the token.
        rollout_logprobs: As in `Trajectory`.
        turns: Number of the policy's turns.
        truncated: Whether the conversation reached a limit of its tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        tools: Tools = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin with messages that the policy answers; raise PromptRefused if the chat template refuses them.

        `variables` are further ones of the chat template (`--env.chat_template_kwargs`).
        """
        self.messages = list(messages)
        self.truncated = False
        self._tokenizer, self._tools, self._variables = tokenizer, tools, variables
        self.tokens = prompt_ids(tokenizer, self.messages, tools, variables)
        self.trained = [False] * len(self.tokens)
        self.rollout_logprobs = [wire.MASKED_LOGPROB] * len(self.tokens)
        self._ended = False  # whether the policy's latest turn has an end token
        self._said: list[Completion] = []
        self._turn_rewards: list[TurnReward] = []

    @property
    def turns(self) -> int:
        return len(self._said)

    def say(self, completion: Completion, text: str) -> None:
        """Add the policy's turn: a completion of `tokens`, and its text for readers.

        Raises:
            ValueError: It is a completion of another prompt.
            PeerError: The server returned text without token ids.
        """
        if completion.prompt_token_ids != self.tokens:
            raise ValueError("prompt_token_ids are not those of this conversation")
        sampled = ids_of(completion)
        if opens_thinking(self._tokenizer, self.tokens):
            text = THINK + text
        was_cut = completion.finish_reason == "length"
        self.truncated |= was_cut
        self._ended = not was_cut and bool(sampled) and is_special(self._tokenizer, sampled[-1])
        self.tokens = self.tokens + sampled
        self.trained += [True] * len(sampled)
        self.rollout_logprobs += completion.rollout_logprobs
        self.messages.append({"role": "assistant", "content": text})
        self._said.append(replace(completion, prompt_token_ids=[]))  # else each turn keeps all turns before it

    def hear(self, messages: Sequence[Message], longest: float = math.inf) -> bool:
        """Add the messages of a user or a tool after the policy's turn; the policy answers next.

        Return whether they leave room for an answer within `longest` tokens. If not, nothing is added, so that the last
        message is still the policy's.
        """
        room = longest - len(self.tokens)
        said = sum(len(text.strip()) for each in messages if isinstance(text := each.get("content"), str))
        # To render and to tokenise megabytes takes minutes, in which nothing else of the environment goes on.
        fits = said < room * longest_token(self._tokenizer)
        tokens = self._tokens_after_the_turn(messages) if fits else []
        if not fits or len(tokens) >= room:
            self.truncated = True
            return False
        self.tokens = self.tokens + tokens
        self.trained += [False] * len(tokens)
        self.rollout_logprobs += [wire.MASKED_LOGPROB] * len(tokens)
        self.messages += messages
        return True

    def reward(self, value: float) -> None:
        """Reward the policy's latest turn, in addition to the score at the end."""
        self._turn_rewards.append(TurnReward(len(self.tokens), float(value)))

    def trajectory(self, score: float | None, *, with_messages: bool = True) -> Trajectory:
        """Return the whole conversation with a score for its end, to which the turns' rewards are added."""
        return Trajectory(
            tokens=self.tokens,
            trained=self.trained,
            rollout_logprobs=self.rollout_logprobs,
            score=None if score is None else score + sum(reward.value for reward in self._turn_rewards),
            policy_version=oldest_version([each.policy_version for each in self._said]),
            messages=self.messages if with_messages else [],
            temperature=self._said[-1].temperature if self._said else 1.0,
            turn_rewards=tuple(self._turn_rewards),
            cuts={name: value for each in self._said for name, value in each.cuts.items()},
            routed_experts=joined([each.routed_experts for each in self._said]),
            truncated=self.truncated,
        )

    def _tokens_after_the_turn(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the template adds after the policy's turn, without a second end token.

        The template renders the turn with a marker instead of the policy's text. The tokens that follow the marker both
        with further messages and without them close the turn. Up to their first special token, they are left out if
        the policy has ended the turn itself, with that token or with another one.
        """
        marker = uuid.uuid4().hex
        turn = [*self.messages[:-1], {**self.messages[-1], "content": marker}]
        ids = self._ids_after(marker, [*turn, *messages], answered=True)
        last = self.tokens[-1] if self.trained[-1] else None
        try:
            closing = self._ids_after(marker, turn, answered=False)
        except PromptRefused:  # a template that wants a user's message at the end
            closing = []
        for place, (token, other) in enumerate(zip(ids, closing, strict=False)):
            if token != other:
                break
            if token == last or is_special(self._tokenizer, token):
                return ids[place + 1 :] if self._ended or token == last else ids
        # GLM-4 ends a turn with the token that begins the next one.
        return ids[1:] if self._ended and ids[:1] == [last] else ids

    def _ids_after(self, marker: str, messages: Sequence[Message], *, answered: bool) -> list[int]:
        """Return the tokens of what the template writes after a marker. Raise ConfigError if it does not write it, and
        PromptRefused if it refuses the messages.

        The turn's end token stands before the text while it is tokenised: some tokenizers put a space before the first
        word of a text.
        """
        text = render(self._tokenizer, messages, self._tools, self._variables, answered=answered)
        _, found, after = text.rpartition(marker)
        if not found:
            raise ConfigError(
                field="--env.tokenizer_name",
                got="a chat template without the assistant's turns",
                wanted="a template that writes them",
            )
        last = self.tokens[-1]
        before = str(self._tokenizer.decode([last])) if self._ended else ""
        ids = cast("list[int]", self._tokenizer.encode(before + after, add_special_tokens=False))
        return ids[1:] if before and ids[:1] == [last] else ids
