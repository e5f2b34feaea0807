"""Data parallel replicas: what any replica's worker refuses is refused."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server.engine import Adapters, describe_workers
from vllm_server.publisher import Delivery

INSTALLED = {"slot": 0, "replayed": False, "unserved": (), "seconds": 0.1}
DELIVERY = Delivery("memory", "memory://1", {"r": 8}, file="file")


def engine(*replicas: list[dict[str, Any]]) -> Any:
    """An engine whose replicas answer so; as vLLM's, its own call returns the answers of the first."""

    async def first(method: str, *, args: Any = (), kwargs: Any = None) -> list[dict[str, Any]]:
        return replicas[0]

    async def one(kind: str, method: str, *given: Any, engine: int) -> list[dict[str, Any]]:
        return replicas[engine]

    return SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=len(replicas), use_ray=False)),
        engine_core=SimpleNamespace(_call_utility_async=one, core_engines=range(len(replicas))),
        collective_rpc=first,
    )


def adapters(*replicas: list[dict[str, Any]]) -> Adapters:
    numbers = count(1)
    models = SimpleNamespace(lora_requests={}, lora_id_counter=SimpleNamespace(inc=lambda _: next(numbers)))
    return Adapters(engine(*replicas), models)


@pytest.mark.parametrize("refusing", [0, 1])
def test_an_adapter_that_one_replica_refuses_is_refused(refusing: int) -> None:
    replicas = [[INSTALLED], [INSTALLED]]
    replicas[refusing] = [{"refused": "closed"}]
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(adapters(*replicas).add("policy-v1", 1, DELIVERY))


def test_the_workers_of_all_replicas_are_described() -> None:
    def worker(rank: int) -> dict[str, Any]:
        return {"rank": rank, "gpu_uuid": "", "visible_gpus": []}

    found = asyncio.run(describe_workers(engine([worker(0)], [worker(1)])))
    assert [each.rank for each in found] == [0, 1]
