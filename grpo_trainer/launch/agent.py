"""Runs a plan's processes on another node of a Ray cluster: an actor there, which `ray_cluster.RayCluster` calls.

Its processes are its children, as those of a local run are the supervisor's, so they end with it. Imports no Ray.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from grpo_trainer.errors import PortBusyError
from grpo_trainer.files import replace_file
from grpo_trainer.launch.child import Child
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports

SEEN_GPUS = "CUDA_VISIBLE_DEVICES"
OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Variables that Ray sets for its workers, and that processes of a run must not inherit."""
PASSED_ON = (
    *("PYTHONPATH", "HF_", "HUGGINGFACE_", "TOKENIZERS_", "VLLM_", "TORCH", "NCCL_", "GLOO_", "OMP_", "WANDB_"),
    *("ROLLOUT_API_KEY", "GRPO_"),
)
"""Beginnings of the variables that processes on other nodes get from the environment of `grpo run`."""


@dataclass(frozen=True)
class Line:
    """A line that a process wrote."""

    name: str
    is_error: bool
    text: str


@dataclass(frozen=True)
class News:
    """What happened since the last question.

    Attributes:
        ended: exit codes of all processes that have ended; their last lines came with or before it.
    """

    lines: tuple[Line, ...]
    ended: Mapping[str, int]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that processes on other nodes get."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


def seeing(spec: ProcessSpec, gpus: str) -> ProcessSpec:
    """Return the process with its own GPUs visible.

    Args:
        gpus: CUDA_VISIBLE_DEVICES of all GPUs that the run has on this node.
    """
    if not spec.place.gpus:
        return spec
    all_gpus = gpus.split(",")
    own = ",".join(all_gpus[number] for number in spec.place.gpus)
    return replace(spec, env={**spec.env, SEEN_GPUS: own})


class NodeAgent:
    """Starts, watches and ends processes on its node.

    Args:
        folder: the working folder of `grpo run`: relative paths mean the same here.
        environment: variables that its processes get.
    """

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        for name in [name for name in os.environ if name.startswith(OF_RAY)]:
            del os.environ[name]
        os.environ.update(environment)
        self._children: dict[str, Child] = {}
        self._lines: collections.deque[Line] = collections.deque()
        self._lock = threading.Lock()

    def gpus(self) -> str:
        """Return CUDA_VISIBLE_DEVICES, as Ray has set it for what it has assigned."""
        return os.environ.get(SEEN_GPUS, "")

    def claim(self, wanted: Mapping[str, int], address: str) -> dict[str, int] | str:
        """Return free ports of this node, or why there are none."""
        try:
            return claim_ports(dict(wanted), address)
        except PortBusyError as error:
            return str(error)

    def start(self, spec: ProcessSpec, files: Mapping[str, bytes]) -> int:
        """Start a process, and return its id.

        Args:
            files: its configuration files by path, which are written first, for their owner alone.

        Raises:
            OSError: a file can't be written, or the program is not on this node.
        """
        for path, content in files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_file(Path(path), content, mode=0o600)
        output, errors = (partial(self._hear, spec.name, is_error) for is_error in (False, True))
        child = Child(seeing(spec, self.gpus()), Path(os.devnull), output, errors)
        self._children[spec.name] = child
        return child.pid

    def _hear(self, name: str, is_error: bool, text: str) -> None:
        with self._lock:
            self._lines.append(Line(name, is_error, text))

    def news(self) -> News:
        """Return what happened since the last call."""
        codes = {name: child.exit_code for name, child in self._children.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name in ended:
            self._children[name].drain()
        with self._lock:
            lines = tuple(self._lines)
            self._lines.clear()
        return News(lines, ended)

    def order(self, name: str, method: str) -> None:
        """Have a process do what a method of `Watched` without arguments does, by the method's name."""
        getattr(self._children[name], method)()
