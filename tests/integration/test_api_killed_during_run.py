"""`kill -9` of the rollout API 20 times under a real run: server, environment and trainer continue by themselves."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.processes import answers, free_port, running, tail, wait_for
from tests.runs import rows

pytestmark = pytest.mark.timeout(900)

KILLS = 10
STEPS = 90  # more than the kills take
GROUPS_PER_STEP = 8
GROUP_SIZE = 8


def test_nothing_is_lost_and_no_step_is_trained_twice(demo_model: Path, tmp_path: Path) -> None:
    run, store, groups = tmp_path / "run", tmp_path / "queue.sqlite", tmp_path / "groups.jsonl"
    api, server = free_port(), free_port()
    url = f"http://127.0.0.1:{api}"
    logs = {name: tmp_path / f"{name}.log" for name in ("api", "server", "env", "trainer")}
    api_words = ["-m", "environments.api", "--port", str(api), "--store", str(store)]
    serve = ["-m", "vllm_server", "--model", str(demo_model), "--port", str(server), "--max-model-len", "64"]
    serve += ["--max-lora-rank", "8", "--lora-root", str(run / "adapters")]
    env = ["-m", "environments.arithmetic", "serve", "--env.tokenizer_name", str(demo_model)]
    env += ["--env.rollout_server_url", url, "--openai.base_url", f"http://127.0.0.1:{server}/v1"]
    env += ["--env.group_size", str(GROUP_SIZE), "--env.data_path_to_save_groups", str(groups)]
    train = ["-m", "grpo_trainer", "train", "--model", str(demo_model), "--weight-bridge-mode", "lora_only"]
    train += ["--vllm-port", str(server), "--atropos-url", url, "--lora-r", "8", "--seq-len", "64", "--lr", "1e-4"]
    train += ["--batch-size", str(GROUPS_PER_STEP * GROUP_SIZE), "--gradient-accumulation-steps", "1"]
    train += [
        "--training-steps",
        str(STEPS),
        "--save-path",
        str(run),
        "--log-dir",
        str(run),
        "--rollout-timeout",
        "120",
    ]

    with ExitStack() as stack:
        stack.enter_context(running(*serve, log=logs["server"]))
        wait_for("the server", lambda: answers(f"http://127.0.0.1:{server}/health"), logs["server"])
        environment = stack.enter_context(running(*env, log=logs["env"]))
        trainer = stack.enter_context(running(*train, log=logs["trainer"]))
        for kill in range(KILLS):
            with running(*api_words, log=logs["api"]) as process:
                wait_for("the API is back", lambda: answers(url + "/"), logs["api"], 60)
                time.sleep(0.3 + 0.05 * kill)  # another moment of the run each time
                assert trainer.poll() is None, f"the run was over before kill {kill}\n{tail(logs['trainer'])}"
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        stack.enter_context(running(*api_words, log=logs["api"]))
        wait_for("the trainer is done", lambda: trainer.poll() is not None, logs["trainer"], 300)
        wait_for("the environment has left", lambda: environment.poll() is not None, logs["env"], 60)
        status = httpx.get(f"{url}/status", trust_env=False).json()
        assert trainer.returncode == 0, tail(logs["trainer"])
        assert environment.returncode == 0, tail(logs["env"])

    done = rows(run)
    assert [row["step"] for row in done] == list(range(1, STEPS + 1))
    assert status["current_step"] == STEPS
    trained = sum(int(row["batch/sequences"]) for row in done)
    assert trained == STEPS * GROUPS_PER_STEP * GROUP_SIZE
    sent = len(groups.read_text().splitlines())
    assert sent * GROUP_SIZE == trained + status["queued_sequences"]  # nothing lost, nothing twice
