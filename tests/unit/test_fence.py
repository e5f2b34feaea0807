"""The fence around updates of weights that are shared or sent, on an engine that records its calls."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest

from tests.unit.factories import refusing
from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.protocol import (
    ChannelCloseRequest,
    DiskSource,
    InFlight,
    UpdateBeginRequest,
    UpdateEndRequest,
    WeightsApplyRequest,
    WeightsOpenRequest,
    WeightsStageRequest,
)
from vllm_server.protocol.flat import encode_header, lay_out
from vllm_server.weights import WeightChannels

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
    with refusing(ServeError, "update", 409):
        await fence.begin(begin())
    with refusing(ServeError, "update", 409):
        fence.check_idle()
    with refusing(ServeError, "token", 409) as refused:
        await fence.end(UpdateEndRequest(token="mine", version=1))
    assert "mine" not in str(refused.value)
    assert engine.events == ["hold"]
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    with refusing(ServeError, "token", 409) as refused:
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
    assert begun.token not in str(refused.value)
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
    with refusing(ServeError, "token"):
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
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
        with refusing(ServeError, "weights", 503) as refused:
            await refusal
        assert "torn" in refused.value.got

    engine.events.clear()
    begun = await fence.begin(begin())
    with refusing(ServeError, "weights") as refused:  # not before it has ended
        await fence.passage()
    assert "torn" in refused.value.got
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
    with refusing(ServeError, "weights") as refused:
        fence.check_healthy()
    assert "torn" in refused.value.got and "0.02 s" in refused.value.got
    with refusing(ServeError, "token", 409) as refused:  # too late
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
    assert "torn" in refused.value.fix
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
        with refusing(ServeError, "weights") as refused:
            await fence.passage()
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


T = TypeVar("T")
HEADER = b64encode(encode_header(lay_out([("w", (2, 2))], "F32"), {})).decode()
OPEN = WeightsOpenRequest(boot_id=BOOT, source=DiskSource(folder="/x"), buckets=[HEADER])


class Workers:
    """Two workers, and what they answer."""

    def __init__(self, staging_bytes: tuple[int, int] = (16, 16), staged: bool = True, **refusals: str) -> None:
        self.staging_bytes, self.staged, self.refusals = staging_bytes, staged, refusals
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        name = method.removeprefix("grpo_weights_")
        self.calls.append(name)
        if name in self.refusals:
            return [{}, {"refused": self.refusals[name]}]
        answers: dict[str, list[dict[str, Any]]] = {
            "open": [{"staging_bytes": size} for size in self.staging_bytes],
            "staged": [{"staged": True}, {"staged": self.staged}],
            "apply": [{"seconds": 0.1, "replayed": True}, {"seconds": 0.2, "replayed": False}],
        }
        return answers.get(name, [{}, {}])


def channels(workers: Workers, fence: Fence | None = None, *, accepts: bool = True) -> WeightChannels:
    return WeightChannels(workers, fence or fence_on(Engine()), accepts)


def refused(work: Awaitable[object]) -> ServeError:
    async def wait() -> object:
        return await work

    with pytest.raises(ServeError) as error:
        asyncio.run(wait())
    return error.value


@pytest.mark.parametrize(
    ("asked", "accepts", "status", "field"),
    [
        (OPEN, False, 409, "weights"),
        (msgspec.structs.replace(OPEN, boot_id="another"), True, 409, "boot_id"),
        (msgspec.structs.replace(OPEN, buckets=["AAAA"]), True, 422, "buckets"),
        (msgspec.structs.replace(OPEN, buckets=["?"]), True, 422, "buckets"),
    ],
)
def test_what_cannot_be_opened_reaches_no_worker(
    asked: WeightsOpenRequest, accepts: bool, status: int, field: str
) -> None:
    workers = Workers()
    error = refused(channels(workers, accepts=accepts).open(asked))
    assert (error.status, error.field) == (status, field) and workers.calls == []


@pytest.mark.parametrize("workers", [Workers(staging_bytes=(16, 0)), Workers(open="no partner")])
def test_a_channel_that_not_all_workers_have_is_closed_in_all(workers: Workers) -> None:
    made = channels(workers)
    assert refused(made.open(OPEN)).status == 422
    assert workers.calls == ["open", "close"]


def test_a_version_is_written_only_within_the_update_that_is_named() -> None:
    async def life() -> None:
        workers, fence = Workers(), fence_on(Engine())
        made = channels(workers, fence)
        opened = await made.open(OPEN)
        assert opened.staged and opened.staging_bytes == 16
        await made.stage(WeightsStageRequest(channel=opened.channel, version=1, timeout_s=1.0))
        with refusing(ServeError, "token"):
            await made.apply(WeightsApplyRequest(channel=opened.channel, version=1, token="none"))
        assert "apply" not in workers.calls
        token = (await fence.begin(begin())).token
        done = await made.apply(WeightsApplyRequest(channel=opened.channel, version=1, token=token))
        assert (done.seconds, done.replayed) == (0.2, False)

    asyncio.run(life())


def test_a_write_that_fails_poisons_the_weights_and_one_that_never_began_does_not() -> None:
    async def life(refusals: dict[str, str]) -> Fence:
        workers, fence = Workers(), fence_on(Engine())
        fence.sent = True
        workers.refusals = refusals
        made = channels(workers, fence)
        opened = await made.open(OPEN)
        token = (await fence.begin(begin())).token
        if refusals:
            with pytest.raises(ServeError):
                await made.apply(WeightsApplyRequest(channel=opened.channel, version=1, token=token))
        else:
            with refusing(ServeError, "update"):
                await fence.end(UpdateEndRequest(token=token, version=3))
            await fence.end(UpdateEndRequest(token=token, version=3, torn=True))
        assert not fence.updating
        return fence

    assert asyncio.run(life({"apply": "half"})).fault is not None
    untouched = asyncio.run(life({}))
    assert untouched.fault is None and untouched.updates == 0


def test_an_update_that_is_called_torn_while_it_writes_poisons_the_weights() -> None:
    async def life() -> Fence:
        workers, fence = Workers(), fence_on(Engine())
        fence.sent = True
        made = channels(workers, fence)
        opened = await made.open(OPEN)
        token = (await fence.begin(begin())).token
        writing, answered = asyncio.Event(), asyncio.Event()

        async def half(method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
            writing.set()
            await answered.wait()
            return [{}, {"refused": "the trainer is gone"}]

        workers.collective_rpc = half
        request = WeightsApplyRequest(channel=opened.channel, version=1, token=token)
        applying = asyncio.create_task(made.apply(request))
        await writing.wait()
        await fence.end(UpdateEndRequest(token=token, version=3, torn=True))
        answered.set()
        with pytest.raises(ServeError):
            await applying
        return fence

    assert asyncio.run(life()).fault is not None


def test_a_newer_channel_replaces_the_older() -> None:
    async def life() -> None:
        workers = Workers()
        made = channels(workers)
        first, second = (await made.open(OPEN)).channel, (await made.open(OPEN)).channel
        assert workers.calls == ["open", "close", "open"]
        with refusing(ServeError, "channel", 404):
            await made.stage(WeightsStageRequest(channel=first, version=1, timeout_s=1.0))
        await made.close(ChannelCloseRequest(channel=first))
        assert workers.calls[-1] == "open", "that one is closed already"
        await made.close(ChannelCloseRequest(channel=second))
        assert workers.calls[-1] == "close"

    asyncio.run(life())


@pytest.mark.parametrize("refusals", [{}, {"staged": "connection lost"}])
def test_a_version_that_does_not_arrive_is_refused_in_time(refusals: dict[str, str]) -> None:
    workers = Workers(staged=False)
    workers.refusals = refusals

    async def life() -> None:
        made = channels(workers)
        opened = await made.open(OPEN)
        await made.stage(WeightsStageRequest(channel=opened.channel, version=1, timeout_s=0.02))

    assert refused(life()).status == 422
