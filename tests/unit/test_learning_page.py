"""The environment that docs/learning.md shows is run as it stands there, and its flags are options."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from environments.config import ServerConfig
from environments.demo_model.model import build_tokenizer
from grpo_trainer.config.options import build, unique_leaves
from grpo_trainer.config.train import TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "learning.md").read_text()


class Client:
    """In the place of the client: its answer is the name of the policy that it asks."""

    def __init__(self, config: ServerConfig, *, patience: float) -> None:
        self.config = config

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Any) -> list[str]:
        return [f"{self.config.base_url} {self.config.model_name}"] * n


def test_the_late_environment_asks_the_policy_of_some_steps_ago() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    shown: dict[str, Any] = {"__name__": "page"}
    exec(code, shown)
    shown["InferenceClient"] = Client
    config = shown["LateConfig"](tokenizer_name="demo", server_url="http://127.0.0.1:9001")
    env = shown["Late"](config, Client(ServerConfig(), patience=1.0), build_tokenizer())

    async def scene() -> list[list[str]]:
        await env.setup()
        answers = []
        for step in (0, 2, 10):
            env.curr_step = step
            answers.append(await env.complete("12+34=", 2))
        return answers

    asked = [f"http://127.0.0.1:9001 policy-v{version}" for version in (0, 0, 7)]  # max(0, step - 3)
    assert asyncio.run(scene()) == [[name, name] for name in asked]


ROWS = re.findall(r"^\| [^|]+ \| `(--ratio-against [^`]+)` \|", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("flags", ROWS)
def test_the_flags_of_the_table_build_a_configuration(flags: str) -> None:
    words = shlex.split(flags)
    given = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    build(TrainConfig, {"model_name": "m", **given})


def test_every_flag_of_the_trainer_that_the_page_names_is_there() -> None:
    known = {"--no-prefetch", *(flag for leaf in unique_leaves(TrainConfig) for flag in leaf.flags)}
    others = {"--config", "--run-dir", "--env", "--server", "--out", "--title", "--y"}
    others |= {"--kv-cache-memory-bytes", "--no-deps", "--released"}  # vLLM's, pip's, and other commands'
    others |= {"--lrs", "--trl-lrs", "--steps", "--more"}  # scripts/benchmarks/trl_learn.py
    assert ROWS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - others <= known
