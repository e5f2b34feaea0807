"""Help on one screen, all options on request, and no name cut short."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from grpo_trainer.bench.__main__ import app as bench
from grpo_trainer.cli import app
from grpo_trainer.config.options import options_of
from grpo_trainer.config.train import TrainConfig

ROOT = Path(__file__).parents[2]


def said(*words: str, columns: int = 80) -> list[str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    return done.output.splitlines()


def flags_of(lines: Sequence[str]) -> set[str]:
    """The flags that have a row, or stand in one as a second name."""
    rows = [re.match(r"  (--[\w.-]+(?:, --[\w.-]+)*)", line) for line in lines]
    return {flag for row in rows if row for flag in row[1].split(", ")}


@pytest.mark.parametrize("command", ["run", "train", "doctor"])
def test_help_is_one_screen_with_what_matters_first(command: str) -> None:
    lines = said(command, "--help")
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    rows = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
    assert 15 <= len(rows) <= 23 and {"--model-name", "--lr", "--weight-bridge-mode"} <= set(rows)
    assert "--lora-alpha" not in rows and "--help-all" in " ".join(lines)
    assert any(line.startswith("  --model-name, --model TEXT ") for line in lines)
    if command != "train":
        of_answers = {"--env.group_size", "--env.max_tokens", "--env.temperature", "--prompts-per-step"}
        assert of_answers | {"--kl-beta", "--eval-every", "--log-samples", "--resume"} <= set(rows)
    meanings = {line.split()[0] for line in lines if line.startswith(" " * 36)}
    assert {"none:", "shared_vllm:", "lora_only:", "lora_restart:"} <= meanings


def test_all_of_them_have_a_row_with_their_whole_name() -> None:
    rows = flags_of(said("train", "--help-all"))
    assert {flag for leaf in options_of(TrainConfig) for flag in leaf.flags} <= rows
    names = flags_of(said("run", "--help-all"))
    assert {"--server.gpu-memory-utilization", "--server.pipeline-parallel-size", "--env", "--config"} <= names


def test_one_topic() -> None:
    lines = said("train", "--help-all", "optim")
    rows = flags_of(lines)
    assert {"--lr", "--adam-beta1"} <= rows and "--seq-len" not in rows
    unknown = CliRunner().invoke(app, ["train", "--help-all", "nothing"])
    assert unknown.exit_code != 0 and "Optimizer" in getattr(unknown.exception, "wanted", "")


def test_version_is_that_of_the_package_and_of_the_changelog() -> None:
    assert said("--version") == ["grpo 0.1.0"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.findall(r"^## v(\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == released[0] == "0.1.0"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    ("command", "names"),
    [(app, ("report", "runs", "export", "env")), (bench, ("loop", "step", "sync", "api"))],
    ids=("grpo", "bench"),
)
def test_no_name_is_cut(command: typer.Typer, names: Sequence[str], columns: int) -> None:
    for each in [[], *([name] for name in names)]:
        done = CliRunner().invoke(command, [*each, "--help"], env={"COLUMNS": str(columns)})
        assert done.exit_code == 0 and max(map(len, done.output.splitlines())) <= columns
        assert not re.search(r"--[\w.-]*…", done.output)


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (
            "vllm_server",
            ("--model", "--port", "--max-lora-rank", "--shared-weights", "--bridge-config-path", "--help-all"),
        ),
        ("environments.api", ("--port", "--store")),
        ("environments.arithmetic", ("serve", "process", "evaluate")),
        ("environments.demo_model", ("--released", "--seed")),
    ],
)
def test_a_program_s_own_flags_come_before_anything_heavy_is_imported(module: str, flags: Sequence[str]) -> None:
    code = (
        f"import sys, runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module('{module}', run_name='__main__')\n"
        f"finally: print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stderr.strip() == "[]"
    assert all(flag in done.stdout for flag in flags) and len(done.stdout.splitlines()) <= 60
