"""Where a server's only worker runs."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server import compat, executor

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with one GPU, 8 cores and room in /dev/shm; the folder has its files."""
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    monkeypatch.setattr(executor, "_SHM", tmp_path)
    monkeypatch.setattr(executor, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(executor, "_GPUS", tmp_path / "gpus")
    (tmp_path / "gpus" / "0000:00:00.0").mkdir(parents=True)
    monkeypatch.setenv(MULTIPROCESSING, "1")  # so that it is restored
    monkeypatch.delenv(MULTIPROCESSING)
    return tmp_path


def chosen(**given: Any) -> str | None:
    """Return the executor for a server's arguments."""
    degrees = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context")}
    args = Namespace(**{"distributed_executor_backend": None} | degrees | given)
    executor.choose(args)
    return args.distributed_executor_backend


@pytest.mark.usefixtures("machine")
def test_a_worker_on_a_gpu_has_its_own_process() -> None:
    assert chosen() == "mp"


def test_not_where_cores_are_few(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, executor_name in (("max 100000", "mp"), ("800000 100000", "mp"), ("750000 100000", "uni")):
        (machine / "cpu.max").write_text(f"{quota}\n")
        assert chosen() == executor_name
    (machine / "cpu.max").unlink()
    (machine / "gpus" / "0000:01:00.0").mkdir()
    assert chosen() == "uni", "8 cores for two GPUs"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert chosen() == "mp"


def test_not_without_room_for_the_queues(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))  # Docker's default
    assert chosen() == "uni"


@pytest.mark.usefixtures("machine")
def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    assert chosen() == "uni"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "data", "prefill_context"])
def test_several_workers_are_placed_by_vllm(degree: str) -> None:
    assert chosen(**{f"{degree}_parallel_size": 2}) is None


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("asked", "said"), [("uni", "0"), ("mp", None)])
def test_the_users_executor_stays(monkeypatch: pytest.MonkeyPatch, asked: str, said: str | None) -> None:
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    assert chosen(distributed_executor_backend=asked) == asked
    assert os.environ.get(MULTIPROCESSING) == said  # vLLM on a CPU would turn "uni" into "mp"
