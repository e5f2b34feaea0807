"""What an environment hands on: scored trajectories, and groups of them as the wire carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from environments.api import wire
from environments.peers.http import PeerError
from environments.peers.inference import Completion

Message = dict[str, Any]
"""One message of a conversation: `role`, `content` and whatever else a chat template knows."""

NO_SPREAD = 1e-4
"""A standard deviation of rewards below this is rounding."""


@dataclass(frozen=True, slots=True)
class TurnReward:
    """What one turn earned: the tokens up to `end` led to it, those after it did not."""

    end: int
    value: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One scored sequence, token by token.

    Attributes:
        tokens: Prompt and completion, or all turns of a conversation.
        trained: Whether the policy sampled the token, and so is trained on it.
        rollout_logprobs: The sampling policy's logprob of each token; `wire.MASKED_LOGPROB` where not trained.
        score: The reward.
        policy_version: Oldest version of the policy that sampled any of it; None if the server counts none.
        messages: The same as text, for people to read.
        temperature: At which it was sampled; the trainer's logits are divided by it, or ratios would be wrong.
        turn_rewards: What single turns earned; `score` is their sum and the end's.
    """

    tokens: list[int]
    trained: list[bool]
    rollout_logprobs: list[float]
    score: float
    policy_version: int | None
    messages: list[Message]
    temperature: float = 1.0
    turn_rewards: tuple[TurnReward, ...] = ()

    @classmethod
    def of(cls, completion: Completion, score: float, messages: Sequence[Message] = ()) -> Trajectory:
        """One completion of one prompt.

        Raises:
            PeerError: The server gave text without token ids.
        """
        prompt, sampled = completion.prompt_token_ids, ids_of(completion)
        return cls(
            tokens=prompt + sampled,
            trained=[False] * len(prompt) + [True] * len(sampled),
            rollout_logprobs=[wire.MASKED_LOGPROB] * len(prompt) + completion.rollout_logprobs,
            score=score,
            policy_version=completion.policy_version,
            messages=list(messages),
            temperature=completion.temperature,
        )

    def within(self, length: int) -> Trajectory:
        """The same, cut after `length` tokens: what was heard last may not have left room for an answer."""
        rewards = tuple(replace(reward, end=min(reward.end, length)) for reward in self.turn_rewards)
        return replace(
            self,
            tokens=self.tokens[:length],
            trained=self.trained[:length],
            rollout_logprobs=self.rollout_logprobs[:length],
            turn_rewards=rewards,
        )


def ids_of(completion: Completion) -> list[int]:
    """The sampled token ids.

    Raises:
        PeerError: The server gave text without them.
    """
    if completion.text and not completion.token_ids:
        raise PeerError(
            "text can be evaluated but not trained on, since tokenising it again gives other tokens",
            field="the inference server",
            got="text without token ids",
            wanted="token_ids",
            fix="use grpo serve, vLLM or SGLang",
        )
    return completion.token_ids


def scored_group(trajectories: Sequence[Trajectory]) -> wire.ScoredData:
    """The trajectories of one item as the rollout API takes them."""
    messages = [trajectory.messages for trajectory in trajectories]
    temperatures = [trajectory.temperature for trajectory in trajectories]
    versions = [t.policy_version for t in trajectories if t.policy_version is not None]
    same = len(set(temperatures)) == 1
    return wire.ScoredData(
        tokens=[trajectory.tokens for trajectory in trajectories],
        masks=[
            [token if trained else wire.IGNORED for token, trained in zip(t.tokens, t.trained, strict=True)]
            for t in trajectories
        ],
        scores=[trajectory.score for trajectory in trajectories],
        advantages=turn_advantages(trajectories),
        inference_logprobs=[trajectory.rollout_logprobs for trajectory in trajectories],
        policy_versions=versions if len(versions) == len(trajectories) else None,
        messages=messages if any(messages) else None,
        generation_params={"temperature": temperatures[0]} if same else None,
        overrides=None if same else [{"temperature": temperature} for temperature in temperatures],
    )


def turn_advantages(trajectories: Sequence[Trajectory]) -> list[list[float]] | None:
    """Advantages token by token where turns have rewards of their own; None where none has.

    All rewards of the group, each trajectory's end included, are put on one scale (less their mean, by their standard
    deviation); a token's advantage is the sum of those that came after it. Source: process supervision with GRPO,
    Z. Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    if not any(trajectory.turn_rewards for trajectory in trajectories):
        return None
    rewards = [_all_rewards(trajectory) for trajectory in trajectories]
    values = [reward.value for own in rewards for reward in own]
    mean, spread = fmean(values), pstdev(values)
    if spread < NO_SPREAD:
        return [[0.0] * len(trajectory.tokens) for trajectory in trajectories]
    return [
        [
            sum((reward.value - mean) / spread for reward in own if place < reward.end) if trained else 0.0
            for place, trained in enumerate(trajectory.trained)
        ]
        for trajectory, own in zip(trajectories, rewards, strict=True)
    ]


def _all_rewards(trajectory: Trajectory) -> list[TurnReward]:
    """The turns' rewards and what is left of the score, which the end earned."""
    rest = trajectory.score - sum(reward.value for reward in trajectory.turn_rewards)
    end = len(trajectory.tokens)
    return [*trajectory.turn_rewards, *([TurnReward(end, rest)] if abs(rest) > 1e-9 else [])]
