"""`grpo bench sync` end to end on a CPU: its one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from grpo_trainer.bench.sync.shapes import SHAPES
from tests.processes import ROOT

pytestmark = pytest.mark.timeout(400)  # a server starts


def mentioning(text: str) -> list[list[str]]:
    """Command lines of the processes that have this in theirs."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(text in part for part in line)]


def test_one_line_of_figures_and_nothing_left_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_trainer", "bench", "sync", "--shape", "tiny", "--transport", "memory"]
    command += ["--repeat", "3", "--skip-load", "--json"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=380)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)

    assert (figures["bridge"], figures["transport"], figures["shape"]) == ("lora_only", "memory", "tiny")
    assert (figures["lora_r"], figures["repeat"], figures["keep_versions"]) == (16, 3, 4)
    assert figures["max_loras"] == 8  # four to keep, four to spare
    assert figures["adapter_mb"] == round(SHAPES["tiny"].adapter_parameters(16) * 4 / 1e6, 3)
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

    assert not list(temporary.glob("grpo-*"))
    assert not mentioning(str(temporary))
