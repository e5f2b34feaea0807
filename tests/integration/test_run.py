"""`grpo run` with a real vLLM server, the rollout API, an environment and the trainer: refused, ended, resumed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from grpo_trainer.cli import main
from grpo_trainer.launch import plan
from tests.processes import ROOT, assert_ended, family, running, tail, wait_for
from tests.runs import (
    arguments,
    assert_fresh,
    finished,
    jsonl,
    newest,
    of_mode,
    rows,
    started,
    trained,
    wait_for_step,
)

pytestmark = pytest.mark.timeout(600)


def test_ctrl_c_leaves_nothing_behind_but_a_run_that_goes_on(demo_model: Path, tmp_path: Path) -> None:
    """Two trainer processes train and stop as one; one alone resumes."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    # not 1, so that a temperature lost on the way would show in the logprobs
    with started(demo_model, run_dir, log, training_steps=500, env__temperature=0.7, trainer_gpus=2) as process:
        wait_for_step(run_dir, 2, process, log)
        members = family(process.pid)
        commands = "\n".join(members.values())
        for module in ("environments.api", "vllm_server", "environments.arithmetic", "grpo_trainer train"):
            assert f"-m {module}" in commands
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 30) == 130
    assert_ended(members)
    assert f"grpo run --resume {run_dir}" in log.read_text()
    before, stopped_at = rows(run_dir), newest(run_dir)
    assert before[-1]["step"] == stopped_at
    assert_fresh(before)
    assert "rank 1 of 2 trainer processes" in (run_dir / "logs" / "trainer-1.log").read_text()

    after = trained(demo_model, run_dir, training_steps=stopped_at + 2, resume="auto", env__temperature=0.7)
    assert [row["step"] for row in after] == list(range(1, stopped_at + 3))
    assert after[stopped_at]["publish/version"] == before[-1]["publish/version"] + 1
    assert (run_dir / "checkpoints" / "adapter_final" / "adapter_model.safetensors").exists()
    for row in after:
        assert 0 <= row["reward/mean"] <= 1 and row["rollout/staleness_max"] <= 4
    assert_fresh(after)
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()

    said = refused(*arguments(demo_model, run_dir))
    assert said.startswith("grpo: --run-dir: ") and str(run_dir) in said and "--resume auto" in said


def refused(*words: str, code: int = 2) -> str:
    """Return the message of a run that ends before its first step, with exit status `code`."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_busy_port_is_told_with_its_holder_before_anything_starts(tmp_path: Path, busy_port: int) -> None:
    said = refused(*arguments(tmp_path, tmp_path / "run", server__port=busy_port))
    assert f"grpo: --server.port: got {busy_port}, " in said and f"pid {os.getpid()} " in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["run", "train"])
def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path, command: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    train = ["-m", "grpo_trainer", "train", "--model", str(tmp_path), "--weight-bridge-mode", "lora_only"]
    train += ["--save-path", str(tmp_path / "run")]
    # In a run, the server or the trainer reads the model first, and the run ends with what it says.
    words, code = (arguments(tmp_path, tmp_path / "run"), 1) if command == "run" else (train, 2)
    said = refused(*words, code=code)
    assert "BertForMaskedLM" in said and str(tmp_path) in said


def test_a_server_that_does_not_start_ends_the_run_with_its_own_words(demo_model: Path, tmp_path: Path) -> None:
    options = of_mode("none", **{"server.extra-args": "--kv-cache-memory-bytes,1"})
    said = refused(*arguments(demo_model, tmp_path / "run", **options), code=1)
    assert re.search(r"server: .*exit code 1", said, re.IGNORECASE) and str(tmp_path / "run/logs/server.log") in said
    assert "Error: " in said  # the server's own reason


def test_a_full_disk_stops_the_run_with_the_place(demo_model: Path, tmp_path: Path, small_disk: Path) -> None:
    run_dir, log = small_disk / "run", tmp_path / "log"
    said = refused(*arguments(demo_model, run_dir, training_steps=500))
    assert said.startswith("grpo: --run-dir: ") and str(run_dir) in said, "what can be known is reported at once"
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    with started(demo_model, run_dir, log, training_steps=500) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:  # until there is no room
            while True:
                ballast.write(bytes(1 << 16))
        assert finished(process, log) == 1, tail(log)
    said = log.read_text()
    # Either may write first: the trainer its checkpoint, or the API its queue.
    assert os.strerror(errno.ENOSPC) in said or re.search(r"\bdisk\b.*\bfull\b", said)
    assert str(small_disk) in said
    assert_ended(members)


LIMIT = 10.0
"""Seconds that the rollout API has to be ready here: more than it takes, fewer than the run takes."""


def test_a_run_with_keys_outlasts_the_time_to_be_ready(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = {"training_steps": 100_000, "checkpoint_interval": 0, "rollout_api_key": "door-of-the-api"}
    _, _, *words = arguments(demo_model, run_dir, **options)
    command = ["-m", "tests.integration.test_run", *words]
    with running(*command, log=log, env={"VLLM_API_KEY": "door-of-the-server"}) as process:

        def has_outlasted() -> bool:
            done = rows(run_dir)
            return process.poll() is not None or (len(done) > 2 and done[-1]["time"] - done[0]["time"] > LIMIT)

        wait_for("steps for longer than the limit", has_outlasted, log, 400)
        assert process.poll() is None, tail(log)
        process.terminate()
        assert finished(process, log, 60) == 143, tail(log)
    said = log.read_text() + "".join(path.read_text() for path in (run_dir / "logs").glob("*.log"))
    assert "api: ready after" in said and "door-of-" not in said
    assert "door-of-" not in json.dumps(jsonl(run_dir / "metrics.jsonl"))


if __name__ == "__main__":
    plan.API_START_SECONDS = LIMIT
    main()
