"""An environment of Atropos, its library unmodified, trains a model.

Rows of GSM8K, answers of a real vLLM on the CPU, our rollout API, `grpo train`: four processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.processes import ROOT, alive, free_port, running, tail, wait_for

pytestmark = pytest.mark.timeout(600)

STEPS = 5
GROUP_SIZE = 4
BATCH_SIZE = 8
ROWS = ROOT / "tests" / "data" / "gsm8k_rows.jsonl"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def commands(model: Path, folder: Path, api: str, server: str) -> dict[str, list[str]]:
    """The four processes, by the names of their logs."""
    run = folder / "run"
    server_port = server.rpartition(":")[2]
    serve = {
        "model": model,
        "port": server_port,
        "max-model-len": 1024,
        "max-lora-rank": 8,
        "lora-root": run / "adapters",
        "kv-cache-memory-bytes": 64 << 20,
    }
    env = {
        "env.rows": ROWS,
        "env.tokenizer_name": model,
        "env.rollout_server_url": api,
        "env.group_size": GROUP_SIZE,
        "env.data_path_to_save_groups": folder / "groups.jsonl",
        "openai.base_url": f"{server}/v1",
        "openai.model_name": model,
    }
    train = {
        "model": model,
        "weight-bridge-mode": "lora_only",
        "vllm-port": server_port,
        "atropos-url": api,
        "lora-r": 8,
        "lr": 1e-3,
        "seq-len": 768,
        "batch-size": BATCH_SIZE,
        "gradient-accumulation-steps": 1,
        "training-steps": STEPS,
        "save-path": run,
        "log-dir": run,
    }
    return {
        "api": ["-m", "environments.api", "--port", api.rpartition(":")[2]],
        "server": ["-m", "vllm_server", *flags(serve)],
        "env": ["-m", "tests.integration.atropos_gsm8k_env", "serve", *flags(env)],
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
        requests = httpx.get(f"{api}/metrics", trust_env=False).text.splitlines()
    leaders = {process.pid for process in processes.values()}
    wait_for("nothing is left running", lambda: not in_sessions(leaders), logs["server"], 30)
    assert not [line for line in requests if 'status="4' in line or 'status="5' in line]
    assert status["current_step"] == STEPS
    (environment,) = status["environments"]
    assert environment["name"] == "gsm8k_0"
    assert environment["received_groups"] >= STEPS * BATCH_SIZE // GROUP_SIZE
    assert newest["env_id"] == environment["env_id"] == 0
    check_groups(read_jsonl(tmp_path / "groups.jsonl"))
    check_steps(read_jsonl(tmp_path / "run" / "metrics.jsonl"), read_jsonl(tmp_path / "groups.jsonl"))


def check_groups(groups: list[dict[str, Any]]) -> None:
    """What the environment sent: answers to rows of GSM8K, with the server's tokens and logprobs."""
    questions = {row["question"] + "\n" for row in read_jsonl(ROWS)}
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
