"""GPU tests skip, with the reason, where there is no GPU. Tests marked `alone` have the GPUs to themselves."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.engine.allocator import grow_segments

_gpus = (Path(tempfile.gettempdir()) / "grpo-gpu-tests.lock").open("a")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the test's time-out
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Hold a lock on the GPUs, which a test marked `alone` has exclusively.

    It lasts until the next module: servers of a module run between its tests, too.
    """
    fcntl.flock(_gpus, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            fcntl.flock(_gpus, fcntl.LOCK_UN)


@pytest.fixture(scope="session", autouse=True)  # before a module starts a server
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    grow_segments()  # as in a trainer
