"""Scored trajectories, and groups of them in the wire's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import msgspec

from environments.api import wire
from environments.config import ConfigError
from environments.peers.http import PeerError
from environments.peers.inference import Completion
from grpo_common.sampling import WHOLE_VOCABULARY, cuts

Message = dict[str, Any]
"""One message of a conversation: `role`, `content` and further keys of a chat template."""

NO_SPREAD = 1e-4
"""A standard deviation of rewards below this counts as rounding error."""


def trained_tokens(mask: Sequence[int]) -> int:
    """Return the number of tokens of a sequence that are trained on, by its mask."""
    return len(mask) - mask.count(wire.IGNORED)


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward of one turn, which credits the tokens from `begin` to before `end`."""

    end: int
    value: float
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One scored sequence, token by token.

    Attributes:
        tokens: Prompt and completion, or all turns of a conversation.
        trained: Whether the policy sampled the token, so that it is trained on.
        rollout_logprobs: The sampling policy's logprob of each token; `wire.MASKED_LOGPROB` where not trained.
        score: The reward; None: no reward applies, so no token is trained and the group's baseline leaves it out.
        policy_version: Oldest policy version that sampled a part of it; None if the server has no versions.
        messages: The same as text, for people to read.
        temperature: Sampling temperature. The trainer divides its logits by it, which correct ratios require.
        turn_rewards: Rewards of single turns; `score` is their sum plus the reward of the end.
        cuts: As in `Completion`.
        routed_experts: As in `Completion`; tokens after the policy's last turn have none.
        truncated: Whether it reached a limit of its tokens.
        branches: Lengths of the sequences that it consists of, one after another; empty: it is one sequence.
    """

    tokens: list[int]
    trained: list[bool]
    rollout_logprobs: list[float]
    score: float | None
    policy_version: int | None
    messages: list[Message]
    temperature: float = 1.0
    turn_rewards: tuple[TurnReward, ...] = ()
    cuts: Mapping[str, float] = field(default_factory=dict)
    routed_experts: bytes | None = None
    truncated: bool = False
    branches: tuple[int, ...] = ()

    @classmethod
    def of(cls, completion: Completion, score: float | None, messages: Sequence[Message] = ()) -> Trajectory:
        """Return the trajectory of one completion of one prompt.

        Raises:
            PeerError: The server returned text without token ids.
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
            cuts=completion.cuts,
            routed_experts=completion.routed_experts,
            truncated=completion.finish_reason == "length",
        )


def ids_of(completion: Completion) -> list[int]:
    """Return the sampled token ids; raise PeerError if the server returned text without them."""
    if completion.text and not completion.token_ids:
        raise PeerError(
            "text can be evaluated but not trained on, since tokenising it again may give other tokens",
            field="the inference server",
            got="text without token ids",
            wanted="token_ids",
            fix="use grpo serve or vLLM",
        )
    return completion.token_ids


def oldest_version(versions: Sequence[int | None]) -> int | None:
    """Return the oldest policy version of a trajectory's completions; None if there is none, or if one has none."""
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def unscored_like(good: Trajectory) -> Trajectory:
    """Return what stands for a failed trajectory, so that its group keeps its size: the first token of a sound one."""
    return Trajectory(
        tokens=good.tokens[:1],
        trained=[False],
        rollout_logprobs=[wire.MASKED_LOGPROB],
        score=None,
        policy_version=good.policy_version,
        messages=[],
        temperature=good.temperature,
        cuts=good.cuts,
    )


def group_without_failed(outcomes: Sequence[Trajectory | Exception]) -> wire.ScoredData:
    """Return the group of one item; a trajectory that failed counts as unscored. If all did, raise the last error."""
    good = next((each for each in outcomes if isinstance(each, Trajectory)), None)
    if good is None:
        raise next(each for each in reversed(outcomes) if isinstance(each, Exception))
    return scored_group([each if isinstance(each, Trajectory) else unscored_like(good) for each in outcomes])


