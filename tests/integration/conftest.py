"""What the integration tests share: the demo model, built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, built by its own command."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    subprocess.run([sys.executable, "-m", "grpo_trainer", "demo-model", str(folder)], cwd=ROOT, check=True, timeout=300)
    return folder
