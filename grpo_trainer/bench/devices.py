"""The machine: processor, GPUs and their used memory, without torch, which would itself use some."""

from __future__ import annotations

import platform
from pathlib import Path

from grpo_trainer.doctor.machine import nvidia_smi

MIB_IN_MB = 1.048576


def cpu_name() -> str:
    """Return the processor's name from Linux, or else its architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def gpu_names(gpus: str | None) -> list[str] | None:
    """Return the name of each GPU; None: unknown. `gpus`: see `gpus_used_mb`."""
    return _ask("name", gpus)


def gpus_used_mb(gpus: str | None) -> float | None:
    """Return the GPU memory that all processes use together, in units of 1e6 bytes; None: unknown.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; None: all.
    """
    used = _ask("memory.used", gpus)
    try:
        return None if used is None else round(sum(map(float, used)) * MIB_IN_MB, 1)
    except ValueError:  # [N/A]: some GPUs share the main memory
        return None


def _ask(field: str, gpus: str | None) -> list[str] | None:
    """Ask nvidia-smi for one field of each GPU."""
    if gpus == "":
        return None
    chosen = ["-i", gpus] if gpus else []
    done = nvidia_smi(*chosen, f"--query-gpu={field}", "--format=csv,noheader,nounits", seconds=60)
    return [line.strip() for line in done.stdout.splitlines()] if done and done.returncode == 0 else None
