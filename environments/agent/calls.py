"""The calls of an episode, and the sequences that they are trained as. Pure.

An agent's calls make a tree. A call whose prompt begins with an earlier call's prompt and answer continues that call:
both are one sequence, in which what the agent or its tools wrote is not trained. Any other call begins a sequence, a
branch. So every sampled token is trained once, in the context in which it was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.api import wire
from environments.trajectory import Message, Trajectory, TurnReward


@dataclass(slots=True, eq=False)
class Call:
    """One completion of the policy, in the engine's own tokens.

    Attributes:
        reward: what the agent gave it by `client.reward`; None: nothing.
    """

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: int | None
    truncated: bool = False
    reward: float | None = None


@dataclass(slots=True)
class Branch:
    """A sequence of one or more calls, token by token. `ends` has the place after the answer of each call; `key` is
    the tokens as bytes, which are compared without a copy."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[tuple[Call, int]] = field(default_factory=list)
    key: bytes = b""

    def add(self, call: Call) -> None:
        """Continue with a call, whose prompt begins with `tokens`."""
        heard = call.prompt_ids[len(self.tokens) :]
        self.tokens = call.prompt_ids + call.token_ids
        self.key = array("q", self.tokens).tobytes()
        self.trained += [False] * len(heard) + [True] * len(call.token_ids)
        self.logprobs += [wire.MASKED_LOGPROB] * len(heard) + call.logprobs
        self.ends.append((call, len(self.tokens)))


def branches(calls: Sequence[Call]) -> list[Branch]:
    """Return the sequences of an episode's calls, which are in the order in which they were answered."""
    found: list[Branch] = []
    for call in calls:
        prompt = array("q", call.prompt_ids).tobytes()
        fitting = (one for one in found if prompt.startswith(one.key))
        branch = max(fitting, key=lambda one: len(one.key), default=None)
        if branch is None:
            found.append(branch := Branch())
        branch.add(call)
    return found


def episode(
    calls: Sequence[Call], score: float | None, *, temperature: float, messages: Sequence[Message] = ()
) -> Trajectory:
    """Return an episode as one unit: its sequences one after another, with the lengths of each.

    Args:
        score: of the episode's end; None: no reward applies. Rewards of single calls are added.
    """
    joined, lengths, rewards = Branch(), list[int](), list[TurnReward]()
    for branch in branches(calls):
        begin = len(joined.tokens)
        rewards += [TurnReward(begin + end, call.reward, begin) for call, end in branch.ends if call.reward is not None]
        joined.tokens += branch.tokens
        joined.trained += branch.trained
        joined.logprobs += branch.logprobs
        lengths.append(len(branch.tokens))
    versions = [call.version for call in calls]
    known = [version for version in versions if version is not None]
    return Trajectory(
        tokens=joined.tokens,
        trained=joined.trained,
        rollout_logprobs=joined.logprobs,
        score=None if score is None else score + sum(each.value for each in rewards),
        policy_version=min(known) if known and len(known) == len(versions) else None,
        messages=[*messages],
        temperature=temperature,
        turn_rewards=tuple(rewards) if score is not None else (),
        truncated=any(call.truncated for call in calls),
        branches=tuple(lengths) if len(lengths) > 1 else (),
    )
