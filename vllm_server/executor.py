"""Where a server's only worker runs: in the engine's process, or in its own.

A worker in its own process prepares a step while the engine's process schedules the next one. On an H100, a server of a
1.5B model generated 34 % more tokens/s in this way, and a run on one GPU 13 % more (docs/benchmarks.md). It has a cost:
both processes busy-wait for each other while they generate. On two cores, a small model then generates half as many
tokens/s.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

from vllm_server import compat
from vllm_server.protocol import WORKER_QUEUE_BYTES

CORES = 8
"""CPU cores for each GPU, of which a worker's own process may use one."""
_SHM, _QUOTA, _GPUS = Path("/dev/shm"), Path("/sys/fs/cgroup/cpu.max"), Path("/proc/driver/nvidia/gpus")


def choose(args: Namespace) -> None:
    """Set `distributed_executor_backend` for a single worker, unless the user has set it."""
    degrees = ("tensor", "pipeline", "data", "prefill_context")
    if any(getattr(args, f"{degree}_parallel_size") > 1 for degree in degrees):
        return  # vLLM has a process for each worker
    on_cpu = compat.device_type() == "cpu"
    if args.distributed_executor_backend is None:
        args.distributed_executor_backend = "mp" if not on_cpu and _has_room() else "uni"
    if on_cpu and args.distributed_executor_backend == "uni":
        # vLLM turns "uni" into "mp" on the CPU unless this says 0; the engine has its own process either way.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _has_room() -> bool:
    gpus = len(list(_GPUS.glob("*"))) or 1
    return _cores() >= CORES * gpus and _SHM.is_dir() and shutil.disk_usage(_SHM).free >= WORKER_QUEUE_BYTES


def _cores() -> float:
    """Return how many CPU cores this process may use, by its affinity and by a container's quota (cgroup v2)."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text().split()
    except OSError:
        return allowed
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))
