"""Training in a server's own memory, with a real vLLM: on a CPU its weights lie in a file that both processes map."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.errors import BridgeError
from grpo_trainer.policy import build_policy
from tests.integration.serving import Serving, serving, shared_server
from tests.processes import answers, free_port, running, tail, wait_for
from tests.runs import finished, newest, rows, wait_for_step
from tests.shared_contract import WRITES, SharedContract, settings

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder, "--shared-weights", "--bridge-config-path", str(folder / "bridge.json")) as running_server:
        yield running_server


def test_one_process_follows_each_step_hands_over_and_heals(server: Serving, tmp_path: Path) -> None:
    SharedContract([server], tmp_path).follows_each_step_hands_over_and_heals()


def test_one_process_that_died_writing(server: Serving, tmp_path: Path) -> None:
    SharedContract([server], tmp_path).heals_after_a_trainer_that_died_writing()


@pytest.mark.parametrize("options", WRITES, ids=str)
def test_one_process_writes_while_requests_run(server: Serving, tmp_path: Path, options: dict[str, Any]) -> None:
    SharedContract([server], tmp_path).writes_while_requests_run(**options)


def test_a_server_that_shares_nothing_is_told_how_to(tmp_path: Path) -> None:
    plain = shared_server()
    config = settings(plain.model_folder, tmp_path, [port := plain.url.rpartition(":")[2]])
    with pytest.raises(BridgeError) as refused:
        build_policy(config)
    assert port in refused.value.field and "--shared-weights" in refused.value.fix


# ---------------------------------------------------------------- whole runs


def test_a_trainer_that_was_killed_attaches_anew_to_the_server_that_lived_on(demo_model: Path, tmp_path: Path) -> None:
    api, port = free_port(), free_port()
    run_dir = tmp_path / "run"
    logs = {name: tmp_path / f"{name}.log" for name in ("api", "server", "env", "train")}
    model = str(demo_model)
    served = ["--model", model, "--port", str(port), "--max-model-len", "64", "--kv-cache-memory-bytes", str(64 << 20)]
    environment = ["--env.tokenizer_name", model, "--env.rollout_server_url", f"http://127.0.0.1:{api}"]
    environment += ["--openai.base_url", f"http://127.0.0.1:{port}/v1", "--openai.model_name", model]
    environment += ["--openai.server_type", "vllm", "--openai.api_key", "x", "--env.group_size", "8"]
    words = ["-m", "grpo_trainer", "train", "--model", model, "--single-copy", "--vllm-port", str(port)]
    words += ["--atropos-url", f"http://127.0.0.1:{api}", "--save-path", str(run_dir), "--batch-size", "32"]
    words += ["--gradient-accumulation-steps", "1", "--lr", "1e-4", "--seq-len", "64", "--checkpoint-interval", "2"]
    with ExitStack() as stack:
        stack.enter_context(running("-m", "environments.api", "--port", str(api), log=logs["api"]))
        server = stack.enter_context(running("-m", "vllm_server", *served, "--shared-weights", log=logs["server"]))
        stack.enter_context(running("-m", "environments.arithmetic", "serve", *environment, log=logs["env"]))
        with running(*words, "--training-steps", "500", log=logs["train"]) as trainer:
            wait_for_step(run_dir, 5, trainer, logs["train"])
            wait_for("a checkpoint is whole", lambda: newest(run_dir) > 0, logs["train"])
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.wait()
        assert server.poll() is None and answers(f"http://127.0.0.1:{port}/health")
        saved = newest(run_dir)
        last = rows(run_dir)[-1]
        steps = str(saved + 3)
        with running(*words, "--training-steps", steps, "--resume", "auto", log=logs["train"]) as trainer:
            assert finished(trainer, logs["train"]) == 0, tail(logs["train"])
    done = rows(run_dir)
    assert [row["step"] for row in done] == list(range(1, saved + 4))
    assert done[-1]["publish/version"] > last["publish/version"], "a version is never used twice"
    said = logs["train"].read_text()
    (written,) = re.findall(r"wrote the checkpoint's weights into the server's memory, as version (\d+)", said)
    assert int(written) > last["publish/version"]
    assert said.count("bridge proved") == 2 and "WARNING grpo_trainer.alignment.drift" not in said
