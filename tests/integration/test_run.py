"""`grpo run` with a real vLLM server, the rollout API, the arithmetic environment and the trainer."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import ROOT, alive, family, tail
from tests.runs import arguments, finished, member, rows, started, wait_for_step

pytestmark = pytest.mark.timeout(600)


def test_ctrl_c_leaves_nothing_behind_but_a_run_that_goes_on(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    # not 1, so that a temperature lost on the way would show in the logprobs
    with started(demo_model, run_dir, log, training_steps=500, env__temperature=0.7) as process:
        wait_for_step(run_dir, 2, process, log)
        members = family(process.pid)
        commands = "\n".join(members.values())
        for module in ("environments.api", "vllm_server", "environments.arithmetic", "grpo_trainer train"):
            assert f"-m {module}" in commands
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 30) == 130
    assert not alive(list(members)), members
    assert f"grpo run --resume {run_dir}" in log.read_text()
    stopped_at = max(int(path.name.split("_")[-1]) for path in (run_dir / "checkpoints").glob("adapter_step_*"))
    before = rows(run_dir)
    assert before[-1]["step"] == stopped_at

    with started(
        demo_model, run_dir, log, training_steps=stopped_at + 2, resume="auto", env__temperature=0.7
    ) as process:
        assert finished(process, log) == 0, tail(log)
    after = rows(run_dir)
    assert [row["step"] for row in after] == list(range(1, stopped_at + 3))
    assert after[stopped_at]["publish/version"] == before[-1]["publish/version"] + 1
    assert (run_dir / "checkpoints" / "adapter_final" / "adapter_model.safetensors").exists()
    for row in after:
        assert 0 <= row["reward/mean"] <= 1 and row["rollout/staleness_max"] <= 4
    fresh = [row for row in after if row["rollout/staleness_max"] == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)  # same weights, same logprobs
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()

    refused = subprocess.run(
        [sys.executable, *arguments(demo_model, run_dir)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert refused.returncode == 2 and refused.stderr.startswith("grpo: --run-dir: ")
    assert str(run_dir) in refused.stderr and "--resume auto" in refused.stderr


@pytest.mark.parametrize(("module", "name"), [("vllm_server", "server"), ("environments.arithmetic", "env-arithmetic")])
def test_a_killed_process_stops_the_run_with_its_name(demo_model: Path, tmp_path: Path, module: str, name: str) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(demo_model, run_dir, log, training_steps=500, max_restarts=0) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        os.kill(member(process, module), signal.SIGKILL)
        assert finished(process, log, 60) == 1
    said = log.read_text()
    assert re.search(rf"{name}: .*SIGKILL", said, re.IGNORECASE) and "Traceback" not in said
    assert not alive(list(members))


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
    assert not alive(list(members))


def refused(*words: str, code: int = 2) -> str:
    """Return the message of a run that ends before its first step, with exit status `code`."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_busy_port_is_told_with_its_holder_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        said = refused(*arguments(tmp_path, tmp_path / "run", server__port=port))
    assert f"grpo: --server.port: got {port}, " in said and f"pid {os.getpid()} " in said
    assert not (tmp_path / "run").exists()


def test_a_wrong_model_path_is_told_before_anything_starts(tmp_path: Path) -> None:
    said = refused(*arguments(tmp_path / "no-model", tmp_path / "run"))
    assert said.startswith("grpo: --model-name: ") and str(tmp_path / "no-model") in said
    assert not (tmp_path / "run" / "logs").exists()


CONFIGS = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("command", ["run", "train"])
def test_models_of_another_kind_are_refused_by_name(tmp_path: Path, kind: str, command: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    train = ["-m", "grpo_trainer", "train", "--model", str(tmp_path), "--weight-bridge-mode", "lora_only"]
    train += ["--save-path", str(tmp_path / "run")]
    # In a run, the server or the trainer reads the model first, and the run ends with what it says.
    words, code = (arguments(tmp_path, tmp_path / "run"), 1) if command == "run" else (train, 2)
    said = refused(*words, code=code)
    assert CONFIGS[kind]["architectures"][0] in said and str(tmp_path) in said
