"""Commands of pages and scripts that a CPU can run, as they stand there, for a few steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.integration.test_environment_runs import sums, write_jsonl
from tests.processes import ROOT, answers, family, free_port, running, tail, wait_for
from tests.runs import finished, rows

pytestmark = pytest.mark.timeout(600)

MORE = "--training-steps 4 --warmup-steps 1 --server.port 0 --api.port 0"
OWN_PARTS = "--model runs/demo-model --data tasks.jsonl --reward my_rewards.py:right --seq-len 64"
"""Instead of the placeholders of the page's command."""


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of code in that language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The words after `grpo` of each command."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line.removesuffix("&"), comments=True)[1:] for line in lines if line.startswith("grpo ")]


def runs(page: str) -> list[list[str]]:
    return [words[1:] for words in commands("".join(blocks(page, "bash"))) if words[0] == "run"]


COMMANDS = {
    "quickstart": runs("configs/quickstart.md")[-1],
    "own data": runs("configs/own_data.md")[-1],
    "own loss": runs("docs/training.md")[-1],
    **{words[words.index("--weight-bridge-mode") + 1]: words for words in runs("docs/bridges.md")},
}


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A folder with what the pages' commands find in theirs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo-model").symlink_to(demo_model)
    write_jsonl(tmp_path / "tasks.jsonl", sums())
    (reward,) = blocks("configs/own_data.md", "python")
    (tmp_path / "my_rewards.py").write_text(reward)
    (parts,) = blocks("docs/training.md", "python")
    (tmp_path / "my_parts.py").write_text(parts)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_a_page_trains(folder: Path, name: str) -> None:
    """`tests/bridges` trains in each mode: here its command is accepted. The quickstart is started as a user does."""
    words, trains = COMMANDS[name], " " in name or name == "quickstart"
    if "MODEL" in words:
        words = [*words[: words.index("--model")], *OWN_PARTS.split()]
    run_dir, log = folder / "runs" / "here", folder / "log"
    command = ["-m", "grpo_trainer", "run", *words, *MORE.split(), "--run-dir", str(run_dir)]
    command += ["--log-samples", "2"] if trains else ["--dry-run"]
    cold = {warm.COLD: "1"} if name == "quickstart" else {}
    with running(*command, log=log, env=cold, folder=folder) as process:
        if cold:
            wait_for("a forked engine", lambda: has_forked_engine(process.pid), log)
        assert finished(process, log, 400) == 0, tail(log)
    if trains:
        with running("-m", "grpo_trainer", "report", str(run_dir), log=log, folder=folder) as process:
            assert finished(process, log) == 0, tail(log)
    assert len(rows(run_dir)) == (4 if trains else 0)
    if trains:
        assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()
        page = (run_dir / "report.html").read_text()
        assert '"title":"Reward"' in page and '"ratios":"' in page


def has_forked_engine(pid: int) -> bool:
    """Whether a run's engine was forked from a process that had made its imports, rather than spawned."""
    members = family(pid)
    engines = [member for member, line in members.items() if "EngineCore" in line]
    return any("Forkserver" in members.get(psutil.Process(engine).ppid(), "") for engine in engines)


def test_four_processes_started_by_hand_train_together(demo_model: Path, tmp_path: Path) -> None:
    """As docs/operating.md says: `grpo train` joins an API, a server and an environment."""
    section = (ROOT / "docs" / "operating.md").read_text().split("## Each process by hand")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    api_port, server_port = str(free_port()), str(free_port())
    own = {"8000": api_port, "9001": server_port, "--training-steps 10": "--training-steps 3"}
    for old, new in {"runs/demo-model": str(demo_model), "runs/by-hand": str(tmp_path / "run"), **own}.items():
        assert old in block, f"the page's commands do not mention {old}"
        block = block.replace(old, new)
    api, server, environment, train = commands(block)
    log = tmp_path / "log"
    with ExitStack() as stack:
        for words in (api, server, environment):
            stack.enter_context(running("-m", "grpo_trainer", *words, log=tmp_path / f"{words[0]}.log"))
        wait_for("the API", lambda: answers(f"http://127.0.0.1:{api_port}/"), tmp_path / f"{api[0]}.log", 60)
        trainer = stack.enter_context(running("-m", "grpo_trainer", *train, log=log))
        wait_for("the trainer is done", lambda: trainer.poll() is not None, log, 400)
        assert trainer.returncode == 0, tail(log)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert "bridge proved" in log.read_text()


def test_train_script_trains(demo_model: Path, tmp_path: Path) -> None:
    """The script's own command is started here, warm; `tests/unit/test_shell_scripts.py` has those of other modes."""
    fake, written = tmp_path / "python", tmp_path / "command"
    fake.write_text(f'#!/bin/bash\n[ "$2" != grpo_trainer ] || printf "%s\\0" "$@" > {written}\n')
    fake.chmod(0o755)
    settings = {"GRPO_PYTHON": str(fake), "MODEL": str(demo_model), "RUN_DIR": str(tmp_path / "run")}
    settings |= {"STEPS": "2", "BATCH_SIZE": "16", "ACCUMULATION": "1"}
    script = ["bash", str(ROOT / "scripts" / "train.sh"), "single_copy", "--log-samples", "2"]
    subprocess.run(script, env={**os.environ, **settings}, capture_output=True, check=True)
    words = written.read_text().split("\0")[:-1]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert "bridge proved" in (tmp_path / "run" / "logs" / "trainer.log").read_text()
