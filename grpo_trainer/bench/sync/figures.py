"""The figures, and their arithmetic. Times are in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from grpo_trainer.errors import ServerError

RUNNING = "vllm:num_requests_running"
"""vLLM's gauge of running sequences."""


@dataclass(frozen=True)
class Publish:
    """One publish, in seconds: the total, the preparation of the weights, the engine's part, and the engine's pause."""

    seconds: float
    pack_seconds: float
    engine_seconds: float
    stall_seconds: float

    @property
    def request_seconds(self) -> float:
        """On the way and in the server's front end."""
        return self.seconds - self.pack_seconds - self.engine_seconds


@dataclass(frozen=True)
class Phases:
    """Medians; each publish's phases add up to it."""

    pack_ms: float
    request_ms: float
    engine_ms: float


@dataclass(frozen=True)
class PublishFigures:
    """Publishes on an idle server."""

    publish_p50_ms: float
    publish_p95_ms: float
    stall_ms: float
    stall_p95_ms: float
    phases: Phases


@dataclass(frozen=True)
class Baseline:
    """The same adapter by PEFT's `save_pretrained` and vLLM's own `/v1/load_lora_adapter`, medians."""

    baseline_ms: float
    baseline_save_ms: float
    baseline_repeat: int


@dataclass(frozen=True)
class LoadFigures:
    """Tokens per second of so many sequences in flight: of the base model, the newest adapter, and that while publishes
    come."""

    requests: int
    base_tokens_per_s: float
    lora_tokens_per_s: float
    publishing_tokens_per_s: float
    lora_over_base: float
    publishing_over_lora: float
    publishes_under_load: int
    publish_under_load_p50_ms: float
    publish_under_load_p95_ms: float
    stall_under_load_p50_ms: float
    stall_under_load_p95_ms: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of them lie, between neighbours in proportion.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("percentile of 0 values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_ms(seconds: Sequence[float]) -> float:
    """Of seconds, in milliseconds."""
    return round(percentile(seconds, 0.5) * 1e3, 3)


def p95_ms(seconds: Sequence[float]) -> float:
    """Of seconds, in milliseconds."""
    return round(percentile(seconds, 0.95) * 1e3, 3)


def publish_figures(publishes: Sequence[Publish]) -> PublishFigures:
    """Medians and 95th percentiles."""
    stalls = [publish.stall_seconds for publish in publishes]
    total = [publish.seconds for publish in publishes]
    phases = Phases(
        pack_ms=median_ms([publish.pack_seconds for publish in publishes]),
        request_ms=median_ms([publish.request_seconds for publish in publishes]),
        engine_ms=median_ms([publish.engine_seconds for publish in publishes]),
    )
    return PublishFigures(median_ms(total), p95_ms(total), median_ms(stalls), p95_ms(stalls), phases)


def counter_total(metrics: str, name: str) -> float:
    """The sum of a counter over all its labels, from Prometheus' text format.

    Raises:
        ServerError: it is not there.
    """
    found = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not found:
        raise ServerError(field="/metrics of the inference server", got="no such counter", wanted=name)
    families = text_string_to_metric_families("\n".join(found) + "\n")
    return sum(sample.value for family in families for sample in family.samples)
