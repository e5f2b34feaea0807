"""vLLM's metric of adapters, whose names are new with each version."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, Gauge

from vllm_server.engine import Adapters


def test_the_metric_does_not_keep_the_names_of_versions_that_are_gone() -> None:
    removed: list[int] = []

    async def remove_lora(adapter_id: int) -> None:
        removed.append(adapter_id)

    engine: Any = SimpleNamespace(remove_lora=remove_lora)
    models = SimpleNamespace(lora_requests={"policy-v1": 0}, lora_id_counter=None)
    gauge = Gauge("vllm:lora_requests_info", "As vLLM's.", ["running_lora_adapters"])
    try:
        gauge.labels("policy-v1").set(1)
        asyncio.run(Adapters(engine, models).remove("policy-v1", 1))
        assert removed == [1] and not [sample for metric in gauge.collect() for sample in metric.samples]
    finally:
        REGISTRY.unregister(gauge)
