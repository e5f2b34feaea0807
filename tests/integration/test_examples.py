"""Commands of pages that a CPU can run, as they stand there, for a few steps."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_dataset_run import sums
from tests.processes import ROOT, tail
from tests.runs import rows

pytestmark = pytest.mark.timeout(600)

MORE = "--training-steps 4 --warmup-steps 1 --server.port 0 --api.port 0"


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of code in that language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def runs(page: str) -> list[list[str]]:
    """The words of each `grpo run` of the page."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("grpo run ")]


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A folder with what the pages' commands find in theirs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo-model").symlink_to(demo_model)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums()))
    (reward,) = blocks("configs/own_data.md", "python")
    (tmp_path / "my_rewards.py").write_text(reward)
    (parts,) = blocks("docs/training.md", "python")
    (tmp_path / "my_parts.py").write_text(parts)
    return tmp_path


OWN_PARTS = "--model runs/demo-model --data tasks.jsonl --reward my_rewards.py:right --seq-len 64"
"""Instead of the placeholders of the page's command."""


COMMANDS = {
    "quickstart": runs("configs/quickstart.md")[-1],
    "own data": runs("configs/own_data.md")[-1],
    "own loss": runs("docs/training.md")[-1],
    **{words[words.index("--weight-bridge-mode") + 1]: words for words in runs("docs/bridges.md")},
}


def test_bridges_are_shown() -> None:
    assert {"shared_vllm", "broadcast", "lora_restart"} <= {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_a_page_trains(folder: Path, name: str) -> None:
    words = COMMANDS[name]
    if "MODEL" in words:
        words = [*words[: words.index("--model")], *OWN_PARTS.split()]
    run_dir, log = folder / "runs" / "here", folder / "log"
    command = [sys.executable, "-m", "grpo_trainer", "run", *words, *MORE.split(), "--run-dir", str(run_dir)]
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=400, check=False).returncode
    assert status == 0, tail(log)
    assert len(rows(run_dir)) == 4
