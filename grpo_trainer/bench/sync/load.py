"""Tokens per second under load, and publishes under load.

The base model, the newest adapter, and that with publishes take turns, twice, so that drift cancels. Tokens are those
that the server's own counter has at a window's ends.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from grpo_trainer.bench.sync.figures import RUNNING, LoadFigures, Publish, counter_total, median_ms, p95_ms
from grpo_trainer.bench.sync.generator import GROUP, Demand
from grpo_trainer.bench.sync.options import LoadChoice
from grpo_trainer.bench.sync.subject import Place, Subject
from grpo_trainer.errors import ConfigError, ServerError
from grpo_trainer.launch.child import Child
from grpo_trainer.launch.plan import ProcessSpec

log = logging.getLogger(__name__)

TOKENS = "vllm:generation_tokens_total"
ROUNDS = 2
SETTLE_SECONDS = 4.0
SETTLE_SHARE = 0.3
DRAIN_SECONDS = 30.0


@dataclass
class Tally:
    """Tokens and seconds of one kind of load."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Meter:
    """The server's own counters."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, trust_env=False)

    def counted(self) -> tuple[float, float]:
        """Return the number of generated tokens, and the time of reading it."""
        asked = time.perf_counter()
        tokens = self._metric(TOKENS)
        return tokens, (asked + time.perf_counter()) / 2

    @property
    def running(self) -> float:
        """Return the number of running sequences."""
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


@contextmanager
def generating(demand: Demand, log_path: Path, meter: Meter) -> Iterator[Child]:
    """Keep a server busy within the block."""
    if demand.sequences % GROUP:
        raise ConfigError(field="--concurrency", got=demand.sequences, wanted=f"a multiple of {GROUP}")
    argv = (sys.executable, "-m", "grpo_trainer.bench.sync.generator", msgspec.json.encode(demand).decode())
    child = Child(ProcessSpec("load", argv), log_path, _silent, _silent)
    try:
        deadline = time.monotonic() + DRAIN_SECONDS
        while not meter.running:
            check_busy(child)
            if time.monotonic() > deadline:
                raise ServerError(
                    field="inference server", got="no request that runs", wanted=f"one within {DRAIN_SECONDS:.0f} s"
                )
            time.sleep(0.05)
        yield child
    finally:
        child.kill_group(child.family())  # it holds nothing worth an orderly end
        child.close()


def check_busy(generator: Child) -> None:
    """Raise an error if the process has ended by itself."""
    if generator.exit_code is not None:
        raise generator.ended()


@dataclass
class LoadTest:
    """One server's tests under load.

    Args:
        sequences: in flight.
        vocab: of the model.
    """

    subject: Subject
    place: Place
    choice: LoadChoice
    url: str
    sequences: int
    vocab: int
    _meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self._meter = Meter(self.url)

    def run(self) -> LoadFigures:
        base, lora, publishing = Tally(), Tally(), Tally()
        publishes: list[Publish] = []
        for number in range(1, ROUNDS + 1):
            self._phase(base, self.subject.base_routing, _wait)
            self._phase(lora, {}, _wait)
            self._phase(publishing, {}, lambda until: self._publish_until(until, publishes))
            rates = (base.rate, lora.rate, publishing.rate)
            log.info("load %d/%d: base %.0f, adapter %.0f, with publishes %.0f tokens/s", number, ROUNDS, *rates)
        seconds = [publish.seconds for publish in publishes]
        stalls = [publish.stall_seconds for publish in publishes]
        return LoadFigures(
            requests=self.sequences,
            base_tokens_per_s=round(base.rate, 1),
            lora_tokens_per_s=round(lora.rate, 1),
            publishing_tokens_per_s=round(publishing.rate, 1),
            lora_over_base=round(lora.rate / base.rate, 4),
            publishing_over_lora=round(publishing.rate / lora.rate, 4),
            publishes_under_load=len(publishes),
            publish_under_load_p50_ms=median_ms(seconds),
            publish_under_load_p95_ms=p95_ms(seconds),
            stall_under_load_p50_ms=median_ms(stalls),
            stall_under_load_p95_ms=p95_ms(stalls),
        )

    def _phase(self, tally: Tally, routing: dict[str, Any], meanwhile: Callable[[float], None]) -> None:
        """Measure one window of load, without its first seconds."""
        seconds = self.choice.load_seconds / ROUNDS
        demand = Demand(
            self.url, self.sequences, self.choice.prompt_len, self.choice.completion_len, self.vocab, routing
        )
        with generating(demand, self.place.logs / "load.log", self._meter) as generator:
            start = time.perf_counter()
            meanwhile(start + min(SETTLE_SECONDS, SETTLE_SHARE * seconds))
            tokens, began = self._meter.counted()
            meanwhile(start + seconds)
            more, ended = self._meter.counted()
            check_busy(generator)
        self.subject.check()
        tally.tokens += more - tokens
        tally.seconds += ended - began
        self._meter.drain()

    def _publish_until(self, until: float, publishes: list[Publish]) -> None:
        """Publish one version at a time, at a fixed rate, or as fast as possible if publishes take longer."""
        due = time.perf_counter()
        while due < until:
            _wait(due)
            publishes.append(self.subject.publish())
            due = max(due + self.choice.publish_interval, time.perf_counter())
        _wait(until)


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))


def _silent(line: str) -> None:
    """Do nothing: the line is in the log."""
