"""Settings of environments of the `verifiers` library; importing them does not require the library."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field, field_validator

from environments.config import BaseEnvConfig, JsonTable

T = TypeVar("T")


class VerifiersConfig(BaseEnvConfig):
    """Settings of environments of `verifiers`."""

    env_id: str = Field(description="the environment: a module or package with its taskset; ENV+TASKSET combines two")
    env_args: JsonTable = Field(
        default_factory=dict, description='its configuration as JSON: {"taskset": {"num_tasks": 5}}'
    )
    harness: str = Field(default="null", description="harness for environments without one; null: a chat loop")
    renderer: str | None = Field(
        default=None, description="renderer of conversations to tokens: qwen3, llama-3, …; unset: by the model's name"
    )
    agent: str | None = Field(default=None, description="agent to train if there are several")
    max_turns: int | None = Field(default=None, ge=1, description="limit of a rollout's turns")
    max_concurrent_groups: int | None = Field(default=8, ge=1, description="limit of groups generated at the same time")
    max_concurrent_episodes: int = Field(default=32, ge=1, description="limit of concurrent rollouts, each a process")
    episode_retries: int = Field(default=1, ge=0, description="retries of a failed rollout")
    eval_tasks: int = Field(default=16, ge=1, description="evaluation tasks: the first ones, which are not trained on")
    eval_samples: int = Field(default=1, ge=1, description="rollouts of each evaluation task")

    @field_validator("system_prompt", "chat_template_kwargs")
    @classmethod
    def _is_unset(cls, value: T) -> T:
        """Refuse options that do not reach the library: it renders prompts itself."""
        if value:
            raise ValueError("wanted unset for verifiers, which renders prompts itself; use --env.env_args")
        return value
