"""The process of a server's worker."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import pytest

from vllm_server import arguments, compat

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


def placed(monkeypatch: pytest.MonkeyPatch, device: str, cores: int, **given: Any) -> str | None:
    """Return the executor on a machine."""
    monkeypatch.setattr(compat, "device_type", lambda: device)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv(MULTIPROCESSING, "1")  # so that it is restored
    monkeypatch.delenv(MULTIPROCESSING)
    unset = {
        "distributed_executor_backend": None, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }  # fmt: skip
    args = Namespace(**unset | given)
    arguments._place_worker(args)
    return args.distributed_executor_backend


@pytest.mark.parametrize(
    ("device", "cores", "executor"), [("cuda", 8, "mp"), ("cuda", 7, "uni"), ("cpu", 64, "uni"), ("cpu", 2, "uni")]
)
def test_a_worker_has_its_own_process_where_cores_are_to_spare(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, executor: str
) -> None:
    assert placed(monkeypatch, device, cores) == executor


@pytest.mark.parametrize("degree", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_several_workers_are_placed_by_vllm(monkeypatch: pytest.MonkeyPatch, degree: str) -> None:
    assert placed(monkeypatch, "cuda", 64, **{degree: 2}) is None


@pytest.mark.parametrize(("asked", "said"), [("uni", "0"), ("mp", None)])
def test_the_users_executor_stays(monkeypatch: pytest.MonkeyPatch, asked: str, said: str | None) -> None:
    assert placed(monkeypatch, "cpu", 2, distributed_executor_backend=asked) == asked
    assert os.environ.get(MULTIPROCESSING) == said  # vLLM on a CPU would turn "uni" into "mp"
