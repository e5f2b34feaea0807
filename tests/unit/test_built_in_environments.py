"""Every built-in environment serves, processes, evaluates, resumes, and refuses a wrong key."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from environments.__main__ import environment_class
from environments.api.service import Service
from environments.api.settings import Settings
from environments.base import BaseEnv
from environments.config import ConfigError
from environments.data_config import DataConfig, RewardConfig
from environments.demo_model.model import build_tokenizer
from environments.items import Shuffled, Stream
from environments.running import cli
from environments.running.groups import set_up
from environments.running.settings_check import BUILT_IN, BuiltIn
from environments.scoring import settled
from tests.stand_ins import Scripted, registration, serving, trained

TOKENIZER = build_tokenizer()
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_rows.jsonl"
KNOWN = {**BUILT_IN, "synthetic": BuiltIn("environments.synthetic", "SyntheticConfig")}

Options = Callable[[Path], dict[str, Any]]
ROWS: dict[str, Options] = {
    "arithmetic": lambda folder: {},
    "dataset": lambda folder: {"data": DataConfig(path=str(folder / "train.jsonl"), held_out=4)},
    "gsm8k": lambda folder: {"dataset_path": folder, "eval_questions": 2},
    "synthetic": lambda folder: {"prompt_tokens": 8, "completion_mean": 2.0},
    "word_problems": lambda folder: {"eval_questions": 4},
}
"""Further options; a new environment has one row. `verifiers` needs its library, and has an integration test."""


@pytest.fixture(params=ROWS)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., BaseEnv[Any, Any]]:
    """Makes the environment before a policy that says 46 or 7."""
    name, found = request.param, KNOWN[request.param]
    for split in ("train", "test"):
        shutil.copy(GSM8K, tmp_path / f"{split}.jsonl")

    def make(**changes: Any) -> BaseEnv[Any, Any]:
        module = import_module(found.settings_module or found.module)
        options = ROWS[name](tmp_path) | changes
        data = options.pop("data", None)
        config = getattr(module, found.settings)(tokenizer_name="m", group_size=2, **options)
        server = Scripted(TOKENIZER, lambda _: ["46<|endoftext|>", "7<|endoftext|>"])
        env: BaseEnv[Any, Any] = environment_class(module)(config, server, TOKENIZER)
        if data is not None:
            env.data, env.rewards = data, (RewardConfig(function="exact_match"),)
        return env

    return make


async def test_environment_serves(build: Callable[..., BaseEnv[Any, Any]]) -> None:
    service, env = Service(Settings()), build(max_batches_offpolicy=1)
    await service.register(registration(8, max_token_len=2048, num_steps=2))
    task = asyncio.create_task(serving(env, service, asyncio.Event()))
    batches = await trained(service, 2, task)
    assert [sum(len(group.tokens) for group in batch) for batch in batches] == [8, 8]
    await asyncio.wait_for(task, 30)
    await env.close()


def test_environment_processes(build: Callable[..., BaseEnv[Any, Any]], tmp_path: Path) -> None:
    async def scene() -> None:
        env = build(data_path_to_save_groups=tmp_path / "groups.jsonl")
        await cli.process(env, 3)
        await env.close()

    asyncio.run(scene())
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [len(group["scores"]) for group in groups] == [2, 2, 2]
    assert "<h1>" in (tmp_path / "groups.html").read_text()
    with pytest.raises(ConfigError) as again:  # never over a file
        asyncio.run(scene())
    assert str(tmp_path / "groups.jsonl") in str(again.value)
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == 3


async def test_builtin_evaluates(build: Callable[..., BaseEnv[Any, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    env = build()
    await cli.evaluate(env)
    await env.close()
    name = env.name
    metrics = json.loads(capsys.readouterr().out)
    assert metrics.pop("env") == name and metrics.get("rows_failed", 0) == 0 and len(metrics) > 0


async def test_environment_resumes_with_the_items_that_were_next(build: Callable[..., BaseEnv[Any, Any]]) -> None:
    async def items(env: BaseEnv[Any, Any], count: int) -> list[Any]:
        return [await settled(env.get_next_item()) for _ in range(count)]

    first, second = build(), build()
    await set_up(first)
    await set_up(second)
    await items(first, 3)
    second.restore(json.loads(json.dumps(first.state())))
    assert await items(first, 4) == await items(second, 4)
    assert first.state() == second.state()
    for env in (first, second):
        await env.close()


@pytest.mark.parametrize("make", [lambda: Shuffled(range(10), seed=3), lambda: Stream(count(10))])
def test_items_go_on_from_a_position(make: Callable[[], Any]) -> None:
    whole, resumed = [*islice(make(), 25)], make()
    resumed.position = 13
    assert [*islice(resumed, 12)] == whole[13:] and resumed.position == 25


def test_items_of_a_pass_and_of_a_stream() -> None:
    first, second = ([*islice(Shuffled(range(10), seed=seed), 20)] for seed in (3, 4))
    assert sorted(first[:10]) == sorted(first[10:]) == list(range(10))
    assert first[:10] != first[10:] and first != second

    stream = Stream([1, 2])
    stream.position = 5
    assert [*stream] == [] and stream.position == 2
