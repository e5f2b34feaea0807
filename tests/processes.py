"""Real processes for tests: started in groups of their own, ended by those, their last words shown."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_trainer.launch.ports import claim_ports

ROOT = Path(__file__).parents[1]
GPU_SHARE = "0.1"
"""Share of a GPU that vLLM must find free when it starts, so that four workers' servers and trainers fit on one card.
Only the KV cache's size in bytes keeps vLLM from measuring the free memory, which fails if another process frees some.
"""


def free_port() -> int:
    return claim_ports({"x": 0})["x"]


def modules(name: str, *words_of_each: Sequence[object]) -> list[subprocess.Popen[str]]:
    """Start `python -m NAME WORDS` with each of these words, and with its output in a pipe."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", name, *map(str, words)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for words in words_of_each
    ]  # fmt: skip


def said_by(processes: Sequence[subprocess.Popen[str]], statuses: Sequence[int], seconds: float = 240) -> list[str]:
    """Wait until processes end with these exit statuses; return what each has said."""
    said = [process.communicate(timeout=seconds)[0] for process in processes]
    ended = [process.returncode for process in processes]
    assert ended == [*statuses], "\n".join(text[-3000:] for text in said)
    return said


@contextmanager
def running(
    *arguments: str, log: Path, env: dict[str, str] | None = None, folder: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """`python ARGUMENTS` with its output in a file, until the block is left."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], seconds: float = 15.0) -> None:
    """SIGTERM, patience, then SIGKILL for its whole group."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(what: str, done: Callable[[], bool], log: Path, seconds: float = 180.0, every: float = 0.1) -> None:
    """Poll until it is so; the failure shows the end of a log.

    Args:
        every: seconds from one look to the next.
    """
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {what}\n{tail(log)}"
        time.sleep(every)


@contextmanager
def once(done: Callable[[], bool], act: Callable[[], object], every: float = 0.02) -> Iterator[list[float]]:
    """While the block runs, look in another thread whether something is so, and then act, once.

    Yields a list that gets the time at which it acted.

    Args:
        every: seconds from one look to the next.
    """
    over, acted = threading.Event(), list[float]()

    def look() -> None:
        while not over.wait(every):
            if done():
                acted.append(time.monotonic())
                act()
                return

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield acted
        finally:
            over.set()  # nothing is done to what comes after the block, for example no signal to pytest
        looking.result()


def found_in(log: Path, pattern: str) -> re.Match[str] | None:
    """Find a pattern in a log, where ^ and $ are the ends of a line. None: it is not there, or there is no log yet."""
    return re.search(pattern, log.read_text(), re.MULTILINE) if log.exists() else None


def answers(url: str) -> bool:
    """Whether a GET gets 200."""
    try:
        return httpx.get(url, timeout=10.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


def mentioning(text: str) -> list[list[str]]:
    """Command lines of the processes that have this in theirs."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(text in part for part in line)]


def alive(pids: list[int]) -> list[int]:
    """Those that still do something."""
    living = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if is_alive(psutil.Process(pid)):
                living.append(pid)
    return living


def assert_ended(pids: Iterable[int], log: Path = Path(os.devnull)) -> None:
    """A killed process that had much memory takes a while to end on a busy machine."""
    wait_for("all have ended", lambda: not alive(list(pids)), log, 20)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still does something; another process may have got its id."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> dict[int, str]:
    """All descendants of a process, with their command lines."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def load_script(name: str) -> Any:
    """Import scripts/NAME.py, a program, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
