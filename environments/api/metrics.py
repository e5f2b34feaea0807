"""GET /metrics: the queue's state as it is read, and every request counted and timed by route."""

import time
from collections.abc import Callable, Iterator

import psutil
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from environments.api.service import Service
from environments.api.waiting import WAITED

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """The registry of one service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Queue(service))
        self._requests = Counter(
            "rollout_api_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "rollout_api_request_seconds",
            "Time from request to answered.",
            ("route",),
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def shortcut(self, route: str) -> Callable[[], None]:
        """Counts answers of a route that are too many and too short to be timed one by one."""
        return self._requests.labels(route, "200").inc

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, its requests counted and those that do not wait timed; by route, as their number is bounded."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            status = 500

            async def watch(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            start = time.perf_counter()
            try:
                await app(scope, receive, watch)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                self._requests.labels(route, str(status)).inc()
                if WAITED not in scope:
                    self._seconds.labels(route).observe(time.perf_counter() - start)

        return measured


class _Queue(Collector):
    """What the queue says of itself at the moment of asking."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        queue, line, payloads = self.service.queue, self.service.queue.line, self.service.payloads
        run = queue.run
        staleness = self.service.explain.staleness()
        for name, text, value in (
            ("step", "Step that the trainer has acknowledged.", self.service.step),
            ("batch_size", "Sequences per batch; 0 before a trainer registered.", run.trainer.batch_size if run else 0),
            ("queued_groups", "Groups waiting.", len(line.groups)),
            ("queued_sequences", "Sequences waiting.", line.sequences),
            ("queued_bytes", "Bytes of waiting groups.", line.nbytes),
            ("buffered_groups", "Groups that wait for their kind.", sum(map(len, queue.buffers.values()))),
            ("leased_groups", "Groups in the trainer's hands.", len(queue.leased)),
            ("received_groups", "Groups received since the start.", self.service.history.groups),
            ("environments_alive", "Environments heard of lately.", len(queue.alive)),
            ("memory_bytes", "Bytes of groups in memory.", payloads.in_memory),
            ("spilled_groups", "Groups whose bytes are on disk only.", payloads.on_disk),
            ("staleness_steps", "Step less the oldest queued policy version.", staleness.behind if staleness else 0),
            ("resident_bytes", "Resident memory of the process.", psutil.Process().memory_info().rss),
        ):
            yield GaugeMetricFamily(f"rollout_api_{name}", text, value=value)
