"""What an environment hands on: scored trajectories, and groups of them as the wire carries them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from environments.api import wire
from environments.inference import Completion

Message = dict[str, Any]
"""One message of a conversation: `role`, `content` and whatever else a chat template knows."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One scored sequence, token by token.

    Attributes:
        tokens: Prompt and completion.
        trained: Whether the policy sampled the token, and so is trained on it.
        rollout_logprobs: The sampling policy's logprob of each token; `wire.MASKED_LOGPROB` where not trained.
        score: The reward.
        policy_version: Version of the policy that sampled it.
        messages: The same as text, for people to read.
        temperature: At which it was sampled; the trainer's logits are divided by it, or ratios would be wrong.
    """

    tokens: list[int]
    trained: list[bool]
    rollout_logprobs: list[float]
    score: float
    policy_version: int
    messages: list[Message]
    temperature: float = 1.0

    @classmethod
    def of(cls, completion: Completion, score: float, messages: Sequence[Message] = ()) -> "Trajectory":
        """One completion of one prompt."""
        prompt, sampled = completion.prompt_token_ids, completion.token_ids
        return cls(
            tokens=prompt + sampled,
            trained=[False] * len(prompt) + [True] * len(sampled),
            rollout_logprobs=[wire.MASKED_LOGPROB] * len(prompt) + completion.rollout_logprobs,
            score=score,
            policy_version=completion.policy_version,
            messages=list(messages),
            temperature=completion.temperature,
        )


def scored_group(trajectories: Sequence[Trajectory]) -> wire.ScoredData:
    """The trajectories of one item as the rollout API takes them."""
    messages = [trajectory.messages for trajectory in trajectories]
    temperatures = [trajectory.temperature for trajectory in trajectories]
    same = len(set(temperatures)) == 1
    return wire.ScoredData(
        tokens=[trajectory.tokens for trajectory in trajectories],
        masks=[
            [token if trained else wire.IGNORED for token, trained in zip(t.tokens, t.trained, strict=True)]
            for t in trajectories
        ],
        scores=[trajectory.score for trajectory in trajectories],
        inference_logprobs=[trajectory.rollout_logprobs for trajectory in trajectories],
        policy_versions=[trajectory.policy_version for trajectory in trajectories],
        messages=messages if any(messages) else None,
        generation_params={"temperature": temperatures[0]} if same else None,
        overrides=None if same else [{"temperature": temperature} for temperature in temperatures],
    )
