"""A process of a run on another machine of a Ray cluster, from both ends: `NodeAgent` there, `RemoteProcess` here.

The agent is an actor that `ray_cluster.RayCluster` calls. Its processes are its children, as those of a local run are
the supervisor's, so they end with it. Imports no Ray.
"""

from __future__ import annotations

import collections
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from grpo_trainer.errors import PortBusyError
from grpo_trainer.files import replace_file
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.process import Process

SEEN_GPUS = "CUDA_VISIBLE_DEVICES"
OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Variables that Ray sets for its workers, and that processes of a run must not inherit."""
PASSED_ON = (
    *("PYTHONPATH", "HF_", "HUGGINGFACE_", "TOKENIZERS_", "VLLM_", "TORCH", "NCCL_", "GLOO_", "OMP_", "WANDB_"),
    *("ROLLOUT_API_KEY", "GRPO_"),
)
"""Beginnings of the variables that processes on other nodes get from the environment of `grpo run`."""
END_SECONDS = 3.0
"""Most seconds from the end of a killed process until its node has said so."""


@dataclass(frozen=True)
class Line:
    """A line that a process wrote."""

    name: str
    is_error: bool
    text: str


@dataclass(frozen=True)
class News:
    """What happened since the last question."""

    lines: tuple[Line, ...]
    said: Mapping[str, bytes]
    """The status file of each process that has one."""
    ended: Mapping[str, int]
    """Exit codes of all processes that have ended; their last lines came with or before it."""


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that processes on other nodes get."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


def seeing(spec: ProcessSpec, gpus: str) -> ProcessSpec:
    """Return the process with its own GPUs visible, of those in a node's CUDA_VISIBLE_DEVICES."""
    if not spec.place.gpus:
        return spec
    all_gpus = gpus.split(",")
    own = ",".join(all_gpus[number] for number in spec.place.gpus)
    return replace(spec, env={**spec.env, SEEN_GPUS: own})


class NodeAgent:
    """Starts, watches and ends processes on its node, which get the variables of `environment`."""

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chdir(folder)  # that of `grpo run`: relative paths mean the same here
        for name in [name for name in os.environ if name.startswith(OF_RAY)]:
            del os.environ[name]
        os.environ.update(environment)
        self._processes: dict[str, Process] = {}
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
        """Start a process, and return its id. First write its configuration files, for their owner alone.

        Raises:
            OSError: a file can't be written, or the program is not on this node.
        """
        for path, content in files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_file(Path(path), content, mode=0o600)
        process = Process(seeing(spec, self.gpus()), Path(os.devnull), partial(self._hear, spec.name))
        self._processes[spec.name] = process
        return process.pid

    def _hear(self, name: str, text: str, is_error: bool) -> None:
        with self._lock:
            self._lines.append(Line(name, is_error, text))

    def news(self) -> News:
        """Return what happened since the last call."""
        codes = {name: process.exit_code for name, process in self._processes.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name in ended:
            self._processes[name].drain()
        said = {name: content for name, process in self._processes.items() if (content := process.said())}
        with self._lock:
            lines = tuple(self._lines)
            self._lines.clear()
        return News(lines, said, ended)

    def order(self, name: str, method: str) -> None:
        """Have a process do what a method of `Process` without arguments does, by the method's name."""
        getattr(self._processes[name], method)()


class RemoteProcess(Process):
    """A process that a node's agent runs. The thread that follows the agent's news calls its methods.

    `order` has the agent do what a method of `Process` does, by the method's name, and waits for that. It does nothing
    once the node is lost.
    """

    def __init__(
        self, spec: ProcessSpec, log_path: Path, on_line: Callable[[str, bool], None], order: Callable[[str], None]
    ) -> None:
        self._order = order
        self._code: int | None = None
        self._is_over = threading.Event()
        self._lost, self._said = "", b""
        super().__init__(spec, log_path, on_line)

    def write(self, line: Line) -> None:
        """Take a line that it wrote."""
        self.take(f"{line.text}\n")
        self._on_line(line.text, line.is_error)

    def tell(self, content: bytes) -> None:
        """Take the content of its status file."""
        self._said = content

    def note_end(self, code: int = -signal.SIGKILL, lost: str = "") -> None:
        """Note that it has ended, if only because its node is lost; the first end counts."""
        if self._code is None:
            self._code, self._lost = code, lost
            self._is_over.set()

    def _start(self) -> int:
        return 0  # `RayCluster.start` starts it

    @property
    def exit_code(self) -> int | None:
        return self._code

    def how_it_ended(self) -> str:
        return self._lost or super().how_it_ended()

    def note_family(self) -> None:
        self._order("note_family")

    def terminate(self) -> None:
        if self._code is None:
            self._order("terminate")

    def kill(self) -> None:
        self._order("kill")
        self._is_over.wait(END_SECONDS)

    def drain(self) -> None:
        """Do nothing: the last lines come before the exit code."""

    def said(self) -> bytes:
        return self._said
