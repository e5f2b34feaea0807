"""GPU tests skip, with the reason, where there is no GPU. Tests marked `alone` have the GPUs to themselves.

    pytest tests/gpu -n 4 --dist loadfile           # a GPU and 16 cores; with two GPUs also what needs two
    pytest tests/gpu -n 4 --dist loadfile -k two    # only what needs two

The slowest tests are listed at the end.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.engine.allocator import grow_segments

FIRST = (
    *("test_models_gpu.py", "test_routed_experts_gpu.py", "test_paired_servers_gpu.py", "test_two_gpus.py"),
    *("test_step_gpu.py", "test_shared_weights_gpu.py", "test_broadcast_gpu.py", "test_torn_weights.py"),
)
"""The longest files, by their length."""
LAST = ("test_lora_transports_gpu.py", "test_run_gpu.py")
"""Files with a test marked `alone`, which waits until all others are over."""
BY_ROW = (
    *("test_models_gpu.py", "test_routed_experts_gpu.py", "test_paired_servers_gpu.py"),
    *("test_quantised_server_gpu.py", "test_quantised_bases_gpu.py"),
)
"""Files whose rows share nothing: `--dist loadfile` spreads them over workers."""

_gpus = (Path(tempfile.gettempdir()) / "grpo-gpu-tests.lock").open("a")


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available() and config.option.durations is None:
        config.option.durations = 25


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.name
        if item.path.parent != Path(__file__).parent:
            return -1
        return FIRST.index(name) if name in FIRST else len(FIRST) + (1 + LAST.index(name) if name in LAST else 0)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the order of files, and spread the rows of `BY_ROW`."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return file + nodeid.partition("[")[2] if Path(file).name in BY_ROW else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


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
