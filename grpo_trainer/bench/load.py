"""Load on an inference server, from a separate process, and what the server's own counters say about it.

`python -m grpo_trainer.bench.load JSON`, with the fields of `Demand`, keeps a fixed number of sequences in flight until
it is killed. It asks for 8 completions a request, so that its own work is small: 32 connections hold 256 sequences.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from grpo_trainer.errors import ConfigError, ServerError
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.process import Process
from vllm_server.protocol import GENERATE_ROUTE

RUNNING = "vllm:num_requests_running"
"""vLLM's gauge of running sequences."""
TOKENS = "vllm:generation_tokens_total"
GROUP = 8
"""Completions of a request."""
DRAIN_SECONDS = 30.0


def quantile_ms(seconds: Sequence[float], share: float = 0.5) -> float:
    """Return the time in milliseconds below which `share` (0 to 1) of the times lie, interpolated linearly."""
    times, place = sorted(seconds), share * (len(seconds) - 1)
    low = int(place)
    high = min(low + 1, len(times) - 1)
    return round((times[low] + (place - low) * (times[high] - times[low])) * 1e3, 3)


def counter_total(metrics: str, name: str) -> float:
    """Return the sum of a counter over all its labels, from metrics in Prometheus' text format.

    Raises:
        ServerError: there is no such counter.
    """
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not lines:
        raise ServerError(field="/metrics of the inference server", got="no such counter", wanted=name)
    # After the labels, which may have any text in quotes, stand the value and perhaps a time.
    return sum(float(line.removeprefix(name).rpartition("}")[2].split()[0]) for line in lines)


class Meter:
    """A server's own counters."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, trust_env=False)

    def total(self, name: str) -> float:
        return counter_total(self._http.get("/metrics").raise_for_status().text, name)

    def generated(self) -> tuple[float, float]:
        """Return the number of generated tokens, and the time of reading it, by `perf_counter`."""
        asked = time.perf_counter()
        tokens = self.total(TOKENS)
        return tokens, (asked + time.perf_counter()) / 2

    def wait_for(self, condition: Callable[[float], bool], wanted: str, check: Callable[[], None]) -> None:
        """Wait until the number of running sequences satisfies a condition; `check` may raise meanwhile."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while not condition(running := self.total(RUNNING)):
            check()
            if time.monotonic() > deadline:
                got = f"{running:.0f} running requests after {DRAIN_SECONDS:.0f} s"
                raise ServerError(field="inference server", got=got, wanted=wanted)
            time.sleep(0.05)


class Demand(msgspec.Struct, frozen=True):
    """The load on the server at `url`."""

    url: str
    sequences: int
    """In flight, a multiple of 8."""
    prompt_len: int
    completion_len: int
    vocab: int
    """Token ids of the prompts are below this."""
    routing: dict[str, Any]
    """Which version answers."""


@contextmanager
def generating(demand: Demand, log_path: Path, meter: Meter) -> Iterator[None]:
    """Keep a server busy within the block; after it the server has dropped the requests.

    Raises:
        ProcessFailedError: the process that asks has ended by itself.
    """
    if demand.sequences % GROUP:
        raise ConfigError(field="--concurrency", got=demand.sequences, wanted=f"a multiple of {GROUP}")
    argv = (sys.executable, "-m", "grpo_trainer.bench.load", msgspec.json.encode(demand).decode())
    process = Process(ProcessSpec("load", argv), log_path)

    def check() -> None:
        if process.exit_code is not None:
            raise process.ended()

    try:
        meter.wait_for(bool, "one that runs", check)
        yield
        check()
    finally:
        process.kill()  # it holds nothing worth an orderly end
        process.close()
    meter.wait_for(lambda running: not running, "none once their client is gone", lambda: None)


async def _keep_busy(demand: Demand) -> None:
    connections = demand.sequences // GROUP
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)

    async def ask_forever(index: int) -> None:
        draw = random.Random(index)
        # The first completions end one after the other: else all requests would end, and start, at the same time.
        length = max(1, demand.completion_len * (index + 1) // connections)
        while True:
            prompt = {"prompt_token_ids": draw.choices(range(2, demand.vocab), k=demand.prompt_len)}
            sampling = {"n": GROUP, "max_tokens": length, "ignore_eos": True, "temperature": 1.0}
            answer = await http.post(GENERATE_ROUTE, json={"prompt": prompt, **sampling, **demand.routing})
            if answer.status_code != 200:
                raise httpx.HTTPError(f"{answer.status_code}: {answer.text[:500]}")
            length = demand.completion_len

    async with (
        httpx.AsyncClient(base_url=demand.url, timeout=600.0, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for index in range(connections):
            tasks.create_task(ask_forever(index))


if __name__ == "__main__":
    asyncio.run(_keep_busy(msgspec.json.decode(sys.argv[1], type=Demand)))
