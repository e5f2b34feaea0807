"""The attached model against real vLLM on the CPU: six architectures in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.golden.host import Figures
from tests.golden.models import Golden as Report
from tests.golden.models import golden
from tests.processes import ROOT

pytestmark = pytest.mark.timeout(600)

AGAIN = ("gemma2", "gemma3", "llama", "phi3", "qwen2_moe", "qwen3")
"""Compared with vLLM again in each complete lane. Of the others there is the record; the names of qwen2, mixtral and
qwen3_moe are those of real servers in `tests/integration/test_broadcast.py`, too."""
TOLERANCE = 1e-4  # nats a token, mean, in float32


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tests.golden.host` wrote about all architectures, one after another in one process."""
    folder = tmp_path_factory.mktemp("architectures")
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.host", str(folder), *AGAIN],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("architecture", AGAIN)
def test_logprobs_are_the_servers_before_and_after_a_write(reports: Path, architecture: str) -> None:
    figures = msgspec.json.decode((reports / f"{architecture}.figures.json").read_bytes(), type=Figures)
    assert figures.own == 0.0  # bit for bit what transformers computes from the files
    assert figures.before < TOLERANCE
    assert figures.moved > 0.1
    assert figures.after < TOLERANCE
    assert figures.attached == len(golden(architecture).found)


@pytest.mark.parametrize("architecture", AGAIN)
def test_vllm_still_has_the_names_and_places_of_the_golden_files(reports: Path, architecture: str) -> None:
    report = msgspec.json.decode((reports / f"{architecture}.json").read_bytes(), type=Report)
    record = golden(architecture)
    assert (report.vllm, report.ties, report.found) == (record.vllm, record.ties, record.found)
    assert report.logprobs == pytest.approx(record.logprobs, abs=1e-3)
    assert report.adapted == pytest.approx(record.adapted, abs=1e-3)
