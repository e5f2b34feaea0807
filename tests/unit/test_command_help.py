"""Help on one screen, all options on request, and no name cut short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_trainer.cli import app
from grpo_trainer.config.options import unique_leaves
from grpo_trainer.config.train import TrainConfig

ROOT = Path(__file__).parents[2]


def said(*words: str, columns: int = 80) -> list[str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    return done.output.splitlines()


@pytest.mark.parametrize("command", ["run", "train", "doctor"])
def test_help_is_one_screen_with_what_matters_first(command: str) -> None:
    lines = said(command, "--help")
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if line.startswith("  --")]
    assert 15 <= len(rows) <= 20 and {"--model-name", "--lr", "--weight-bridge-mode"} <= set(rows)
    assert "--lora-alpha" not in rows and "--help-all" in " ".join(lines)


def test_all_of_them_have_a_row_with_their_whole_name() -> None:
    rows = {line.split()[0] for line in said("train", "--help-all") if line.startswith("  --")}
    assert {flag for leaf in unique_leaves(TrainConfig) for flag in leaf.flags} <= rows
    names = {line.split()[0] for line in said("run", "--help-all") if line.startswith("  --")}
    assert {"--server.gpu-memory-utilization", "--server.pipeline-parallel-size", "--env", "--config"} <= names


def test_one_topic() -> None:
    lines = said("train", "--help-all", "optim")
    rows = {line.split()[0] for line in lines if line.startswith("  --")}
    assert {"--lr", "--adam-beta1"} <= rows and "--seq-len" not in rows
    unknown = CliRunner().invoke(app, ["train", "--help-all", "nothing"])
    assert unknown.exit_code != 0 and "Optimizer" in getattr(unknown.exception, "wanted", "")


def test_the_servers_own_flags_come_without_vllms() -> None:
    code = (
        "import sys; from vllm_server.__main__ import main; code = main(['--help'])\n"
        "print([m for m in ('vllm', 'torch') if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stderr.strip() == "[]"
    for flag in ("--model", "--port", "--max-lora-rank", "--shared-weights", "--bridge-config-path", "--help-all"):
        assert flag in done.stdout
    assert len(done.stdout.splitlines()) <= 60
