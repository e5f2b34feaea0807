"""Load on an inference server, from a separate process, and what the server's own counters say about it.

The load asks for 8 completions a request, so that its own work is small: 32 connections hold 256 sequences.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import numpy as np

from grpo_trainer.errors import ProcessFailedError, ServerError
from grpo_trainer.signals import running_time
from vllm_server.protocol import GENERATE_ROUTE

RUNNING = "vllm:num_requests_running"
"""vLLM's gauge of running sequences."""
TOKENS = "vllm:generation_tokens_total"
GROUP = 8
"""Completions of a request."""
DRAIN_SECONDS = 30.0


def quantile_ms(seconds: Sequence[float], share: float = 0.5) -> float:
    """Return the time in milliseconds below which `share` (0 to 1) of the times lie, interpolated linearly."""
    return round(float(np.quantile(seconds, share)) * 1e3, 3)


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


def total(url: str, name: str) -> float:
    """Return the present sum of a server's counter."""
    return counter_total(httpx.get(f"{url}/metrics", timeout=60.0, trust_env=False).raise_for_status().text, name)


def generated(url: str) -> tuple[float, float]:
    """Return the number of tokens that a server has generated, and the time of reading it, by `perf_counter`."""
    asked = time.perf_counter()
    tokens = total(url, TOKENS)
    return tokens, (asked + time.perf_counter()) / 2


class Demand(NamedTuple):
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
def generating(demand: Demand) -> Iterator[None]:
    """Keep a server busy within the block; after it the server has dropped the requests.

    Raises:
        ProcessFailedError: the process that asks has ended by itself; it has printed why.
    """
    process = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(demand,), daemon=True)

    def wait_for(busy: bool) -> None:
        deadline = running_time() + DRAIN_SECONDS
        while bool(running := total(demand.url, RUNNING)) != busy:
            check(busy)
            if running_time() > deadline:
                got, wanted = f"{running:.0f} after {DRAIN_SECONDS:.0f} s", "one" if busy else "none without a client"
                raise ServerError(field="running requests", got=got, wanted=wanted)
            time.sleep(0.05)

    def check(busy: bool = True) -> None:
        if busy and not process.is_alive():
            raise ProcessFailedError(field="load", got=f"exit code {process.exitcode}")

    process.start()
    try:
        wait_for(True)
        yield
        check()
    finally:
        process.kill()  # it holds nothing worth an orderly end
        process.join()  # no device could keep it
    wait_for(False)


def keep_busy(demand: Demand) -> None:
    """Keep a fixed number of sequences in flight until a request fails."""
    connections = demand.sequences // GROUP
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)

    async def ask_forever(http: httpx.AsyncClient, index: int) -> None:
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

    async def ask() -> None:
        async with (
            httpx.AsyncClient(base_url=demand.url, timeout=600.0, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for index in range(connections):
                tasks.create_task(ask_forever(http, index))

    asyncio.run(ask())
