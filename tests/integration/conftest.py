"""What the integration tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _start_warm(warm_processes: None) -> None:
    """Nearly all of them start processes."""
