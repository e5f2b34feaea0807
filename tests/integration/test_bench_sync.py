"""`grpo bench sync` end to end on a CPU: its one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.config.bridge import ALL_LINEAR
from tests.processes import ROOT, mentioning

pytestmark = pytest.mark.timeout(400)  # a server starts


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """The figures, of a measurement that leaves nothing behind."""
    command = [sys.executable, "-m", "grpo_trainer", "bench", "sync", "--shape", "tiny", "--skip-load", "--json"]
    temporary = folder / "a path that is too long for sockets, which are made elsewhere".replace(" ", "_")
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=380
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert not list(temporary.glob("grpo*"))
    assert not mentioning(str(temporary))
    return json.loads(line)


def test_one_line_of_figures_and_nothing_left_running(tmp_path: Path) -> None:
    figures = measured(tmp_path, "--transport", "memory", "--repeat", "3")

    assert (figures["bridge"], figures["transport"], figures["shape"]) == ("lora_only", "memory", "tiny")
    assert (figures["lora_r"], figures["repeat"], figures["keep_versions"]) == (16, 3, 4)
    assert figures["max_loras"] == 8  # four to keep, four to spare
    assert figures["adapter_mb"] == round(SHAPES["tiny"].adapter_parameters(16, ALL_LINEAR) * 4 / 1e6, 3)
    assert set(figures["versions"]) == {"vllm", "torch", "python"} and figures["device"]
    proof = figures["proof"]
    assert proof["noise"] < 1e-4 and proof["restored"] < 1e-4 and proof["synthetic_moved"] > 10 * proof["synthetic"]

    phases = figures["phases"]
    assert 0 < figures["publish_p50_ms"] <= figures["publish_p95_ms"]
    assert set(phases) == {"pack_ms", "request_ms", "engine_ms"} and all(value > 0 for value in phases.values())
    assert 0 < figures["stall_ms"] <= phases["engine_ms"]
    assert (
        figures["baseline_ms"] > 0 and figures["baseline_save_ms"] > 0 and figures["baseline_repeat"] == 7
    )  # of ten wanted: slots less one
    assert figures["load"] is None

    memory = figures["memory"]
    assert memory["flat_publishes"] == [3, 3] and memory["flat_adapters"] == [4, 4]
    assert memory["files_at_end"] == 0  # this transport writes none
    assert memory["server_rss_mb"] > 100 and memory["gpu_total_gb"] is None
    assert figures["attach_ms"] is None and figures["share_base"] is False


def test_shared_weights_are_written_where_they_are(tmp_path: Path) -> None:
    lengths = ("--step-seqs", "8", "--step-prompt-len", "8", "--step-completion-len", "24")
    figures = measured(tmp_path, "--bridge", "shared_vllm", "--repeat", "3", *lengths)
    assert figures["step"]["sequences"] == 8
    assert (figures["bridge"], figures["transport"], figures["adapter_mb"]) == ("shared_vllm", None, None)
    assert figures["attach_ms"] > 0 and figures["proof"]["noise"] < 1e-4
    assert figures["model_gb"] == round(SHAPES["tiny"].parameters * 4 / 1e9, 4)
    assert 0 < figures["write_ms"] < figures["stall_ms"] <= figures["publish_p50_ms"]
    assert figures["phases"]["pack_ms"] == figures["write_ms"] and figures["after_write_ms"] > 0
    assert figures["baseline_ms"] is None and figures["memory"]["files_at_end"] == 0


def test_an_adapter_over_the_servers_base(tmp_path: Path) -> None:
    lengths = ("--step-seqs", "8", "--step-prompt-len", "8", "--step-completion-len", "24")
    figures = measured(tmp_path, "--share-base", "--repeat", "3", "--baseline-repeat", "0", *lengths)
    assert (figures["bridge"], figures["share_base"], figures["lora_r"]) == ("lora_only", True, 16)
    assert figures["attach_ms"] > 0 and figures["proof"]["noise"] < 1e-4
    step = figures["step"]
    assert step["sequences"] == 8 and step["seconds"] > 0 and abs(step["loss"]) < 10
    assert step["server_gb"] is step["together_gb"] is None  # no GPU


def test_a_restart_is_a_checkpoint_and_a_launch(tmp_path: Path) -> None:
    lengths = ("--step-seqs", "8", "--step-prompt-len", "8", "--step-completion-len", "24")
    other = ("--step-optimizer", "adamw_8bit")
    figures = measured(tmp_path, "--bridge", "none", "--repeat", "1", *lengths, *other)
    assert figures["step"]["sequences"] == 8 and figures["step"]["optimizer"] == "adamw_8bit"
    assert figures["bridge"] == "none" and figures["attach_ms"] is None and figures["load"] is None
    phases = figures["phases"]
    assert phases["pack_ms"] > 0 and phases["engine_ms"] == figures["stall_ms"] < figures["publish_p50_ms"]
