"""Servers of tests/gpu fit on a card whose other tests run at the same time. Checked without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import runs
from tests.integration import serving
from tests.processes import ROOT

MOST = 0.25
"""Share of a GPU, of which four workers have one each."""
FILES = sorted((ROOT / "tests/gpu").glob("test_*.py"))


def assert_fits(words: Sequence[str]) -> None:
    """A small share, and a cache in bytes: vLLM measures the free memory without one."""
    (share,) = [word for name, word in pairwise(words) if name.endswith("gpu-memory-utilization")]
    assert 0 < float(share) <= MOST and "--kv-cache-memory-bytes" in " ".join(words)


def test_servers_of_tests_ask_for_a_small_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    @contextmanager
    def running(*words: str, **_: object) -> Iterator[SimpleNamespace]:
        started.extend(words)
        yield SimpleNamespace()

    monkeypatch.setattr(serving, "running", running)
    with serving.serve(tmp_path, tmp_path, wait=False):
        assert_fits(started)


@pytest.mark.parametrize("mode", runs.OF_MODE)
def test_runs_of_tests_ask_for_a_small_share(tmp_path: Path, mode: str) -> None:
    assert_fits(runs.arguments(tmp_path, tmp_path, **runs.of_mode(mode)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_gpu_tests_start_servers_in_no_other_way(path: Path) -> None:
    """By `serve`, or by a run with options of `of_mode`; a test that does otherwise is marked `alone`."""
    text = path.read_text()
    if "pytestmark = [pytest.mark.alone" in text:
        return
    assert not re.search(r'"vllm_server(\.\w+)*"|"grpo_trainer", "run"', text), "its share may be the default"
    if re.search(r"from tests import runs|from tests.runs import", text):
        assert "of_mode(" in text, "it has no KV cache in bytes"
    if "SyncOptions" in text:
        assert "gpu_memory_utilization" in text and "kv_cache_gb" in text
    assert all(float(share) <= MOST for share in re.findall(r'gpu.memory.utilization"[:,] "?([\d.]+)', text))
    overridden = re.findall(r'"server.extra-args"\W+(.+)', text)
    assert all("flags" in each or "--kv-cache-memory-bytes" in each for each in overridden)
