"""An environment of Atropos, its library unmodified, trains a model; and its client meets a full queue.

Rows of GSM8K, answers of a real vLLM on the CPU, our rollout API, `grpo train`: four processes. The questions are real;
the model of the tests can't answer them. So that groups have a spread of rewards all the same, a wrong answer earns up
to a half for looking like a number: for its share of digits and for its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import re
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from environments.api import wire
from tests.processes import ROOT, alive, free_port, running, tail, wait_for
from tests.rollout_api import running_server
from tests.runs import flags, jsonl

pytestmark = pytest.mark.timeout(600)

STEPS = 3
GROUP_SIZE = 4
BATCH_SIZE = 8
ROWS = ROOT / "tests" / "data" / "gsm8k_rows.jsonl"
SHORT = 8
"""An answer of this many characters has the right length."""


def reward(answer: str, solution: str) -> float:
    """1 for the number after the solution's `####` as the answer's last number, else up to 0.5 for its looks."""
    wanted = solution.rpartition("####")[2].strip().replace(",", "")
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    if numbers and numbers[-1] == wanted:
        return 1.0
    digits = sum(character.isdigit() for character in answer) / max(1, len(answer))
    length = max(0.0, 1.0 - abs(len(answer) - SHORT) / SHORT)
    return 0.25 * digits + 0.25 * length


def serve_environment() -> None:
    """`python -m tests.integration.test_atropos serve …`: the environment, by the library's own command."""
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.type_definitions import Message
    from datasets import load_dataset

    class Gsm8k(BaseEnv):
        """One question at a time; tokens and logprobs are those of the server, by the library's managed server."""

        name = "gsm8k"

        @classmethod
        def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
            config = BaseEnvConfig(
                group_size=GROUP_SIZE,
                use_wandb=False,
                wandb_name=cls.name,
                total_steps=-1,  # the trainer's
                max_batches_offpolicy=2,
                steps_per_eval=0,
                include_messages=True,
            )
            return config, [APIServerConfig(server_type="vllm", api_key="none")]

        async def setup(self) -> None:
            self.items = itertools.cycle(load_dataset("json", data_files=str(ROWS), split="train"))

        async def get_next_item(self) -> Any:
            return next(self.items)

        async def collect_trajectories(self, item: Any) -> tuple[ScoredDataGroup, list[Any]]:
            question = Message(role="user", content=item["question"] + "\n", reward=None)
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                completion = await managed.chat_completion(
                    messages=[question], n=self.config.group_size, max_tokens=16, temperature=1.0
                )
                nodes = managed.get_state()["nodes"]
            answers = [choice.message.content or "" for choice in completion.choices]
            group: Any = {
                "tokens": [node.tokens for node in nodes],
                "masks": [node.masked_tokens for node in nodes],
                "inference_logprobs": [node.logprobs for node in nodes],
                "scores": [reward(answer, item["answer"]) for answer in answers],
                "messages": [[question, Message(role="assistant", content=each, reward=None)] for each in answers],
            }
            return group, []

        async def evaluate(self, *_: Any, **__: Any) -> None:
            """Nothing is held out."""

    Gsm8k.cli()


def commands(model: Path, folder: Path, api: str, server: str) -> dict[str, list[str]]:
    """The four processes, by the names of their logs."""
    run = folder / "run"
    server_port = server.rpartition(":")[2]
    serve = {"model": model, "port": server_port, "max-model-len": 1024, "max-lora-rank": 8}
    serve |= {"lora-root": run / "adapters", "kv-cache-memory-bytes": 64 << 20}
    env = {"env.tokenizer_name": model, "env.rollout_server_url": api, "openai.base_url": f"{server}/v1"}
    env |= {"env.data_path_to_save_groups": folder / "groups.jsonl", "openai.model_name": model}
    train = {"model": model, "weight-bridge-mode": "lora_only", "vllm-port": server_port, "atropos-url": api}
    train |= {"lora-r": 8, "lr": 1e-3, "seq-len": 768, "batch-size": BATCH_SIZE, "gradient-accumulation-steps": 1}
    train |= {"training-steps": STEPS, "save-path": run, "log-dir": run}
    return {
        "api": ["-m", "environments.api", "--port", api.rpartition(":")[2]],
        "server": ["-m", "vllm_server", *flags(serve)],
        "env": ["-m", "tests.integration.test_atropos", "serve", *flags(env)],
        "trainer": ["-m", "grpo_trainer", "train", *flags(train)],
    }


def wait_for_the_end(name: str, processes: dict[str, subprocess.Popen[bytes]], logs: dict[str, Path]) -> None:
    """Wait until the process ends by itself, with 0, while the servers keep running."""

    def ended() -> bool:
        for service in ("api", "server"):
            assert processes[service].poll() is None, f"the {service} ended\n{tail(logs[service])}"
        return processes[name].poll() is not None

    wait_for(f"the {name} is done", ended, logs[name], 240)
    assert processes[name].returncode == 0, tail(logs[name])


