"""The fence around updates of weights that are shared or sent, on an engine that records its calls."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tests.stand_ins import pass_time
from tests.unit.factories import refusing, story
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


def fenced(test: Callable[[Fence, Engine], Coroutine[None, None, None]]) -> Callable[[], None]:
    """A test that is a coroutine, with a fence on an engine."""
    return lambda: asyncio.run(test(fence_on(engine := Engine()), engine))


@pytest.mark.parametrize(
    ("in_flight", "hold", "renew"),
    [("keep", "hold", "renew"), ("recompute", "hold", "renew, recompute"), ("abort", "hold, abort", "renew")],
)
@story
async def test_fence_holds_the_engine_renews_its_caches_changes_the_version_and_lets_it_go(
    in_flight: InFlight, hold: str, renew: str
) -> None:
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


@fenced
async def test_fence_lets_requests_wait_during_an_update(fence: Fence, engine: Engine) -> None:
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


@fenced
async def test_fence_lets_a_request_wait_on_if_the_next_update_begins_before_it_wakes(fence: Fence, _: Engine) -> None:
    begun = await fence.begin(begin())
    waiting = asyncio.create_task(fence.passage())
    await asyncio.sleep(0)
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    second = await fence.begin(begin())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await fence.end(UpdateEndRequest(token=second.token, version=2))
    await waiting


@fenced
async def test_fence_lets_requests_wait_from_when_the_engine_is_held(fence: Fence, engine: Engine) -> None:
    engine.gate.clear()
    beginning = asyncio.create_task(fence.begin(begin()))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(fence.passage())
    await asyncio.sleep(0.01)
    assert not (waiting.done() or beginning.done())
    with refusing(ServeError, "token"):  # nobody has it yet
        await fence.end(UpdateEndRequest(token="", version=1))
    engine.gate.set()
    begun = await beginning
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    await waiting


@fenced
async def test_fence_has_one_update_at_a_time_of_this_server_only(fence: Fence, engine: Engine) -> None:
    with refusing(ServeError, "boot_id", 409, got="another"):
        await fence.begin(begin(boot_id="another"))
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


@fenced
async def test_fence_ends_once_if_it_is_asked_twice(fence: Fence, engine: Engine) -> None:
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
def test_fence_refuses_an_update_without_a_time_limit(timeout_s: float) -> None:
    with refusing(ServeError, "timeout_s", 422, got=str(timeout_s)):
        asyncio.run(fence_on(Engine()).begin(begin(timeout_s=timeout_s)))


def test_fence_of_a_server_that_shares_nothing_has_no_updates() -> None:
    fence = fence_on(Engine(), writable=False)
    with pytest.raises(ServeError) as refused:
        asyncio.run(fence.begin(begin()))
    assert refused.value.status == 409 and "--shared-weights" in refused.value.fix


@fenced
async def test_fence_refuses_requests_after_a_torn_update_until_one_ended_well(fence: Fence, engine: Engine) -> None:
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


@fenced
async def test_fence_is_torn_by_a_trainer_that_does_not_end_in_time(fence: Fence, engine: Engine) -> None:
    begun = await fence.begin(begin(timeout_s=0.02))
    async with asyncio.timeout(60):
        while fence.updating:
            await asyncio.sleep(0.001)
    assert engine.events == ["hold", "hold, abort"]
    with refusing(ServeError, "weights") as refused:
        fence.check_healthy()
    assert "torn" in refused.value.got and "0.02 s" in refused.value.got
    with refusing(ServeError, "token", 409) as refused:  # too late
        await fence.end(UpdateEndRequest(token=begun.token, version=1))
    assert "torn" in refused.value.fix
    await update(fence, 1)
    fence.check_healthy()


@fenced
async def test_fence_is_not_torn_by_the_clock_of_an_update_that_ended(fence: Fence, _: Engine) -> None:
    begun = await fence.begin(begin(timeout_s=60.0))
    await fence.end(UpdateEndRequest(token=begun.token, version=1))
    second = await fence.begin(begin(timeout_s=600.0))
    pass_time(61.0)
    await asyncio.sleep(0.01)
    fence.check_healthy()
    await fence.end(UpdateEndRequest(token=second.token, version=2))


@fenced
async def test_fence_stops_the_clock_while_an_update_ends(fence: Fence, engine: Engine) -> None:
    begun = await fence.begin(begin(timeout_s=60.0))
    engine.gate.clear()
    ending = asyncio.create_task(fence.end(UpdateEndRequest(token=begun.token, version=1)))
    await asyncio.sleep(0)
    pass_time(61.0)
    await asyncio.sleep(0.01)
    engine.gate.set()
    await ending
    fence.check_healthy()


@story
async def test_fence_lets_an_engine_that_cannot_be_held_go_on() -> None:
    engine = Engine(failing="hold")
    fence = fence_on(engine)
    with pytest.raises(EngineFault):
        await fence.begin(begin())
    assert engine.events == ["hold", "release"]
    await fence.passage()
    engine.failing = ""
    await update(fence, 1)


@pytest.mark.parametrize("failing", ["renew", "release"])
@story
async def test_fence_says_that_an_engine_does_not_go_on(failing: str) -> None:
    fence = fence_on(Engine(failing=failing))
    with pytest.raises(EngineFault):
        await update(fence, 1)
    with refusing(ServeError, "weights") as refused:
        await fence.passage()
    assert "EngineFault" in refused.value.got and "torn" not in refused.value.got


@fenced
async def test_fence_leaves_generation_paused_that_was_paused_from_outside(fence: Fence, engine: Engine) -> None:
    fence.paused = True
    await update(fence, 1)
    assert engine.events == ["hold", "renew", "version 1"]
    fence.paused = False
    await update(fence, 2)
    assert engine.events[-1] == "release"


HEADER = b64encode(encode_header(lay_out([("w", (2, 2))], "F32"), {})).decode()
OPEN = WeightsOpenRequest(boot_id=BOOT, source=DiskSource(folder="/x"), buckets=[HEADER])


class Workers:
    """Two workers, and what they answer."""

    def __init__(self, staging_bytes: tuple[int, int] = (16, 16), arrived: bool = True, **refusals: str) -> None:
        self.staging_bytes, self.arrived, self.refusals = staging_bytes, arrived, refusals
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        name = method.removeprefix("grpo_weights_")
        self.calls.append(name)
        if name in self.refusals:
            return [{}, {"refused": self.refusals[name]}]
        answers: dict[str, list[dict[str, Any]]] = {
            "open": [{"staging_bytes": size} for size in self.staging_bytes],
            "staged": [{"staged": True}, {"staged": self.arrived}],
            "apply": [{"seconds": 0.1, "replayed": True}, {"seconds": 0.2, "replayed": False}],
        }
        return answers.get(name, [{}, {}])


class Made:
    """A channel on two workers and a fence, as a server has them."""

    def __init__(self, workers: Workers | None = None, *, accepts: bool = True) -> None:
        self.workers, self.fence = workers or Workers(), fence_on(Engine())
        self.channels = WeightChannels(self.workers, self.fence, accepts)

    async def begun(self) -> tuple[str, WeightsApplyRequest]:
        """Open a channel and begin an update; return its token and the request to write version 1."""
        self.fence.sent = True
        channel = (await self.channels.open(OPEN)).channel
        token = (await self.fence.begin(begin())).token
        return token, WeightsApplyRequest(channel=channel, version=1, token=token)


@pytest.mark.parametrize(
    ("asked", "accepts", "status", "field"),
    [
        (OPEN, False, 409, "weights"),
        (msgspec.structs.replace(OPEN, boot_id="another"), True, 409, "boot_id"),
        (msgspec.structs.replace(OPEN, buckets=["AAAA"]), True, 422, "buckets"),
        (msgspec.structs.replace(OPEN, buckets=["?"]), True, 422, "buckets"),
    ],
)
def test_channel_that_cannot_be_opened_reaches_no_worker(
    asked: WeightsOpenRequest, accepts: bool, status: int, field: str
) -> None:
    made = Made(accepts=accepts)
    with refusing(ServeError, field, status):
        asyncio.run(made.channels.open(asked))
    assert made.workers.calls == []


@pytest.mark.parametrize("workers", [Workers(staging_bytes=(16, 0)), Workers(open="no partner")])
def test_channel_that_not_all_workers_have_is_closed_in_all(workers: Workers) -> None:
    with pytest.raises(ServeError) as refused:
        asyncio.run(Made(workers).channels.open(OPEN))
    assert refused.value.status == 422 and workers.calls == ["open", "close"]


@story
async def test_channel_writes_only_within_the_update_that_is_named() -> None:
    made = Made()
    opened = await made.channels.open(OPEN)
    assert opened.staged and opened.staging_bytes == 16
    await made.channels.stage(WeightsStageRequest(channel=opened.channel, version=1, timeout_s=1.0))
    with refusing(ServeError, "token"):
        await made.channels.apply(WeightsApplyRequest(channel=opened.channel, version=1, token="none"))
    assert "apply" not in made.workers.calls
    token = (await made.fence.begin(begin())).token
    done = await made.channels.apply(WeightsApplyRequest(channel=opened.channel, version=1, token=token))
    assert (done.seconds, done.replayed) == (0.2, False)


@story
async def test_channel_whose_write_fails_poisons_the_weights() -> None:
    made = Made(Workers(apply="half"))
    _, request = await made.begun()
    with pytest.raises(ServeError):
        await made.channels.apply(request)
    assert made.fence.fault is not None and not made.fence.updating


@story
async def test_channel_whose_write_never_began_leaves_the_weights() -> None:
    made = Made()
    token, _ = await made.begun()
    with refusing(ServeError, "update"):
        await made.fence.end(UpdateEndRequest(token=token, version=3))
    await made.fence.end(UpdateEndRequest(token=token, version=3, torn=True))
    assert (made.fence.fault, made.fence.updates, made.fence.updating) == (None, 0, False)


@story
async def test_channel_whose_update_is_called_torn_while_it_writes_poisons_the_weights() -> None:
    made = Made()
    token, request = await made.begun()
    writing, answered = asyncio.Event(), asyncio.Event()

    async def half(method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        writing.set()
        await answered.wait()
        return [{}, {"refused": "the trainer is gone"}]

    made.workers.collective_rpc = half
    applying = asyncio.create_task(made.channels.apply(request))
    await writing.wait()
    await made.fence.end(UpdateEndRequest(token=token, version=3, torn=True))
    answered.set()
    with pytest.raises(ServeError):
        await applying
    assert made.fence.fault is not None


@story
async def test_channel_is_replaced_by_a_newer_one() -> None:
    made = Made()
    calls = made.workers.calls
    first, second = [(await made.channels.open(OPEN)).channel for _ in range(2)]
    assert calls == ["open", "close", "open"]
    with refusing(ServeError, "channel", 404):
        await made.channels.stage(WeightsStageRequest(channel=first, version=1, timeout_s=1.0))
    await made.channels.close(ChannelCloseRequest(channel=first))
    assert calls[-1] == "open", "that one is closed already"
    await made.channels.close(ChannelCloseRequest(channel=second))
    assert calls[-1] == "close"


@pytest.mark.parametrize("workers", [Workers(arrived=False), Workers(staged="connection lost")])
def test_channel_refuses_a_version_that_does_not_arrive_in_time(workers: Workers) -> None:
    async def life() -> None:
        made = Made(workers)
        channel = (await made.channels.open(OPEN)).channel
        await made.channels.stage(WeightsStageRequest(channel=channel, version=1, timeout_s=0.02))

    with pytest.raises(ServeError) as refused:
        asyncio.run(life())
    assert refused.value.status == 422
