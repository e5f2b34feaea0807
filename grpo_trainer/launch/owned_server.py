"""An inference server that the trainer owns: it starts the server on a model, stops it, and starts it on another.

The server ends with the trainer: in order when the context exits, and by the kernel's SIGTERM (`PR_SET_PDEATHSIG`) if
the trainer is killed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from grpo_common.ports import port_holder
from grpo_trainer.config.server import server_names
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import PortBusyError, from_os_error
from grpo_trainer.launch.child import Child
from grpo_trainer.launch.plan import ProcessSpec, server_process
from grpo_trainer.launch.ports import is_free
from grpo_trainer.launch.supervisor import POLL_SECONDS
from grpo_trainer.phases import SERVER, START, report_at

log = logging.getLogger(__name__)

LAST_LINES = 12
"""Lines of the server's log in an error: few enough that the whole message fits into the trainer's own last lines."""


class OwnedServer:
    """Runs one inference server at a time. A context manager: its exit ends the server.

    Args:
        launch: returns the process that serves a model (folder or name) as a policy version.
        log_path: receives the output of all launches, one after the other.
        link: path of a symbolic link to the served model folder. vLLM keys its compilation cache by the model's path,
            so with one path for all folders only the first launch compiles.
        check_stop: called while waiting; raises to end the wait.
    """

    def __init__(
        self,
        launch: Callable[[str, int], ProcessSpec],
        log_path: Path,
        link: Path,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._launch = launch
        self.log_path = log_path
        self._link = link
        self._check_stop = check_stop
        self._child: Child | None = None

    def __enter__(self) -> OwnedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server for good."""
        self.stop()
        self._link.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self, model: str, version: int) -> str:
        """Launch the server on a folder or a hub name, and return the server's name for it; call `wait_ready` next."""
        assert self._child is None, "one server at a time"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        path = self._linked(Path(model)) if Path(model).is_dir() else model
        spec = self._launch(path, version)
        log.info("starting the inference server on %s as version %d", model, version)
        self._child = Child(spec, self.log_path, last_lines=LAST_LINES)
        return path

    def _linked(self, folder: Path) -> str:
        self._link.parent.mkdir(parents=True, exist_ok=True)
        self._link.unlink(missing_ok=True)  # safe: no server is running
        self._link.symlink_to(folder.absolute(), target_is_directory=True)
        return str(self._link.absolute())

    @START.of(SERVER)
    def wait_ready(self) -> float:
        """Wait until the server answers, and return the seconds since its launch.

        Raises:
            ProcessFailedError: it ended, was not ready in time, or refuses the key; the message has its last lines and
                its log's path.
        """
        child = self._child
        assert child is not None, "start comes first"
        said = 0.0
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while not child.is_ready(http):
                self._check_stop()
                self.check()
                waited = time.monotonic() - child.started
                if waited > child.spec.ready_timeout:
                    raise child.not_ready("--vllm-timeout")
                if waited >= report_at(said):
                    said = waited
                    last = child.progress or "nothing said yet"
                    log.info("waiting %.0f s for the inference server to start: %s", waited, last)
                time.sleep(POLL_SECONDS)
        return time.monotonic() - child.started

    def check(self) -> None:
        """Raise an error if the server has ended without `stop`.

        Raises:
            ProcessFailedError: the server has ended; the message has its last lines.
            DiskFullError: its log could not be written.
        """
        child = self._child
        if child is None:
            return
        if child.exit_code is not None:
            raise child.ended()
        if child.log_error is not None:
            raise from_os_error(child.log_error, "write the server's log") or child.log_error

    def stop(self) -> float:
        """End the server if it runs, by SIGTERM and then SIGKILL, and return the seconds that this took."""
        child, self._child = self._child, None
        if child is None:
            return 0.0
        started = time.monotonic()
        _end(child)
        return time.monotonic() - started


def _end(child: Child) -> None:
    """End a process and all processes that it started."""
    started = time.monotonic()
    child.note_family()
    child.terminate()
    while child.exit_code is None and time.monotonic() - started < child.spec.stop_seconds:
        time.sleep(POLL_SECONDS / 2)
    child.kill()
    child.close()


def owned_servers(config: TrainConfig, *, on_gpu: bool, check_stop: Callable[[], None]) -> list[OwnedServer]:
    """Return the servers that a training run starts itself, in the order of `config.vllm.each`.

    Raises:
        PortBusyError: a port is taken; the message names the holder.
    """
    each = config.vllm.each
    return [
        _owned_server(config.model_copy(update={"vllm": vllm}), name, on_gpu=on_gpu, check_stop=check_stop)
        for name, vllm in zip(server_names(len(each)), each, strict=True)
    ]


def _owned_server(config: TrainConfig, name: str, *, on_gpu: bool, check_stop: Callable[[], None]) -> OwnedServer:
    vllm = config.vllm
    if not is_free(vllm.host, vllm.port):
        raise PortBusyError(
            "with this --weight-bridge-mode the trainer starts the server itself",
            field="--vllm-port",
            got=f"{vllm.port}, held by {port_holder(vllm.port)}",
            wanted="a free port",
            fix="end that process, or choose another port",
        )

    def launch(model: str, version: int) -> ProcessSpec:
        return server_process(
            config,
            python=sys.executable,
            on_gpu=on_gpu,
            model=model,
            flags=("--policy-version", str(version)),
            name=name,
            step=version,
        )

    link = config.log_dir / name.replace("server", "served_model")
    return OwnedServer(launch, config.log_dir / "logs" / f"{name}.log", link, check_stop)