def in_sessions(leaders: set[int]) -> list[int]:
    """What still runs of the processes and all that they started."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) in leaders:
                found.append(pid)
    return alive(found)


def test_a_real_environment_delivers_to_the_trainer_and_both_end_by_themselves(demo_model: Path, tmp_path: Path):
    pytest.importorskip("atroposlib", reason="needs the original's library: pip install atroposlib==0.4.0")
    pytest.importorskip("datasets", reason="the environment reads its rows with it: pip install datasets")
    api, server = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    logs = {name: tmp_path / f"{name}.log" for name in ("api", "server", "env", "trainer")}
    offline = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(running(*command, log=logs[name], env=offline))
            for name, command in commands(demo_model, tmp_path, api, server).items()
        }
        wait_for_the_end("trainer", processes, logs)
        wait_for_the_end("env", processes, logs)
        status = httpx.get(f"{api}/status", trust_env=False).json()
        newest = httpx.get(f"{api}/latest_example", trust_env=False).json()
        overview = httpx.get(f"{api}/overview", trust_env=False).json()
    leaders = {process.pid for process in processes.values()}
    wait_for("nothing is left running", lambda: not in_sessions(leaders), logs["server"], 30)
    assert overview["refused"] == 0, overview["refusals"]
    assert "Traceback" not in logs["api"].read_text()
    assert status["current_step"] == STEPS
    (environment,) = status["environments"]
    assert environment["name"] == "gsm8k_0"
    assert environment["received_groups"] >= STEPS * BATCH_SIZE // GROUP_SIZE
    assert newest["env_id"] == environment["env_id"] == 0
    groups = jsonl(tmp_path / "groups.jsonl")
    check_groups(groups)
    check_steps(jsonl(tmp_path / "run" / "metrics.jsonl"), groups)


def check_groups(groups: list[dict[str, Any]]) -> None:
    """What the environment sent: answers to rows of GSM8K, with the server's tokens and logprobs."""
    questions = {row["question"] + "\n" for row in jsonl(ROWS)}
    assert {group["messages"][0][0]["content"] for group in groups} <= questions
    for group in groups:
        assert len(group["tokens"]) == GROUP_SIZE and len(set(group["scores"])) > 1
        for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(mask) == len(logprobs)
            assert all(lp == 1.0 if m == -100 else lp <= 0.0 for lp, m in zip(logprobs, mask, strict=True))


def check_steps(rows: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Every step trained on two groups of that environment, with its logprobs."""
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(isinstance(value, int | float) and math.isfinite(value) for row in rows for value in row.values())
    means = [statistics.fmean(group["scores"]) for group in groups]
    pairs = [(one + other) / 2 for one, other in itertools.combinations(means, BATCH_SIZE // GROUP_SIZE)]
    for row in rows:
        assert any(math.isclose(row["reward/mean"], mean, abs_tol=1e-6) for mean in pairs), row
        assert row["reward/env_0"] == pytest.approx(row["reward/mean"])
        assert row["batch/sequences"] == BATCH_SIZE and row["batch/sequences_trained"] > 0 and not row["train/skipped"]
        assert row["logprobs/rollout_mean"] < -0.01, "the environment's logprobs did not arrive"
        assert row["train/changed_fraction"] > 0
    first = rows[0]  # sampled by the very policy that was trained: later steps have samples of older ones
    assert first["alignment/logprob_diff_mean"] < 1e-3 and first["alignment/logprob_diff_max"] < 1e-2
    assert first["grpo/mean_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert [row["publish/version"] for row in rows] == [first["publish/version"] + step for step in range(STEPS)]


def test_the_original_client_survives_a_full_queue() -> None:
    original = pytest.importorskip("atroposlib.envs.base", reason="needs the original's client").BaseEnv
    row = list(range(8192))
    with running_server("--max-queued-mb", "1") as server, httpx.Client(base_url=server.url) as api:
        client: Any = SimpleNamespace(config=SimpleNamespace(rollout_server_url=server.url), env_id=None)
        client._post_json_with_compression = functools.partial(original._post_json_with_compression, client)

        def queued_after_sending() -> int:
            group = {"tokens": [row, row], "masks": [row, row], "scores": [0.0, 1.0]}
            asyncio.run(original._send_scored_data_to_api(client, group))
            asyncio.run(original._send_scored_data_to_api(client, [group]))
            return api.get("/status").json()["queue_size"]

        sizes = [queued_after_sending() for _ in range(5)]
        assert sizes == [2, 4, 6, 8, 8]  # of 128 KiB each and a little: the eighth fills the queue
        api.post("/reset_data", headers={"Content-Type": wire.JSON})
        assert queued_after_sending() == 2


if __name__ == "__main__":
    serve_environment()
