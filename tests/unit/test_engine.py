"""vLLM's engine as the server uses it: replicas, adapters' names, holding generation before weights are written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.factories import story
from vllm_server.errors import IncompatibleError, ServeError
from vllm_server.publisher import Delivery
from vllm_server.server import Adapters, SharedEngine, describe_workers

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

    found = asyncio.run(describe_workers(engine([worker(1)], [worker(0)])))
    assert [each.rank for each in found] == [0, 1]


@pytest.mark.parametrize("ray", [False, True])
def test_an_engine_that_would_outlive_its_server_is_refused(ray: bool) -> None:
    """This vLLM starts engines by another function than the one that is replaced; with Ray nothing is."""
    served = engine([{"rank": 0, "gpu_uuid": "", "visible_gpus": [], "guarded": False}])
    served.vllm_config.parallel_config.use_ray = ray
    if ray:
        assert len(asyncio.run(describe_workers(served))) == 1
    else:
        with pytest.raises(IncompatibleError):
            asyncio.run(describe_workers(served))


def test_the_metric_does_not_keep_the_names_of_versions_that_are_gone() -> None:
    prometheus, removed = pytest.importorskip("prometheus_client"), list[int]()

    async def remove_lora(adapter_id: int) -> None:
        removed.append(adapter_id)

    engine: Any = SimpleNamespace(remove_lora=remove_lora)
    models = SimpleNamespace(lora_requests={"policy-v1": 0}, lora_id_counter=None)
    gauge = prometheus.Gauge("vllm:lora_requests_info", "As vLLM's.", ["running_lora_adapters"])
    try:
        gauge.labels("policy-v1").set(1)
        asyncio.run(Adapters(engine, models).remove("policy-v1", 1))
        assert removed == [1] and not [sample for metric in gauge.collect() for sample in metric.samples]
    finally:
        prometheus.REGISTRY.unregister(gauge)


# holding generation -------------------------------------------------------------------------------------------


@dataclass
class Core:
    """Confirms a pause at once if it has no batch, and otherwise after the device was waited for."""

    batches: int
    events: list[str] = field(default_factory=list)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.events.append(f"pause, {mode}, {clear_cache}")
        if self.batches:
            await self.drained.wait()
        self.events.append("paused")

    async def collective_rpc(self, method: str) -> None:
        await asyncio.sleep(0)
        self.events.append(method)
        self.batches = max(0, self.batches - 1)
        if not self.batches:
            self.drained.set()


@pytest.mark.parametrize(
    ("batches", "after"), [(0, ["paused", "grpo_synchronize"]), (1, ["grpo_synchronize", "paused", "grpo_synchronize"])]
)
def test_the_device_is_waited_for_after_the_pause_is_confirmed(batches: int, after: list[str]) -> None:
    core = Core(batches)
    engine: Any = SimpleNamespace(engine_core=core, collective_rpc=core.collective_rpc)
    asyncio.run(SharedEngine(engine).hold(abort=False))
    assert core.events == ["pause, keep, False", *after]


async def passed_on(request: Any, fence: Any) -> list[tuple[str, str]]:
    """Pass a completion to the engine; return those that vLLM's tables and its engine got, each with its cache key."""
    serve, got = pytest.importorskip("vllm_server.serve"), list[tuple[str, str]]()

    async def add(request: Any) -> None:
        got.append(("engine", request.cache_salt))

    class LLM(serve.FencedLLM):
        def __init__(self) -> None:
            tables = SimpleNamespace(
                has_request=lambda name: True, add_request=lambda each, *_: got.append(("tables", each.cache_salt))
            )
            self.fence, self.engine_core = fence, SimpleNamespace(add_request_async=add)
            self.output_processor, self.log_requests = tables, False

        def shutdown(self, timeout: float | None = None) -> None: ...

    try:
        await LLM()._add_request(request, None, None, 0, None)
    except (ServeError, asyncio.CancelledError) as error:
        got.append(("error", type(error).__name__))
    return got


class Passage:
    """A fence that is closed."""

    def __init__(self) -> None:
        self.salt, self.open, self.fault = "old", asyncio.Event(), False

    async def passage(self) -> None:
        await self.open.wait()
        if self.fault:
            raise ServeError(503, "weights", got="torn", wanted="whole ones", fix="write them again")


@pytest.mark.parametrize(
    ("end", "got"),
    [
        ("written", [("tables", "new mine"), ("engine", "new mine")]),
        ("torn", [("error", "ServeError")]),
        ("the client leaves", [("error", "CancelledError")]),
    ],
)
@story
async def test_engine_gets_a_completion_of_an_update_with_the_new_cache_key_or_not_at_all(
    end: str, got: list[tuple[str, str]]
) -> None:
    fence = Passage()
    arriving = asyncio.create_task(passed_on(SimpleNamespace(request_id="a", cache_salt="mine"), fence))
    await asyncio.sleep(0.01)
    assert not arriving.done()
    fence.salt, fence.fault = "new", end == "torn"
    arriving.cancel() if end == "the client leaves" else fence.open.set()
    assert await arriving == got


@story
async def test_engine_whose_weights_stay_has_the_cache_keys_of_its_clients() -> None:
    got = await passed_on(SimpleNamespace(request_id="a", cache_salt=None), None)
    assert got == [("tables", None), ("engine", None)]
