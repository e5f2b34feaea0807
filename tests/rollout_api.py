"""A rollout API for tests: a process on a free port, which ends with the test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import free_port, tail, wait_for


@dataclass
class ServerProcess:
    """`python -m environments.api` with these arguments. `kill` is `kill -9`; `start` again takes the same port."""

    arguments: tuple[str, ...] = ()
    log: Path = Path(os.devnull)
    program: tuple[str, ...] = ("-m", "environments.api")
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        """Where it is served."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it listens."""
        command = [sys.executable, *self.program, "--port", str(self.port), *self.arguments]
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)

        def listens() -> bool:
            assert self.process.poll() is None, f"exit code {self.process.poll()}\n{tail(self.log)}"
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=10).close()
                return True
            return False

        wait_for("the rollout API", listens, self.log, 60, every=0.02)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it as a signal does; the exit code."""
        self.process.terminate()
        return self.process.wait()


@contextlib.contextmanager
def running_server(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[ServerProcess]:
    """A server that runs inside the `with`."""
    server = ServerProcess(arguments, log)
    server.start()
    try:
        yield server
    finally:
        server.stop()
