"""The trainer's own inference server (modes `none` and `lora_restart`): a process that is started again on each model.

It ends with the trainer: in order when the context exits, and by the kernel's SIGTERM (`PR_SET_PDEATHSIG`) if the
trainer is killed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from grpo_common.ports import port_holder
from grpo_common.status import NOTICE, WAITS
from grpo_trainer.config.server import Server, server_names
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import PortBusyError
from grpo_trainer.launch.plan import ProcessSpec, server_process
from grpo_trainer.launch.ports import is_free
from grpo_trainer.launch.process import POLL_SECONDS, Process
from grpo_trainer.phases import SERVER, START, report_at
from grpo_trainer.signals import running_time

log = logging.getLogger(__name__)

LAST_LINES = 12
"""Lines of the server's log in an error: few enough that the whole message fits into the trainer's own last lines."""


@dataclass(eq=False, repr=False)
class OwnedServer:
    """Runs one inference server at a time. A context manager: its exit ends the server."""

    launch: Callable[[str, int], ProcessSpec]
    """Returns the process that serves a model (folder or name) as a policy version."""
    log_path: Path
    """Receives the output of all launches, one after the other."""
    link: Path
    """Path of a symbolic link to the served model folder. vLLM keys its compilation cache by the model's path, so with
    one path for all folders only the first launch compiles."""
    check_stop: Callable[[], None] = lambda: None
    """Called while waiting; raises to end the wait."""
    _process: Process | None = None

    def __enter__(self) -> OwnedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server for good."""
        self.stop()
        self.link.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, model: str, version: int) -> str:
        """Launch the server on a folder or a hub name, and return the server's name for it; call `wait_ready` next."""
        assert self._process is None, "one server at a time"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        path = model
        if Path(model).is_dir():
            path = str(self.link.absolute())
            self.link.parent.mkdir(parents=True, exist_ok=True)
            self.link.unlink(missing_ok=True)  # safe: no server is running
            self.link.symlink_to(Path(model).absolute(), target_is_directory=True)
        log.info("starting the inference server on %s as version %d", model, version)
        self._process = Process(self.launch(path, version), self.log_path, last_lines=LAST_LINES)
        return path

    @START.of(SERVER)
    def wait_ready(self) -> float:
        """Wait until the server answers, and return the seconds since its launch.

        Raises:
            ProcessFailedError: it ended, was not ready in time, or refuses the key; the message has its last lines and
                its log's path.
        """
        process, said = self._process, 0.0
        assert process is not None, "start comes first"
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while not process.is_ready(http):
                self.check_stop()
                self.check()
                waited = running_time() - process.started
                if waited > process.spec.ready_timeout:
                    raise process.not_ready("--server.startup-timeout")
                if waited >= report_at(said):
                    said, what = waited, "waiting %.0f s for the inference server to start: %s"
                    log.info(what, waited, process.progress or "nothing said yet", extra=NOTICE | WAITS)
                time.sleep(POLL_SECONDS)
        return running_time() - process.started

    def check(self) -> None:
        """Raise a `ProcessFailedError` if the server has ended without `stop`, or what `Process.check_log` raises."""
        if self._process is not None:
            if self._process.exit_code is not None:
                raise self._process.ended()
            self._process.check_log()

    def stop(self) -> float:
        """End the server if it runs, by SIGTERM and then SIGKILL, and return the seconds that this took."""
        started, process, self._process = time.monotonic(), self._process, None
        if process is not None:
            process.end(process.spec.stop_seconds)
        return time.monotonic() - started


def owned_servers(config: TrainConfig, *, on_gpu: bool, check_stop: Callable[[], None]) -> list[OwnedServer]:
    """Return the servers that a training run starts itself, in the order of `config.server.each`.

    Raises:
        PortBusyError: a port is taken; the message names the holder.
    """

    def server(vllm: Server, name: str) -> OwnedServer:
        if not is_free(vllm.host, vllm.port):
            raise PortBusyError(
                "with this --weight-bridge-mode the trainer starts the server itself",
                field="--server.port",
                got=f"{vllm.port}, held by {port_holder(vllm.port)}",
                wanted="a free port",
                fix="end that process, or choose another port",
            )
        of_server = config.model_copy(update={"server": vllm})

        def launch(model: str, version: int) -> ProcessSpec:
            flags = ("--policy-version", str(version))
            python = sys.executable
            return server_process(
                of_server, python=python, on_gpu=on_gpu, model=model, flags=flags, name=name, step=version
            )

        link = config.log_dir / name.replace("server", "served_model")
        return OwnedServer(launch, config.log_dir / "logs" / f"{name}.log", link, check_stop)

    each = config.server.each
    return [server(vllm, name) for vllm, name in zip(each, server_names(len(each)), strict=True)]
