"""vLLM's engine as the server uses it: replicas, adapters' names, holding generation before weights are written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
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


class Door:
    """Stands in for the fence and for vLLM's engine."""

    def __init__(self) -> None:
        self.salt, self.passed, self.fault = "old", asyncio.Event(), False
        self.begun: list[tuple[str, str]] = []

    async def passage(self) -> None:
        await self.passed.wait()
        if self.fault:
            raise ServeError(503, "weights", got="torn", wanted="whole ones", fix="write them again")

    async def add(self, request: Any) -> None:
        self.begun.append((request.request_id, request.cache_salt))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("refusal", [None, ServeError, asyncio.CancelledError], ids=["begins", "torn", "cancelled"])
@story
async def test_each_completion_of_vllms_own_requests_waits_and_gets_the_new_cache_key(
    n: int, refusal: type[BaseException] | None
) -> None:
    """vLLM passes the completions of one request to its engine in another way than a single one.

    One that may not begin leaves nothing in vLLM's tables.
    """
    llm = pytest.importorskip("vllm.v1.engine.async_llm").AsyncLLM
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    async def ended(names: list[str]) -> None: ...

    door, table = Door(), OutputProcessor(None, log_stats=False)
    core = SimpleNamespace(add_request_async=door.add, abort_requests_async=ended)
    engine: Any = SimpleNamespace(engine_core=core, output_processor=table)
    SharedEngine(engine).salt_caches(door.passage, lambda: door.salt)
    unchecked = SimpleNamespace(
        apply_watermarking=lambda *_: None, resolve_watermarking=lambda _: None, assign_request_id=lambda _: None
    )
    parts: dict[str, Any] = {"errored": False, "log_requests": False, "input_processor": unchecked}
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
    vllms = SimpleNamespace(**parts, **vars(engine), vllm_config=config, check_admission=lambda *_, **__: None)
    vllms._run_output_handler = lambda: None
    vllms._add_request, vllms.abort = partial(llm._add_request, vllms), partial(llm.abort, vllms)

    params = SamplingParams(n=n)
    request = EngineCoreRequest("a", [1], None, params, None, 0.0, None, "mine", None, external_req_id="a")
    arriving = asyncio.create_task(llm.add_request(vllms, "a", request, params))
    await asyncio.sleep(0.01)
    assert (len(table.request_states), door.begun) == (n, [])
    door.salt, door.fault = "new", refusal is ServeError
    if refusal is asyncio.CancelledError:
        arriving.cancel()
    else:
        door.passed.set()
    if refusal is not None:
        with pytest.raises(refusal):
            await arriving
        assert not table.request_states and door.begun == []
    else:
        await arriving
        assert door.begun == [(name, "new mine") for name in (["a"] if n == 1 else ["0_a", "1_a"])]
