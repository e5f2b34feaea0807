"""Tokens per second under load, and publishes under load.

The base model, the newest adapter, and that with publishes take turns, twice, so that drift cancels. Tokens are those
that the server's own counter has at a window's ends.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from grpo_trainer.bench.figures import DRAIN_SECONDS, Meter, median_ms, p95_ms
from grpo_trainer.bench.sync.generator import GROUP, Demand
from grpo_trainer.bench.sync.options import LoadChoice
from grpo_trainer.bench.sync.subject import Publish, Subject
from grpo_trainer.errors import ConfigError, ServerError
from grpo_trainer.launch.child import Child
from grpo_trainer.launch.plan import ProcessSpec

log = logging.getLogger(__name__)

ROUNDS = 2
SETTLE_SECONDS = 4.0
SETTLE_SHARE = 0.3


@contextmanager
def generating(demand: Demand, log_path: Path, meter: Meter) -> Iterator[None]:
    """Keep a server busy within the block.

    Raises:
        ProcessFailedError: the process that asks has ended by itself.
    """
    if demand.sequences % GROUP:
        raise ConfigError(field="--concurrency", got=demand.sequences, wanted=f"a multiple of {GROUP}")
    argv = (sys.executable, "-m", "grpo_trainer.bench.sync.generator", msgspec.json.encode(demand).decode())
    child = Child(ProcessSpec("load", argv), log_path)
    try:
        deadline = time.monotonic() + DRAIN_SECONDS
        while not meter.running:
            _check_busy(child)
            if time.monotonic() > deadline:
                raise ServerError(
                    field="inference server", got="no request that runs", wanted=f"one within {DRAIN_SECONDS:.0f} s"
                )
            time.sleep(0.05)
        yield
        _check_busy(child)
    finally:
        child.note_family()
        child.kill()  # it holds nothing worth an orderly end
        child.close()


def _check_busy(generator: Child) -> None:
    if generator.exit_code is not None:
        raise generator.ended()


def load_figures(
    subject: Subject[Any], logs: Path, choice: LoadChoice, sequences: int, vocab: int
) -> dict[str, float | int]:
    """Measure a server under load, without and with publishes.

    Args:
        sequences: in flight.
        vocab: of the model.
    """
    meter = Meter(subject.url)
    publishes: list[Publish] = []
    counted_K2 = np.zeros((3, 2))  # base, adapter, with publishes; tokens and seconds
    for number in range(1, ROUNDS + 1):
        for kind, routing in enumerate((subject.base_routing, {}, {})):
            demand = Demand(subject.url, sequences, choice.prompt_len, choice.completion_len, vocab, dict(routing))
            with generating(demand, logs / "load.log", meter):
                counted_K2[kind] += _window(subject, choice, meter, publishes if kind == 2 else None)
            subject.check()
            meter.drain()
        rates = " ".join(f"{tokens / seconds:.0f}" for tokens, seconds in counted_K2)
        log.info("load %d/%d: base, adapter, adapter with publishes: %s tokens/s", number, ROUNDS, rates)
    base, lora, publishing = (counted_K2[:, 0] / counted_K2[:, 1]).tolist()
    seconds = [publish.seconds for publish in publishes]
    stalls = [publish.stall_seconds for publish in publishes]
    return {
        "requests": sequences,
        "base_tokens_per_s": round(base, 1),
        "lora_tokens_per_s": round(lora, 1),
        "publishing_tokens_per_s": round(publishing, 1),
        "lora_over_base": round(lora / base, 4),
        "publishing_over_lora": round(publishing / lora, 4),
        "publishes_under_load": len(publishes),
        "publish_under_load_p50_ms": median_ms(seconds),
        "publish_under_load_p95_ms": p95_ms(seconds),
        "stall_under_load_p50_ms": median_ms(stalls),
        "stall_under_load_p95_ms": p95_ms(stalls),
    }


def _window(
    subject: Subject[Any], choice: LoadChoice, meter: Meter, publishes: list[Publish] | None
) -> tuple[float, float]:
    """Return tokens and seconds of one window of load, without its first seconds; publish meanwhile if asked to."""
    seconds = choice.load_seconds / ROUNDS
    start = time.perf_counter()

    def until(end: float) -> None:
        """Publish one version at a time, at a fixed rate, or as fast as possible if publishes take longer."""
        due = time.perf_counter()
        while publishes is not None and due < end:
            _wait(due)
            publishes.append(subject.publish())
            due = max(due + choice.publish_interval, time.perf_counter())
        _wait(end)

    until(start + min(SETTLE_SECONDS, SETTLE_SHARE * seconds))
    return meter.during(lambda: until(start + seconds))


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))
