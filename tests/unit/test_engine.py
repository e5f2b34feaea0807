"""vLLM's engine as the server uses it, and the registry of policy versions: who gets which, and which may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.factories import refusing
from vllm_server.errors import IncompatibleError, ServeError
from vllm_server.fence import SharedEngine
from vllm_server.policy import Lease, PolicyRegistry, Version
from vllm_server.protocol import parse_version
from vllm_server.publisher import Adapters, Delivery
from vllm_server.server import describe_workers

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


# the registry of policy versions --------------------------------------------------------------------------------------


def registry(keep: int = 2, capacity: int = 4, base_version: int = 0) -> PolicyRegistry:
    names = {"served_name": "base", "lora_name": "policy", "aliases": ("also",)}
    return PolicyRegistry(**names, keep=keep, capacity=capacity, base_version=base_version)  # type: ignore[arg-type]


def publish(held: PolicyRegistry, version: int | None = None, *, name: str | None = None) -> Version:
    name, number = held.name_for(name, version)
    ready = held.reserve(name, number, adapter_id=held.load_count + 1, path=f"/adapters/{name}", now=1.0)
    held.activate(ready)
    return ready


@pytest.mark.parametrize("number", [0, 6])
def test_registry_counts_from_the_version_of_the_base_model(number: int) -> None:
    held = registry(base_version=number)
    assert held.resolve() is held.resolve(policy_version=number) is held.newest is held.base
    assert (held.newest.version, held.newest.name) == (number, "base")
    with refusing(ServeError, "policy_version", got=str(6 - number)):
        held.resolve(policy_version=6 - number)
    assert publish(held).name == f"policy-v{number + 1}" and held.newest.version == number + 1
    assert held.resolve(policy_version=number) is held.base


def test_registry_base_model_that_is_written() -> None:
    held = registry()
    lease = Lease(held.resolve())
    assert (lease.began_with, lease.ended_with) == (0, None)
    held.rebase(3)
    assert (lease.began_with, lease.ended_with) == (0, 3)
    for number in (-1, 0):  # a proof writes other weights, then those of the beginning
        held.rebase(number)
        assert (lease.began_with, lease.ended_with) == (0, number)
    held.rebase(3)
    assert held.resolve(policy_version=3) is held.base and held.name_for(None, None) == ("policy-v4", 4)
    with refusing(ServeError, "policy_version"):
        held.resolve(policy_version=0)
    for number in (-1, 2):  # after a proof, and by a resumed run
        held.rebase(number)
        assert held.newest.version == number
    assert held.name_for(None, None) == ("policy-v4", 4), "no name is used twice"


def test_registry_resolves_the_newest_or_the_pinned_version() -> None:
    held = registry()
    first = publish(held, 1)
    for pin in ({"model": "policy-v9"}, {"policy_version": 9}):
        with refusing(ServeError, next(iter(pin)), 404) as refused:
            held.resolve(**pin)  # pyright: ignore[reportArgumentType]
        assert refused.value.wanted.endswith(" base, policy-v1")
    assert held.knows("policy-v1") and not held.knows("policy-v9")
    second = publish(held, 2)
    for model in (None, "base", "policy", "also"):
        assert held.resolve(model) is second and held.knows(model)
    assert held.resolve("policy-v1") is held.resolve(policy_version=1) is held.resolve("policy-v1", 1) is first


def test_registry_trial_is_served_by_name_only() -> None:
    held = registry(keep=1, capacity=3)
    first = publish(held, 1)
    trial = held.reserve("trial", 7, adapter_id=9, path="/adapters/trial", now=1.0, by_name_only=True)
    held.activate(trial)
    assert held.resolve() is held.resolve("policy") is first and held.resolve("trial") is trial
    with refusing(ServeError, "policy_version"):
        held.resolve(policy_version=7)
    assert not first.retired, "a trial pushed a version out of the window"
    held.begin(first)
    second = publish(held)
    assert second.version == 2, "a trial's number counted"
    assert held.make_room() is False and not (second.retired or trial.retired)
    held.retire("trial")
    assert held.make_room() is True


def test_registry_version_0_was_an_adapter() -> None:
    held = registry(keep=1, capacity=2)
    assert publish(held, 0) is held.resolve(policy_version=0)
    publish(held, 1)
    with refusing(ServeError, "policy_version", got="0"):
        held.resolve(policy_version=0)


def test_registry_names_and_numbers_follow_from_each_other() -> None:
    held = registry()
    named = {(None, None): ("policy-v1", 1), (None, 5): ("policy-v5", 5), ("policy-v7", None): ("policy-v7", 7)}
    named |= {("policy", None): ("policy-v1", 1), ("step_3", 3): ("step_3", 3)}
    assert {given: held.name_for(*given) for given in named} == named
    held.reserve("policy-v1", 1, adapter_id=1, path="/a", now=0.0)  # whose load fails
    assert held.name_for(None, 1) == ("policy-v1", 1) and held.newest is held.base
    publish(held, 5)
    assert held.name_for(None, None) == ("policy-v6", 6) and held.name_for("mine", None) == ("mine", 6)


@pytest.mark.parametrize(
    ("ask", "status", "field"),
    [
        (lambda held: held.resolve("policy-v1", 2), 422, "policy_version"),
        (lambda held: held.name_for("policy-v3", 4), 422, "version"),
        (lambda held: held.name_for(None, -1), 422, "version"),
        (lambda held: held.reserve("v3", 3, adapter_id=3, path="/adapters/policy-v1", now=0.0), 409, "adapter_path"),
    ],
    ids=["version of another name", "number of another name", "below 0", "path that is served"],
)
def test_registry_refuses_what_contradicts_itself(
    ask: Callable[[PolicyRegistry], object], status: int, field: str
) -> None:
    held = registry()
    publish(held, 1)
    publish(held, 2)
    with refusing(ServeError, field, status):
        ask(held)


def test_registry_uses_no_name_twice() -> None:
    held = registry(keep=1, capacity=2)
    publish(held, 1)
    publish(held, 2)
    for version in held.removable():
        held.remove(version)
    with refusing(ServeError, "adapter_name", 409, got="policy-v1") as refused:
        held.name_for(None, 1)
    assert refused.value.fix.endswith(" 3")


def test_registry_retire_brings_back_the_one_before() -> None:
    held = registry()
    first, second = publish(held, 1), publish(held, 2)
    assert held.retire() is second
    assert held.newest is first
    assert held.retire("policy-v1") is held.retire("policy-v1") is first
    held.remove(first)
    assert held.retire("policy-v1") is None and held.newest is held.base and held.retire() is None


@pytest.mark.parametrize("keep", [0, 4])
def test_registry_window_leaves_a_place_for_the_next_version(keep: int) -> None:
    with pytest.raises(ValueError, match=rf"keep: got {keep}\b.*\b1 to 3"):
        registry(keep=keep, capacity=4)


class Life(RuleBasedStateMachine):
    """Any order of publishes, requests, withdrawals and sweeps."""

    def __init__(self) -> None:
        super().__init__()
        self.held = registry(keep=2, capacity=4)
        self.names: list[str] = []
        self.running: list[Version] = []

    @rule()
    def publish(self) -> None:
        if self.held.make_room():
            self.sweep()
            self.names.append(publish(self.held).name)

    @rule(pin=st.none() | st.integers(0, 8))
    def begin(self, pin: int | None) -> None:
        try:
            version = self.held.resolve(policy_version=pin)
        except ServeError as refused:
            assert refused.status == 404
            return
        assert pin in (None, version.version)
        self.held.begin(version)
        self.running.append(version)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        version = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        free = self.held.end(version)
        assert free == (version.retired and version not in self.running)

    @rule()
    def withdraw(self) -> None:
        self.held.retire()

    @rule()
    def sweep(self) -> None:
        for version in self.held.removable():
            assert version not in self.running
            self.held.remove(version)

    @invariant()
    def versions_in_use_are_held(self) -> None:
        held = self.held.versions
        assert {version for version in self.running if version is not self.held.base} <= set(held)
        assert sum(version.in_flight for version in [*held, self.held.base]) == len(self.running)
        assert len(held) <= self.held.capacity and self.held.newest in [*held, self.held.base]
        assert len([version for version in held if not version.retired]) <= self.held.keep
        numbers = [parse_version(name, "policy") for name in self.names]
        assert numbers == list(range(1, len(numbers) + 1))


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
