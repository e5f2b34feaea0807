"""Figures of several benchmarks: quantiles of times, and the counters of a vLLM server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from grpo_trainer.errors import ServerError

RUNNING = "vllm:num_requests_running"
"""vLLM's gauge of running sequences."""
TOKENS = "vllm:generation_tokens_total"
CACHE_INFO = "vllm:cache_config_info"
DRAIN_SECONDS = 30.0


def quantile_ms(seconds: Sequence[float], share: float) -> float:
    """Return the time in milliseconds below which `share` (0 to 1) of the times lie, interpolated linearly."""
    return round(float(np.quantile(seconds, share)) * 1e3, 3)


def median_ms(seconds: Sequence[float]) -> float:
    return quantile_ms(seconds, 0.5)


def p95_ms(seconds: Sequence[float]) -> float:
    return quantile_ms(seconds, 0.95)


def counter_total(metrics: str, name: str) -> float:
    """Return the sum of a counter over all its labels, from metrics in Prometheus' text format.

    Raises:
        ServerError: it is not there.
    """
    if not (found := _samples(metrics, name)):
        raise ServerError(field="/metrics of the inference server", got="no such counter", wanted=name)
    return sum(sample.value for sample in found)


def cache_tokens(metrics: str) -> int | None:
    """Return the tokens that a server's KV cache has room for, from vLLM's metrics as text; None: they don't say."""
    found = [sample.labels for sample in _samples(metrics, CACHE_INFO)]
    sizes = [(labels.get("num_gpu_blocks", ""), labels.get("block_size", "")) for labels in found]
    if not sizes or not all(part.isdecimal() for size in sizes for part in size):
        return None
    return sum(int(blocks) * int(size) for blocks, size in sizes)


def _samples(metrics: str, name: str) -> list[Sample]:
    """Return a metric's samples; only its own lines are parsed, because vLLM has hundreds of others."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return [sample for family in text_string_to_metric_families("\n".join(lines) + "\n") for sample in family.samples]


class Meter:
    """A server's own counters."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, trust_env=False)

    def during(self, action: Callable[[], object]) -> tuple[float, float]:
        """Return how many tokens the server generates during an action, and the seconds that it took."""
        tokens, began = self._counted()
        action()
        more, ended = self._counted()
        return more - tokens, ended - began

    def _counted(self) -> tuple[float, float]:
        """Return the number of generated tokens, and the time of reading it."""
        asked = time.perf_counter()
        tokens = self._metric(TOKENS)
        return tokens, (asked + time.perf_counter()) / 2

    @property
    def running(self) -> float:
        return self._metric(RUNNING)

    def drain(self) -> None:
        """Wait until the server has dropped the requests of closed connections."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.running:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"requests still run {DRAIN_SECONDS:.0f} s after their clients have gone",
                    field="inference server",
                    got=f"{self.running:.0f} requests",
                    wanted="none",
                )
            time.sleep(0.05)

    def _metric(self, name: str) -> float:
        return counter_total(self._http.get("/metrics").raise_for_status().text, name)
