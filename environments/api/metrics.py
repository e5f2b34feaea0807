"""GET /metrics: the queue's state as it is read, and how many requests were answered, by route and status."""

from collections.abc import Callable

import psutil
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from environments.api.service import Service

_GAUGES: dict[str, tuple[str, Callable[[Service], float]]] = {
    "step": ("Step that the trainer has acknowledged.", lambda api: api.step),
    "batch_size": (
        "Sequences per batch; 0 before a trainer registered.",
        lambda api: api.queue.run.trainer.batch_size if api.queue.run else 0,
    ),
    "queued_groups": ("Groups waiting.", lambda api: len(api.queue.line.groups)),
    "queued_sequences": ("Sequences waiting.", lambda api: api.queue.line.sequences),
    "queued_bytes": ("Bytes of waiting groups.", lambda api: api.queue.line.nbytes),
    "buffered_groups": ("Groups that wait for their kind.", lambda api: sum(map(len, api.queue.buffers.values()))),
    "leased_groups": ("Groups in the trainer's hands.", lambda api: len(api.queue.leased)),
    "received_groups": ("Groups received since the start.", lambda api: api.history.groups),
    "environments_alive": ("Environments heard of lately.", lambda api: len(api.queue.alive)),
    "memory_bytes": ("Bytes of groups in memory.", lambda api: api.payloads.in_memory),
    "spilled_groups": ("Groups whose bytes are on disk only.", lambda api: api.payloads.on_disk),
    "staleness_steps": (
        "Step less the oldest queued policy version.",
        lambda api: staleness.behind if (staleness := api.explain.staleness()) else 0,
    ),
    "resident_bytes": ("Resident memory of the process.", lambda api: psutil.Process().memory_info().rss),
}


class Metrics:
    """The registry of one service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        for name, (text, read) in _GAUGES.items():
            gauge = Gauge(f"rollout_api_{name}", text, registry=self.registry)
            gauge.set_function(lambda read=read: read(service))
        self._requests = Counter(
            "rollout_api_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )

    def count(self, route: str, status: int) -> None:
        """Count an answer, by its route's path, whose number is bounded."""
        self._requests.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
