"""Resources of server and trainer: memory, adapters, files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import psutil
import torch

from grpo_trainer.bench.devices import gpus_used_mb
from grpo_trainer.bench.sync.subject import Subject


@dataclass(frozen=True)
class Snapshot:
    """At one moment. Sizes in units of 1e6 bytes; the server's are those of all its processes."""

    publishes: int
    server_rss_mb: float
    server_open_files: int
    trainer_rss_mb: float
    gpu_mb: float | None
    adapters: int
    files: int


@dataclass(frozen=True)
class MemoryFigures:
    """`gpu_total_gb`: used on the GPUs of trainer and server, by whomever. `flat_…`: after the 10th publish, after the
    last, and the growth from one to the other."""

    gpu_total_gb: float | None
    trainer_peak_gb: float | None
    server_rss_mb: float
    flat_publishes: tuple[int, int]
    flat_server_rss_mb: tuple[float, float]
    flat_server_open_files: tuple[int, int]
    flat_trainer_rss_mb: tuple[float, float]
    flat_gpu_mb: tuple[float, float] | None
    flat_adapters: tuple[int, int]
    flat_files: tuple[int, int]
    server_rss_growth_mb: float
    gpu_growth_mb: float | None
    files_at_end: int


def snapshot(subject: Subject, publishes: int, gpus: str | None) -> Snapshot:
    """Return the present sizes."""
    rss, open_files = _held_by(psutil.Process(subject.server_pid))
    return Snapshot(
        publishes=publishes,
        server_rss_mb=round(rss / 1e6, 1),
        server_open_files=open_files,
        trainer_rss_mb=round(psutil.Process().memory_info().rss / 1e6, 1),
        gpu_mb=gpu_used_mb(gpus),
        adapters=len(subject.client.lora_status().versions),
        files=sum(1 for path in subject.written.rglob("*") if path.is_file()),
    )


def _held_by(server: psutil.Process) -> tuple[int, int]:
    """Return resident bytes and open files of a process and its descendants."""
    rss = open_files = 0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended since it was listed
            rss += process.memory_info().rss
            open_files += process.num_fds()
    return rss, open_files


def gpu_used_mb(gpus: str | None) -> float | None:
    """Used on GPUs by all processes; None without a GPU.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES would name them; None: all.
    """
    if not torch.cuda.is_available():
        return None
    used = gpus_used_mb(gpus)
    if used is None:  # then of the trainer's own GPU
        free, total = torch.cuda.mem_get_info()
        return round((total - free) / 1e6, 1)
    return used


def gpus_in_use(server_gpus: str | None) -> str | None:
    """Return the GPUs of trainer and server for `gpu_used_mb`."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for part in (own, server_gpus) if part for name in part.split(",")]
    return ",".join(dict.fromkeys(names)) if own else None


def memory_figures(early: Snapshot, late: Snapshot, end: Snapshot) -> MemoryFigures:
    """
    Args:
        early, late: after the 10th and after the last publish without load.
        end: after the load as well.
    """
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    both_gpu = None if early.gpu_mb is None or late.gpu_mb is None else (early.gpu_mb, late.gpu_mb)
    return MemoryFigures(
        gpu_total_gb=None if end.gpu_mb is None else round(end.gpu_mb / 1e3, 3),
        trainer_peak_gb=None if peak is None else round(peak, 3),
        server_rss_mb=end.server_rss_mb,
        flat_publishes=(early.publishes, late.publishes),
        flat_server_rss_mb=(early.server_rss_mb, late.server_rss_mb),
        flat_server_open_files=(early.server_open_files, late.server_open_files),
        flat_trainer_rss_mb=(early.trainer_rss_mb, late.trainer_rss_mb),
        flat_gpu_mb=both_gpu,
        flat_adapters=(early.adapters, late.adapters),
        flat_files=(early.files, late.files),
        server_rss_growth_mb=round(late.server_rss_mb - early.server_rss_mb, 1),
        gpu_growth_mb=None if both_gpu is None else round(both_gpu[1] - both_gpu[0], 1),
        files_at_end=end.files,
    )
