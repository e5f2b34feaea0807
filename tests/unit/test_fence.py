"""The fence around updates of shared weights, on an engine that records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.protocol import InFlight, UpdateBeginRequest, UpdateEndRequest

BOOT = "boot-of-this-server"


class EngineFault(Exception):
    pass


@dataclass
class Engine:
    """Notes the order of events; each call takes as long as `gate` is closed."""

    events: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failing: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    async def hold(self, *, abort: bool) -> None:
        await self._do("hold, abort" if abort else "hold")

    async def renew(self, *, recompute: bool) -> None:
        await self._do("renew, recompute" if recompute else "renew")

    async def release(self) -> None:
        await self._do("release")

    async def _do(self, event: str) -> None:
        await self.gate.wait()
        self.events.append(event)
        if event == self.failing:
            raise EngineFault


def fence_on(engine: Engine, writable: bool = True) -> Fence:
    def version(number: int) -> None:
        engine.events.append(f"version {number}")

    return Fence(BOOT, engine, on_version=version, writable=writable)


def begin(in_flight: InFlight = "keep", timeout_s: float = 60.0, boot_id: str = BOOT) -> UpdateBeginRequest:
    return UpdateBeginRequest(boot_id=boot_id, in_flight=in_flight, timeout_s=timeout_s)


async def update(fence: Fence, version: int, in_flight: InFlight = "keep", torn: bool = False) -> None:
    begun = await fence.begin(begin(in_flight))
    await fence.end(UpdateEndRequest(token=begun.token, version=version, torn=torn))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """A test that is a coroutine."""
    return lambda: asyncio.run(test())


@pytest.mark.parametrize(
    ("in_flight", "hold", "renew"),
    [("keep", "hold", "renew"), ("recompute", "hold", "renew, recompute"), ("abort", "hold, abort", "renew")],
)
def test_an_update_holds_the_engine_renews_its_caches_changes_the_version_and_lets_it_go(
    in_flight: InFlight, hold: str, renew: str
) -> None:
    async def scenario() -> None:
        engine = Engine()
        fence = fence_on(engine)
        begun = await fence.begin(begin(in_flight))
        assert engine.events == [hold]
        assert fence.updating
        salt = fence.salt
        ended = await fence.end(UpdateEndRequest(token=begun.token, version=7))
        assert engine.events == [hold, renew, "version 7", "release"]
        assert (ended.policy_version, fence.updates, fence.updating) == (7, 1, False)
        assert ended.stall_seconds >= begun.pause_seconds > 0
        assert fence.last_update_time > 0
        assert fence.salt != salt  # nothing that was cached before is found again

    asyncio.run(scenario())


@run
async def test_a_request_waits_while_an_update_is_under_way() -> None:
    engine = Engine()
    fence = fence_on(engine)
    await fence.passage()  # open: at once
    begun = await fence.begin(begin())
    passed: list[str] = []

    async def request() -> None:
        await fence.passage()
        passed.append(engine.events[-1])

    waiting = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    assert not passed
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    await waiting
    assert passed == ["release"]


@run
async def test_a_request_that_waited_waits_on_if_the_next_update_begins_before_it_wakes() -> None:
    fence = fence_on(Engine())
    begun = await fence.begin(begin())
    waiting = asyncio.create_task(fence.passage())
    await asyncio.sleep(0)
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    second = await fence.begin(begin())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await fence.end(UpdateEndRequest(token=second.token, version=2))
    await waiting


@run
async def test_requests_wait_from_the_moment_that_the_engine_is_asked_to_stand_still() -> None:
    engine = Engine()
    engine.gate.clear()
    fence = fence_on(engine)
    beginning = asyncio.create_task(fence.begin(begin()))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(fence.passage())
    await asyncio.sleep(0.01)
    assert not (waiting.done() or beginning.done())
    with pytest.raises(ServeError) as refused:
        await fence.end(UpdateEndRequest(token="", version=1))
    assert refused.value.field == "token"  # nobody has it yet
    engine.gate.set()
    begun = await beginning
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    await waiting


@run
async def test_one_update_at_a_time_of_this_server_only() -> None:
    engine = Engine()
    fence = fence_on(engine)
    with pytest.raises(ServeError) as refused:
        await fence.begin(begin(boot_id="another"))
    assert (refused.value.status, refused.value.field, refused.value.got) == (409, "boot_id", "another")
    assert fence.boot_id in refused.value.wanted
    begun = await fence.begin(begin())
    with pytest.raises(ServeError) as refused:
        await fence.begin(begin())
    assert (refused.value.status, refused.value.field) == (409, "update")
    with pytest.raises(ServeError) as refused:
        fence.check_idle()
    assert (refused.value.status, refused.value.field) == (409, "update")
    with pytest.raises(ServeError) as refused:
        await fence.end(UpdateEndRequest(token="mine", version=1))
    assert (refused.value.status, refused.value.field) == (409, "token") and "mine" not in str(refused.value)
    assert engine.events == ["hold"]
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    with pytest.raises(ServeError) as refused:
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
    assert (refused.value.status, refused.value.field) == (409, "token") and begun.token not in str(refused.value)
    assert "torn" not in refused.value.fix
    fence.check_idle()


@run
async def test_an_end_that_is_said_twice_is_done_once() -> None:
    engine = Engine()
    fence = fence_on(engine)
    begun = await fence.begin(begin())
    engine.gate.clear()
    first = asyncio.create_task(fence.end(UpdateEndRequest(token=begun.token, version=1)))
    await asyncio.sleep(0)
    with pytest.raises(ServeError) as refused:
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
    assert refused.value.field == "token"
    engine.gate.set()
    await first
    assert engine.events.count("release") == 1


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_an_update_without_a_time_limit_is_refused(timeout_s: float) -> None:
    with pytest.raises(ServeError) as refused:
        asyncio.run(fence_on(Engine()).begin(begin(timeout_s=timeout_s)))
    assert (refused.value.status, refused.value.field, refused.value.got) == (422, "timeout_s", str(timeout_s))


def test_a_server_that_shares_nothing_has_no_updates() -> None:
    fence = fence_on(Engine(), writable=False)
    with pytest.raises(ServeError) as refused:
        asyncio.run(fence.begin(begin()))
    assert refused.value.status == 409 and "--shared-weights" in refused.value.fix


@run
async def test_a_torn_update_refuses_requests_until_one_has_ended_well() -> None:
    engine = Engine()
    fence = fence_on(engine)
    begun = await fence.begin(begin())
    waiting = asyncio.create_task(fence.passage())
    await asyncio.sleep(0)
    salt = fence.salt
    ended = await fence.end(UpdateEndRequest(token=begun.token, version=3, torn=True))
    assert engine.events == ["hold", "hold, abort"]  # held still, and what ran is ended
    assert (fence.updates, fence.salt) == (0, salt)
    assert ended.stall_seconds > 0
    for refusal in (waiting, fence.passage()):
        with pytest.raises(ServeError) as refused:
            await refusal
        assert (refused.value.status, refused.value.field) == (503, "weights") and "torn" in refused.value.got

    engine.events.clear()
    begun = await fence.begin(begin())
    with pytest.raises(ServeError) as refused:  # not before it has ended
        await fence.passage()
    assert refused.value.field == "weights" and "torn" in refused.value.got
    await fence.end(UpdateEndRequest(token=begun.token, version=4))
    assert engine.events == ["hold", "renew", "version 4", "release"]
    await fence.passage()
    fence.check_healthy()


@run
async def test_a_trainer_that_does_not_end_its_update_in_time_has_torn_it() -> None:
    engine = Engine()
    fence = fence_on(engine)
    begun = await fence.begin(begin(timeout_s=0.02))
    await until(lambda: not fence.updating)
    assert engine.events == ["hold", "hold, abort"]
    with pytest.raises(ServeError) as refused:
        fence.check_healthy()
    assert refused.value.field == "weights" and "torn" in refused.value.got and "0.02 s" in refused.value.got
    with pytest.raises(ServeError) as refused:  # too late
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
    assert (refused.value.status, refused.value.field) == (409, "token") and "torn" in refused.value.fix
    await update(fence, 1)
    fence.check_healthy()


@run
async def test_an_update_that_ends_in_time_is_not_torn_by_its_old_clock() -> None:
    fence = fence_on(Engine())
    begun = await fence.begin(begin(timeout_s=0.03))
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    second = await fence.begin(begin())
    await asyncio.sleep(0.06)
    fence.check_healthy()
    await fence.end(UpdateEndRequest(token=second.token, version=2))


@run
async def test_the_clock_stands_still_while_an_update_ends() -> None:
    engine = Engine()
    fence = fence_on(engine)
    begun = await fence.begin(begin(timeout_s=0.03))
    engine.gate.clear()
    ending = asyncio.create_task(fence.end(UpdateEndRequest(token=begun.token, version=1)))
    await asyncio.sleep(0.06)
    engine.gate.set()
    await ending
    fence.check_healthy()


@run
async def test_an_engine_that_cannot_be_held_goes_on() -> None:
    engine = Engine(failing="hold")
    fence = fence_on(engine)
    with pytest.raises(EngineFault):
        await fence.begin(begin())
    assert engine.events == ["hold", "release"]
    await fence.passage()
    engine.failing = ""
    await update(fence, 1)


@pytest.mark.parametrize("failing", ["renew", "release"])
def test_an_engine_that_does_not_go_on_is_told(failing: str) -> None:
    async def scenario() -> None:
        fence = fence_on(Engine(failing=failing))
        with pytest.raises(EngineFault):
            await update(fence, 1)
        with pytest.raises(ServeError) as refused:
            await fence.passage()
        assert refused.value.field == "weights"
        assert "EngineFault" in refused.value.got and "torn" not in refused.value.got

    asyncio.run(scenario())


@run
async def test_generation_that_was_paused_from_outside_stays_so_after_an_update() -> None:
    engine = Engine()
    fence = fence_on(engine)
    fence.paused = True
    await update(fence, 1)
    assert engine.events == ["hold", "renew", "version 1"]
    fence.paused = False
    await update(fence, 2)
    assert engine.events[-1] == "release"
