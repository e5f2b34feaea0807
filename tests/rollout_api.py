"""A rollout API for tests: a process on a free port, which ends with the test."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import free_port

_START_S = 60.0


@dataclass
class ServerProcess:
    """`python -m environments.api` with these arguments. `kill` is `kill -9`; `start` again takes the same port."""

    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    program: tuple[str, ...] = ("-m", "environments.api")

    @property
    def url(self) -> str:
        """Where it is served."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it answers.

        Raises:
            RuntimeError: it ended, or did not come up.
        """
        command = [sys.executable, *self.program, "--port", str(self.port), *self.arguments]
        with self.log.open("ab") if self.log else contextlib.nullcontext(subprocess.DEVNULL) as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        deadline = time.monotonic() + _START_S
        while not _listens(self.port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text()[-2000:] if self.log else ""
                raise RuntimeError(f"the rollout API did not come up (exit code {self.process.poll()}): {said}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End it as a crash does."""
        assert self.process is not None, "not started"
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it as a signal does; the exit code."""
        assert self.process is not None, "not started"
        self.process.terminate()
        return self.process.wait()


@contextlib.contextmanager
def running_server(*arguments: str, log: Path | None = None) -> Iterator[ServerProcess]:
    """A server that runs inside the `with`."""
    server = ServerProcess(arguments, log=log)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        return True
    return False
