"""Settings of environments of the `verifiers` library; they can be read where it is not installed."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from environments.config import BaseEnvConfig


def _from_json(value: Any) -> Any:
    """`grpo run` hands options on as they were typed."""
    return json.loads(value) if isinstance(value, str) else value


class VerifiersConfig(BaseEnvConfig):
    """Settings of environments of `verifiers`."""

    env_id: str = Field(description="the environment: a module or package with its taskset; ENV+TASKSET pairs two")
    env_args: Annotated[dict[str, Any], BeforeValidator(_from_json)] = Field(
        default_factory=dict, description='its own configuration, JSON: {"taskset": {"num_tasks": 5}}'
    )
    harness: str = Field(default="null", description="program that plays it where it brings none; null: a chat loop")
    renderer: str | None = Field(
        default=None, description="how conversations become tokens: qwen3, llama-3, …; unset: by the model's name"
    )
    agent: str | None = Field(default=None, description="whose turns are trained, where there are several agents")
    temperature: float = Field(default=1.0, gt=0.0, description="sampling temperature")
    max_tokens: int | None = Field(default=None, ge=1, description="longest turn in tokens; unset: all the room")
    max_turns: int | None = Field(default=None, ge=1, description="turns of a rollout, at most")
    max_concurrent_groups: int = Field(default=8, ge=1, description="groups generated at the same time, at most")
    max_concurrent_episodes: int = Field(default=32, ge=1, description="rollouts at the same time, each a process")
    episode_retries: int = Field(default=1, ge=0, description="how often a rollout that failed is played again")
    eval_tasks: int = Field(default=16, ge=1, description="tasks of an evaluation: the first, which are not trained on")
    eval_samples: int = Field(default=1, ge=1, description="rollouts of each of them")
