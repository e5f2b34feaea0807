"""Settings of all tests."""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import functools
import inspect
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx._transports.default
import pytest
from filelock import FileLock
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings

from tests import warm
from tests.processes import ROOT, free_port

# Their assertions show their values, as those of the tests that call them do.
pytest.register_assert_rewrite("tests.bridge_contract", "tests.shared_contract")

# Before torch is imported. Models of tests are tiny: waking a second thread for an operation takes them longer than the
# operation, 2.5 times in all where weights are tried one by one. Idle threads sleep: spinning ones take the cores from
# the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# What `grpo run` keeps from one start to the next is these tests' own.
os.environ["GRPO_CACHE"] = tempfile.mkdtemp(prefix="grpo-cache-")
atexit.register(shutil.rmtree, os.environ["GRPO_CACHE"], ignore_errors=True)

# Ports of each of a session's workers, and of all that its tests start, are its own: a port that is free when it is
# chosen may be taken before its server listens there.
_share = 10_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_first = 20_000 + _share * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
os.environ["GRPO_PORTS"] = f"{_first}-{_first + _share - 1}"

# vLLM's own cache of model classes stays shared between test sessions: without it the first server takes 10 s longer.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path("~/.cache/vllm").expanduser()))

# By default httpx waits for an answer for 5 s. A busy machine stalls a process for that long, so tests wait longer.
for _phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)

# A client of httpx reads the certificates of all authorities, also for http. That takes 30 ms, and tests ask several
# times a second whether a server has started.
_context = functools.cache(httpx.create_ssl_context)
httpx._transports.default.create_ssl_context = _context  # pyright: ignore[reportPrivateImportUsage]

# A server may run on the same machine as the tests: slowness is no failure.
settings.register_profile("few", deadline=None, max_examples=20)
settings.register_profile("many", deadline=None, max_examples=200)  # --hypothesis-profile=many, of the complete lane
settings.load_profile("few")

LANES = {"unit": None, "contract": None, "bridges": None, "integration": "complete", "gpu": "gpu"}
"""The marker of each folder's tests. Those without one are the default lane; CONTRIBUTING.md says what is where."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lane = LANES[item.path.relative_to(Path(__file__).parent).parts[0]]
        if lane:
            item.add_marker(lane)
    long = {item.path for item in items if item.get_closest_marker("complete")}
    items.sort(key=lambda item: item.path not in long)  # a long file that came last would occupy one of two cores


END_S = 120.0
"""Seconds that a test which was interrupted by its time-out has to end."""
_stderr = 2  # of a captured test it is a file


def pytest_configure(config: pytest.Config) -> None:
    """Start warm what starts the workers of pytest-xdist, and so the workers; with GPUs each makes its own imports."""
    global _stderr
    _stderr = os.dup(2)
    if config.getoption("numprocesses", None) and not Path("/dev/nvidiactl").exists():
        warm.start()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    """End the process, and show the stacks of its threads, for a test that its time-out does not end.

    The time-out is an alarm, which raises an error. Code that waits again on the way out then waits for ever:
    `asyncio.run` for tasks and threads, `with subprocess.Popen` for the process. pytest-xdist names the crashed test.
    """
    if not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(settings.timeout + END_S, exit=True, file=_stderr)
    return (yield)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def warm_processes() -> None:
    """What tests start from now on has made its imports."""
    warm.start()


@pytest.fixture(scope="session")
def warm_environments() -> None:
    """The same for environments and judges of answers alone."""
    warm.start(warm.ENVIRONMENTS)


@pytest.fixture(scope="session")
def warm_trainers() -> None:
    """The same for trainers and environments, without vLLM."""
    warm.start(warm.TRAINERS)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory, warm_processes: None) -> Path:
    """The quickstart's model, built by its own command, once for all workers of pytest-xdist; no test changes it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo-model"
    command = [sys.executable, "-m", "grpo_trainer", "demo-model", str(folder)]
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port at which this process listens, among those of this worker: its neighbours are free."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port()))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Executor]:
    """A process in which Triton interprets: it decides that when it is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(abs, 1).result()
        yield pool


@contextmanager
def counted_graphs(backend: str) -> Iterator[Any]:
    """Have torch's compiler trace for a simpler backend than its code generator, and count its graphs."""
    import torch  # only where it is needed
    from torch._dynamo.utils import counters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        torch._dynamo.reset()
        counters.clear()
        yield counters["stats"]
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Iterator[Any]:
    """Graphs run as Dynamo traces them. `aot_eager` also traces their backward passes, which takes three times as long:
    only for what layers keep for those."""
    with counted_graphs("eager") as counted:
        yield counted


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