def scored_group(trajectories: Sequence[Trajectory]) -> wire.ScoredData:
    """Return the trajectories of one item in the rollout API's form."""
    messages = [trajectory.messages for trajectory in trajectories]
    sampling = [{"temperature": trajectory.temperature, **trajectory.cuts} for trajectory in trajectories]
    experts = [trajectory.routed_experts or b"" for trajectory in trajectories]
    versions = [t.policy_version for t in trajectories if t.policy_version is not None]
    same = all(each == sampling[0] for each in sampling)
    overrides = [
        {
            **({} if same else own),
            **({wire.TRUNCATED: True} if trajectory.truncated else {}),
            **({wire.UNSCORED: True} if trajectory.score is None else {}),
            **({wire.BRANCHES: [*trajectory.branches]} if trajectory.branches else {}),
        }
        for own, trajectory in zip(sampling, trajectories, strict=True)
    ]
    return wire.ScoredData(
        tokens=[trajectory.tokens for trajectory in trajectories],
        masks=[
            [
                token if trained and t.score is not None else wire.IGNORED
                for token, trained in zip(t.tokens, t.trained, strict=True)
            ]
            for t in trajectories
        ],
        scores=[0.0 if t.score is None else float(t.score) for t in trajectories],  # True, and numbers of numpy, too
        advantages=turn_advantages(trajectories),
        inference_logprobs=[trajectory.rollout_logprobs for trajectory in trajectories],
        policy_versions=versions if len(versions) == len(trajectories) else None,
        messages=messages if any(messages) else None,
        generation_params=sampling[0] if same else None,
        overrides=overrides if any(overrides) else None,
        routed_experts=experts if any(experts) else None,
    )


def check_whole_vocabulary(params: Mapping[str, Any], where: str) -> None:
    """Raise a ConfigError for a sampling parameter that leaves out tokens; `where` is what to correct.

    The trainer computes a token's probability among all tokens.
    """
    for name, value in cuts(params).items():
        raise ConfigError(
            field=where, got=f"{name}={value:g}", wanted="no such parameter", fix=f"leave it out: {WHOLE_VOCABULARY}"
        )


def check_sampled_from_all(group: wire.ScoredData, name: str) -> None:
    """Raise a ConfigError for a group of the environment `name` that was sampled from a part of the vocabulary."""
    whole = {**(group.generation_params or {}), **(group.group_overrides or {})}
    for own in group.overrides or [{}]:
        if not own.get("sft", whole.get("sft")):  # imitated sequences were not sampled by the policy
            check_whole_vocabulary(
                {**whole, **own}, f"{name}: Sampling of sampling(), or of server.generate() in collect_trajectories()"
            )


def truncated_of(group: wire.ScoredData) -> list[bool]:
    """Return for each sequence of a group whether it reached a limit of its tokens."""
    return [bool(own.get(wire.TRUNCATED)) for own in group.overrides or [{}] * len(group.tokens)]


def without(group: wire.ScoredData, drop: Sequence[bool], *, scored: bool) -> wire.ScoredData:
    """Return the group without trained tokens in the sequences to `drop`.

    Their scores count in the group's baseline if they are `scored`.
    """
    masks = [[wire.IGNORED] * len(mask) if dropped else mask for mask, dropped in zip(group.masks, drop, strict=True)]
    if scored:
        return msgspec.structs.replace(group, masks=masks)
    overrides = zip(group.overrides or [{} for _ in drop], drop, strict=True)
    return msgspec.structs.replace(
        group,
        masks=masks,
        overrides=[{**own, wire.UNSCORED: True} if dropped else own for own, dropped in overrides],
        scores=[0.0 if dropped else score for score, dropped in zip(group.scores, drop, strict=True)],
    )


def turn_advantages(trajectories: Sequence[Trajectory]) -> list[list[float]] | None:
    """Return per-token advantages if turns have rewards; None if none has.

    All rewards of the group, including those of the trajectories' ends, are normalised together (minus their mean,
    divided by their standard deviation). A token's advantage is the sum of the rewards that came after it. Source:
    process supervision with GRPO, Z. Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.3.

    An end without reward counts as 0, unless all rewards are those of turns.

    Unscored trajectories have no part in it. The trainer's `--scale-rewards` does not apply: the division by the
    standard deviation is a part of this method, and the trainer takes advantages as they come.
    """
    if not any(trajectory.turn_rewards for trajectory in trajectories):
        return None
    rests = [
        None if t.score is None else t.score - sum(reward.value for reward in t.turn_rewards) for t in trajectories
    ]
    pairs = list(zip(trajectories, rests, strict=True))
    in_turns = all(t.turn_rewards and abs(rest) <= 1e-9 for t, rest in pairs if rest is not None)
    rewards = [
        [] if rest is None else [*t.turn_rewards, *([] if in_turns else [TurnReward(len(t.tokens), rest)])]
        for t, rest in pairs
    ]
    values = [reward.value for own in rewards for reward in own]
    mean, spread = (fmean(values), pstdev(values)) if values else (0.0, 0.0)
    if spread < NO_SPREAD:
        return [[0.0] * len(trajectory.tokens) for trajectory in trajectories]
    return [
        [
            sum((reward.value - mean) / spread for reward in own if reward.begin <= place < reward.end)
            if trained
            else 0.0
            for place, trained in enumerate(trajectory.trained)
        ]
        for trajectory, own in zip(trajectories, rewards, strict=True)
    ]
