"""Settings of environments of the `verifiers` library; importing them does not require the library."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from environments.config import BaseEnvConfig


def _from_json(value: Any) -> Any:
    """Decode JSON text: `grpo run` passes options as text."""
    return json.loads(value) if isinstance(value, str) else value


class VerifiersConfig(BaseEnvConfig):
    """Settings of environments of `verifiers`."""

    env_id: str = Field(description="the environment: a module or package with its taskset; ENV+TASKSET combines two")
    env_args: Annotated[dict[str, Any], BeforeValidator(_from_json)] = Field(
        default_factory=dict, description='its configuration as JSON: {"taskset": {"num_tasks": 5}}'
    )
    harness: str = Field(default="null", description="harness for environments without one; null: a chat loop")
    renderer: str | None = Field(
        default=None, description="renderer of conversations to tokens: qwen3, llama-3, …; unset: by the model's name"
    )
    agent: str | None = Field(default=None, description="agent to train if there are several")
    temperature: float = Field(default=1.0, gt=0.0, description="sampling temperature")
    max_tokens: int | None = Field(default=None, ge=1, description="longest turn in tokens; unset: all the room left")
    max_turns: int | None = Field(default=None, ge=1, description="limit of a rollout's turns")
    max_concurrent_groups: int | None = Field(default=8, ge=1, description="limit of groups generated at the same time")
    max_concurrent_episodes: int = Field(default=32, ge=1, description="limit of concurrent rollouts, each a process")
    episode_retries: int = Field(default=1, ge=0, description="retries of a failed rollout")
    eval_tasks: int = Field(default=16, ge=1, description="evaluation tasks: the first ones, which are not trained on")
    eval_samples: int = Field(default=1, ge=1, description="rollouts of each evaluation task")
