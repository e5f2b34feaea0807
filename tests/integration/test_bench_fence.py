"""`grpo bench fence` against a real server: no answer sees half a write, and the judge finds those that do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("bridge", "fenced", "writes"),
    [("shared_vllm", True, 100), ("shared_vllm", False, 30_000), ("broadcast", True, 50)],
)
def test_half_written_weights_are_seen_only_without_a_fence(
    tmp_path: Path, bridge: str, fenced: bool, writes: int
) -> None:
    words = ["--shape", "tiny", "--bridge", bridge, "--writes", str(writes), "--concurrency", "16", "--judges", "8"]
    words += ["--json", "--quiet-seconds", "1", "--reference-seconds", "1", "--completion-len", "64"]
    words += ["--log-dir", str(tmp_path)]
    words += [] if fenced else ["--no-fenced"]
    command = [sys.executable, "-m", "grpo_trainer", "bench", "fence", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == (0 if fenced else 1), done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["writes"] == writes and found["answers"] > 20
    assert found["misnamed"] == 0 and (found["torn"] == 0) == fenced
    assert (found["distance_max"] > found["allowed"]) != fenced
    assert found["reference_max"] < found["allowed"] < found["spread"]
    assert ("torn: prompt" in done.stderr) != fenced
