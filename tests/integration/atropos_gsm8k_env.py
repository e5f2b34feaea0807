"""GSM8K as an environment of Atropos, written with its library alone.

`python -m tests.integration.atropos_gsm8k_env serve` runs it. The questions are real; the model of the tests can't
answer them. So that groups have a spread of rewards all the same, a wrong answer earns up to a half for looking like a
number: for its share of digits and for its length.
"""

from __future__ import annotations

import re
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.type_definitions import Message
from datasets import load_dataset
from pydantic import Field

SHORT = 8
"""An answer of this many characters has the right length."""


class Gsm8kConfig(BaseEnvConfig):
    """The library's options and two more."""

    rows: str = Field(default="tests/data/gsm8k_rows.jsonl", description="JSONL file of questions and answers.")
    max_tokens: int = Field(default=16, description="Longest answer.")


def reward(answer: str, solution: str) -> float:
    """1 for the number after the solution's `####` as the answer's last number, else up to 0.5 for its looks."""
    wanted = solution.rpartition("####")[2].strip().replace(",", "")
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    if numbers and numbers[-1] == wanted:
        return 1.0
    digits = sum(character.isdigit() for character in answer) / max(1, len(answer))
    length = max(0.0, 1.0 - abs(len(answer) - SHORT) / SHORT)
    return 0.25 * digits + 0.25 * length


class Gsm8k(BaseEnv):
    """One question at a time; tokens and logprobs are those of the server, by the library's managed server."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig  # pyright: ignore[reportAssignmentType]  # the library declares an instance
    config: Gsm8kConfig

    @classmethod
    def config_init(cls) -> tuple[Gsm8kConfig, list[APIServerConfig]]:
        config = Gsm8kConfig(
            group_size=4,
            use_wandb=False,
            wandb_name=cls.name,
            total_steps=-1,  # the trainer's
            max_batches_offpolicy=2,
            steps_per_eval=0,
            include_messages=True,
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    async def setup(self) -> None:
        self.rows = load_dataset("json", data_files=self.config.rows, split="train")
        self.asked = 0

    async def get_next_item(self) -> dict[str, str]:
        row = self.rows[self.asked % len(self.rows)]
        self.asked += 1
        return row

    async def collect_trajectories(self, item: dict[str, str]) -> tuple[ScoredDataGroup, list[Any]]:
        question = Message(role="user", content=item["question"] + "\n", reward=None)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[question], n=self.config.group_size, max_tokens=self.config.max_tokens, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()  # pyright: ignore[reportCallIssue]  # filled one by one, as the library does
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        answers = [choice.message.content or "" for choice in completion.choices]
        group["scores"] = [reward(answer, item["answer"]) for answer in answers]
        group["messages"] = [[question, Message(role="assistant", content=answer, reward=None)] for answer in answers]
        return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing is held out."""


if __name__ == "__main__":
    Gsm8k.cli()
