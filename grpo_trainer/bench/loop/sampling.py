"""Samples a run from outside: CPU time and memory of its processes, requests of its server."""

from __future__ import annotations

import os
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import psutil

from grpo_trainer.bench.devices import gpus_used_mb
from grpo_trainer.bench.figures import RUNNING, cache_tokens, counter_total
from grpo_trainer.bench.loop.figures import BENCH, Load, Look
from grpo_trainer.bench.loop.processes import role_of
from grpo_trainer.config.server import KEY_VARIABLE
from vllm_server.protocol import BRIDGE_INFO_ROUTE, BridgeInfo

TICK_SECONDS = 0.25
LOADS_EVERY = 2
"""Ticks: vLLM writes all of its metrics for each answer, with CPU time of the front end that is measured."""
MEMORY_EVERY = 16
"""Ticks between looks at memory that is shared, which the kernel must count page by page."""


class Watch:
    """The samples of one run.

    Attributes:
        seen: phase of the start -> Unix seconds at which it was seen to be reached.
        rss: by role, the most bytes that its processes held at once, memory that they share counted for each.
        pss: likewise of all processes, shared memory counted once; 0: the kernel does not say.
        gpu_mb: the most that was in use on all GPUs, in units of 1e6 bytes; None: there is none.
        info: who the server is; None: it never answered.
        cache_tokens: tokens that its KV cache has room for; None: it did not say.
    """

    def __init__(self, pid: int, run_dir: Path) -> None:
        self.looks: list[Look] = []
        self.loads: list[Load] = []
        self.seen: dict[str, float] = {}
        self.rss: dict[str, int] = defaultdict(int)
        self.pss = 0
        self.gpu_mb: float | None = None
        self.info: BridgeInfo | None = None
        self.cache_tokens: int | None = None
        self._run = psutil.Process(pid)
        self._config = run_dir / "config" / "trainer.toml"
        self._cpu: dict[psutil.Process, tuple[str, float]] = {}
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=5.0, trust_env=False, headers=headers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample from a thread until the block exits."""
        done = threading.Event()
        with ThreadPoolExecutor(1, "watch") as pool, self._http:
            looking = pool.submit(self._until, done)
            try:
                yield
            finally:
                done.set()
            looking.result()

    def _until(self, done: threading.Event) -> None:
        tick = 0
        while not done.wait(TICK_SECONDS):
            family = self._family()
            self._look(family)
            if self.info is None or tick % LOADS_EVERY == 0:
                self._ask_server()
            if tick % MEMORY_EVERY == 0:
                self._weigh(family)
            tick += 1

    def _family(self) -> list[tuple[psutil.Process, str]]:
        """Yield the run's processes with their roles."""
        roles = {self._run.pid: "run"}
        family = [(self._run, "run")]
        with suppress(psutil.Error):
            for process in self._run.children(recursive=True):  # parents come before their children
                with suppress(psutil.Error):
                    role = role_of(" ".join(process.cmdline()), roles.get(process.ppid(), "run"))
                    roles[process.pid] = role
                    family.append((process, role))
        return family

    def _look(self, family: list[tuple[psutil.Process, str]]) -> None:
        now = time.time()
        rss: dict[str, int] = defaultdict(int)
        for process, role in family:
            with suppress(psutil.Error):  # it has ended just now
                times = process.cpu_times()
                self._cpu[process] = (role, times.user + times.system)
                rss[role] += process.memory_info().rss
                if role not in ("run", "engine"):
                    self.seen.setdefault(f"{role}_started", now)
        rss["all"] = sum(rss.values())
        for role, held in rss.items():
            self.rss[role] = max(self.rss[role], held)
        cpu_s: dict[str, float] = defaultdict(float, {BENCH: time.process_time()})
        for role, seconds in self._cpu.values():
            cpu_s[role] += seconds
        self.looks.append(Look(now, cpu_s))

    def _weigh(self, family: list[tuple[psutil.Process, str]]) -> None:
        pss = 0
        for process, _ in family:
            with suppress(psutil.Error):
                pss += process.memory_full_info().pss
        self.pss = max(self.pss, pss)
        used = gpus_used_mb(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if used is not None:
            self.gpu_mb = max(self.gpu_mb or 0.0, used)

    def _ask_server(self) -> None:
        if not self._config.exists():
            return
        url = f"http://127.0.0.1:{tomllib.loads(self._config.read_text())['vllm_port']}"
        asked = time.time()
        try:
            if self.info is None:
                answer = self._http.get(f"{url}{BRIDGE_INFO_ROUTE}").raise_for_status()
                self.info = msgspec.json.decode(answer.content, type=BridgeInfo)
                self.seen["server_ready"] = asked
            metrics = self._http.get(f"{url}/metrics").raise_for_status().text
        except httpx.HTTPError:
            if self.info is not None:  # it is started again, or has ended
                self.loads.append(Load(asked, 0.0))
            return
        self.cache_tokens = self.cache_tokens or cache_tokens(metrics)
        self.loads.append(Load(asked, counter_total(metrics, RUNNING)))
