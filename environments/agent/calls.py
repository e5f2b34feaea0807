"""The calls of an episode, and the sequences that they are trained as. Pure.

An agent's calls make a tree. A call whose prompt begins with an earlier call's prompt and answer continues that call:
both are one sequence, in which what the agent or its tools wrote is not trained. Any other call begins a sequence, a
branch. So every sampled token is trained once, in the context in which it was sampled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
    """A sequence of one or more calls, token by token. `ends` has the place after the answer of each call."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[tuple[Call, int]] = field(default_factory=list)


def branches(calls: Sequence[Call]) -> list[Branch]:
    """Return the sequences of an episode's calls, which are in the order in which they were answered.

    A call continues the longest sequence with which its prompt begins.
    """
    found: list[Branch] = []
    keys: list[bytes] = []  # tokens of the sequences as bytes, sorted
    of_key: dict[bytes, list[Branch]] = {}
    for call in calls:
        prompt = array("q", call.prompt_ids).tobytes()
        # All keys with which a text begins stand before it. If the nearest one is no such key, then they are
        # beginnings of what both have in common.
        while (at := bisect_right(keys, prompt)) and not prompt.startswith(keys[at - 1]):
            size = min(len(prompt), len(keys[at - 1])) // 8
            same = np.frombuffer(prompt, "q", size) == np.frombuffer(keys[at - 1], "q", size)
            prompt = prompt[: 8 * (size if same.all() else int(same.argmin()))]
        if at:
            branch = of_key[keys.pop(at - 1)].pop()
        else:
            found.append(branch := Branch())
        heard = call.prompt_ids[len(branch.tokens) :]
        branch.tokens = call.prompt_ids + call.token_ids
        branch.trained += [False] * len(heard) + [True] * len(call.token_ids)
        branch.logprobs += [wire.MASKED_LOGPROB] * len(heard) + call.logprobs
        branch.ends.append((call, len(branch.tokens)))
        key = array("q", branch.tokens).tobytes()
        insort(keys, key)
        of_key.setdefault(key, []).append(branch)
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
