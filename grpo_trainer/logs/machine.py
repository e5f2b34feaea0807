"""Memory and utilisation of the machine that the trainer runs on, as of now: `host/…`, and with CUDA `gpu/…`."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

import psutil

GIB = 2.0**30


def machine_metrics() -> dict[str, float]:
    """Return figures of the host, and of the trainer's current GPU if it has one.

    Utilisation is the share of the time since the last call (host), or of the last second at most (GPU, where NVIDIA's
    `pynvml` is installed). Memory in use is that of all processes; a server on the same GPU is in it.
    """
    found = {
        "host/memory_used_gib": psutil.virtual_memory().used / GIB,
        "host/memory_trainer_gib": psutil.Process().memory_info().rss / GIB,
        "host/cpu": psutil.cpu_percent() / 100,
    }
    return found | _gpu_metrics()


def _gpu_metrics() -> dict[str, float]:
    import torch

    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    found = {
        "gpu/memory_used_gib": (total - free) / GIB,
        "gpu/memory_trainer_gib": torch.cuda.memory_reserved() / GIB,
    }
    if find_spec("pynvml") is not None:
        # Of a slice of a GPU (MIG), NVIDIA's library does not say it; and a figure is no reason to end a run.
        with suppress(import_module("pynvml").NVMLError, RuntimeError):
            found["gpu/utilisation"] = torch.cuda.utilization() / 100
    return found
