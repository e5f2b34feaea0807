"""Settings of all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported. Models of tests are tiny: waking a second thread for an operation takes them longer than the
# operation, 2.5 times in all where weights are tried one by one. Idle threads sleep: spinning ones take the cores from
# the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What `grpo run` keeps from one start to the next is these tests' own.
os.environ["GRPO_CACHE"] = tempfile.mkdtemp(prefix="grpo-cache-")
atexit.register(shutil.rmtree, os.environ["GRPO_CACHE"], ignore_errors=True)

# The machine that runs the tests may be busy with a server beside them: slowness is no failure.
settings.register_profile("grpo", deadline=None)
settings.load_profile("grpo")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
