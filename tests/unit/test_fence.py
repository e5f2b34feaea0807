"""The fence around updates of weights that are shared or sent, on an engine that records its calls."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.responses import Response

from tests.stand_ins import pass_time
from tests.unit.factories import refusing
from vllm_server import routes
from vllm_server.channels import Channels
from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.protocol import (
    HIGHEST_VERSION,
    PROOF_VERSION,
    InFlight,
    UpdateBeginRequest,
    UpdateEndRequest,
    WeightsApplyRequest,
    WeightsStageRequest,
)
from vllm_server.protocol.channels import ChannelRequest, FolderSpec
from vllm_server.protocol.flat import encode_header, lay_out

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

    async def pause(self, mode: str) -> None:
        await self._do(f"pause, {mode}")

    async def forget(self) -> None:
        await self._do("forget")

    async def hold(self, *, abort: bool) -> None:
        await self._do("hold, abort" if abort else "hold")

    async def renew(self, *, recompute: bool) -> None:
        await self._do("renew, recompute" if recompute else "renew")

    async def release(self) -> None:
        await self._do("release")

    async def _do(self, event: str) -> None:
        await self.gate.wait()
        self.events.append(event)
        if event in self.failing.split(" | "):
            raise EngineFault


def fence_on(engine: Engine, writable: bool = True) -> Fence:
    def version(number: int) -> None:
        engine.events.append(f"version {number}")

    held: Any = engine
    return Fence(BOOT, held, on_version=version, writable=writable)


def begin(in_flight: InFlight = "keep", timeout_s: float = 60.0, boot_id: str = BOOT) -> UpdateBeginRequest:
    return UpdateBeginRequest(boot_id=boot_id, in_flight=in_flight, timeout_s=timeout_s)


def end(token: str, version: int = 1, torn: bool = False) -> UpdateEndRequest:
    return UpdateEndRequest(token=token, version=version, torn=torn)


class Life(RuleBasedStateMachine):
    """Updates and requests in any order.

    Attributes:
        token: of the update in progress.
        asked: what is to become of its in-flight requests.
        torn: the state of the weights is unknown.
        requests: those that have not begun.
        salts: of all updates that ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = Engine()
        self.fence = fence_on(self.engine)
        self.token, self.asked, self.torn, self.version = "", "keep", False, 0
        self.requests: list[asyncio.Task[None]] = []
        self.salts = [self.fence.salt]

    def run(self, doing: Coroutine[Any, Any, Any]) -> Any:
        """Return what it returns, after everything else that can go on has gone on."""

        async def settled() -> Any:
            try:
                return await doing
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)

        self.engine.events.clear()
        return self.loop.run_until_complete(settled())

    def teardown(self) -> None:
        for each in self.requests:
            each.cancel()
        self.run(asyncio.sleep(0))
        self.loop.close()

    @rule()
    def request(self) -> None:
        self.requests.append(self.loop.create_task(self.fence.passage()))
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.token)
    @rule(asked=st.sampled_from(["keep", "recompute", "abort"]))
    def begin(self, asked: InFlight) -> None:
        begun = self.run(self.fence.begin(begin(asked)))
        self.token, self.asked = begun.token, asked
        assert self.engine.events == ["hold, abort" if asked == "abort" else "hold"] and begun.pause_seconds > 0

    @precondition(lambda self: not self.token)
    @rule()
    def begin_on_an_engine_that_cannot_be_held(self) -> None:
        self.engine.failing = "hold"
        with pytest.raises(EngineFault):
            self.run(self.fence.begin(begin()))
        self.engine.failing = ""
        assert self.engine.events == (["hold"] if self.torn or self.fence.paused else ["hold", "release"])

    @precondition(lambda self: self.token)
    @rule(version=st.integers(0, 9), again=st.booleans())
    def end(self, version: int, again: bool) -> None:
        """Requests that wait do not begin if the next update begins `again` before they wake."""
        if again and not self.torn:  # a request fails at once where the weights are torn
            self.request()

        async def both() -> tuple[Any, str]:
            ended = await self.fence.end(end(self.token, version))
            return ended, (await self.fence.begin(begin())).token if again else ""

        renew = "renew, recompute" if self.asked == "recompute" else "renew"
        ended, token = self.run(both())
        release = [] if self.fence.paused else ["release"]
        assert self.engine.events == [renew, f"version {version}", *release, *(["hold"] if again else [])]
        assert ended.policy_version == version and ended.stall_seconds == self.fence.last_stall_seconds > 0
        assert self.fence.salt not in self.salts, "nothing that was cached before is found again"
        self.salts.append(self.fence.salt)
        self.token, self.asked, self.torn = token, "keep", False

    @precondition(lambda self: self.token)
    @rule(failing=st.sampled_from(["renew", "release"]))
    def end_on_an_engine_that_does_not_go_on(self, failing: str) -> None:
        self.engine.failing = failing if self.asked != "recompute" or failing == "release" else "renew, recompute"
        if failing == "release":
            self.fence.pauses.clear()
        with pytest.raises(EngineFault):
            self.run(self.fence.end(end(self.token)))
        self.engine.failing = ""
        assert "EngineFault" in str(self.fence.fault) and "torn" not in str(self.fence.fault)
        assert self.engine.events[-1] == "hold, abort", "what ran is ended: nothing would let it go on"
        self.token, self.torn = "", True
        self.salts = [*self.salts, self.fence.salt][: self.fence.updates + 1]

    @precondition(lambda self: self.token)
    @rule()
    def tear(self) -> None:
        self.run(self.fence.end(end(self.token, torn=True)))
        assert self.engine.events == ["hold, abort"] and "torn" in str(self.fence.fault), "what ran is ended"
        self.token, self.torn = "", True

    @precondition(lambda self: self.token)
    @rule()
    def meddle(self) -> None:
        """Another update, or an end without the token, changes nothing; and tells nobody the token."""
        for refused, name in (
            (self.fence.begin(begin()), "update"),
            (self.fence.end(end("mine")), "token"),
            (self.fence.pause("keep"), "update"),
            (self.fence.resume(), "update"),
        ):
            with refusing(ServeError, name, 409) as error:
                self.run(refused)
            assert self.token not in str(error.value) and "mine" not in str(error.value)
        assert self.engine.events == []

    @precondition(lambda self: not self.token)
    @rule(token=st.sampled_from(["", "mine"]))
    def end_what_did_not_begin(self, token: str) -> None:
        with refusing(ServeError, "token", 409) as error:
            self.run(self.fence.end(end(token)))
        assert (str(self.fence.fault) in error.value.fix) == self.torn
        self.fence.check_idle()

    @precondition(lambda self: not self.token)
    @rule(mode=st.sampled_from(["keep", "wait", "abort"]), fails=st.booleans())
    def pause_from_outside(self, mode: str, fails: bool) -> None:
        """A pause that fails leaves generation as it was."""
        self.engine.failing, before = f"pause, {mode}" * fails, self.fence.paused
        with pytest.raises(EngineFault) if fails else nullcontext():
            self.run(self.fence.pause(mode))
        self.engine.failing = ""
        release = ["release"] if fails and not (before or self.torn) else []
        forget = ["forget"] if mode == "wait" and not fails else []
        assert self.engine.events == [f"pause, {mode}", *forget, *release]
        assert self.fence.paused == (before or not fails)

    @precondition(lambda self: not self.token)
    @rule(fails=st.booleans())
    def resume_from_outside(self, fails: bool) -> None:
        """One that fails leaves generation as it was."""
        self.engine.failing, before = "release" * fails, self.fence.paused
        refused = refusing(ServeError, "weights", 503) if self.torn else pytest.raises(EngineFault)
        with refused if self.torn or fails else nullcontext():
            self.run(self.fence.resume())
        self.engine.failing = ""
        assert self.engine.events == ([] if self.torn else ["release"])
        assert self.fence.paused == (before and (self.torn or fails))

    @invariant()
    def requests_begin_only_with_weights_in_a_known_state(self) -> None:
        assert self.fence.updating == bool(self.token) and len(self.salts) == self.fence.updates + 1
        assert (self.fence.fault is not None) == self.torn
        done = [each for each in self.requests if each.done()]
        for each in done:
            error = each.exception()
            assert (error is not None) == self.torn
            assert error is None or (isinstance(error, ServeError) and (error.status, error.field) == (503, "weights"))
        self.requests = [each for each in self.requests if not each.done()]
        assert not self.requests or self.token, "without an update nothing waits"
        assert not done or self.torn or not self.token, "during an update nothing begins"


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


async def test_fence_lets_requests_wait_from_when_the_engine_is_held_and_ends_once() -> None:
    fence = fence_on(engine := Engine())
    engine.gate.clear()
    beginning = asyncio.create_task(fence.begin(begin()))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(fence.passage())
    await asyncio.sleep(0.01)
    assert not (waiting.done() or beginning.done())
    with refusing(ServeError, "token"):  # nobody has it yet
        await fence.end(end(""))
    engine.gate.set()
    token = (await beginning).token
    engine.gate.clear()
    ending = asyncio.create_task(fence.end(end(token)))
    await asyncio.sleep(0)
    with refusing(ServeError, "token"):
        await fence.end(end(token))
    engine.gate.set()
    await asyncio.gather(ending, waiting)
    assert engine.events.count("release") == 1


@pytest.mark.parametrize(
    ("asked", "writable", "status", "field"),
    [
        *((begin(timeout_s=limit), True, 422, "timeout_s") for limit in (0.0, -1.0, float("inf"), float("nan"))),
        (begin(boot_id="another"), True, 409, "boot_id"),
        (begin(), False, 409, "update"),
    ],
)
def test_fence_refuses_an_update(asked: UpdateBeginRequest, writable: bool, status: int, field: str) -> None:
    fence = fence_on(Engine(), writable)
    with refusing(ServeError, field, status):
        asyncio.run(fence.begin(asked))
    assert not fence.updating


@pytest.mark.parametrize("version", [-2, HIGHEST_VERSION + 1, 10**30])
async def test_fence_refuses_a_version_that_is_none(version: int) -> None:
    fence = fence_on(Engine())
    token = (await fence.begin(begin())).token
    with refusing(ServeError, "version", 422):
        await fence.end(end(token, version))
    await fence.end(end(token, PROOF_VERSION))


async def test_fence_is_torn_by_a_trainer_that_does_not_end_in_time() -> None:
    fence = fence_on(engine := Engine())
    token = (await fence.begin(begin(timeout_s=0.02))).token
    async with asyncio.timeout(60):
        while fence.updating:
            await asyncio.sleep(0.001)
    assert engine.events == ["hold", "hold, abort"]
    with refusing(ServeError, "weights") as refused:
        fence.check_healthy()
    assert "torn" in refused.value.got and "0.02 s" in refused.value.got
    with refusing(ServeError, "token", 409) as refused:  # too late
        await fence.end(end(token))
    assert "torn" in refused.value.fix


@pytest.mark.parametrize("ended", [True, False])
async def test_fence_is_not_torn_by_the_clock_of_an_update_that_ends(ended: bool) -> None:
    """Nor while it ends."""
    fence = fence_on(engine := Engine())
    token = (await fence.begin(begin(timeout_s=60.0))).token
    if not ended:
        engine.gate.clear()
    ending = asyncio.create_task(fence.end(end(token)))
    await asyncio.sleep(0)
    pass_time(61.0)
    await asyncio.sleep(0.01)
    engine.gate.set()
    await ending
    fence.check_healthy()


class Draining(Engine):
    """An engine with requests in flight, which end by themselves or by a pause that aborts them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drained = asyncio.Event()

    async def pause(self, mode: str) -> None:
        if mode == "abort":
            self.drained.set()
        if mode != "keep":
            await self.drained.wait()
        await super().pause(mode)


WAIT, KEEP, ABORT = "pause, wait", "pause, keep", "pause, abort"


@pytest.mark.parametrize(
    ("script", "failing", "events", "paused"),
    [
        ("wait begin drain", "", [WAIT, "forget", "hold"], True),
        ("wait begin abort", "", [ABORT, WAIT, "forget", "hold"], True),
        ("wait begin resume drain", "", ["release", "hold", WAIT], False),  # caches stay if generation goes on
        ("wait begin drain", WAIT, [WAIT, "release", "hold"], False),
        ("wait resume begin drain", WAIT, ["release", "hold", WAIT], False),  # it fails within the update
        # Another pause holds: one that has completed, one since a resume, one that fails after the first.
        ("wait keep begin drain", WAIT, [KEEP, WAIT, "hold"], True),
        ("wait resume keep drain begin", WAIT, ["release", KEEP, WAIT, "hold"], True),
        ("wait wait begin drain", WAIT, [WAIT, WAIT, "release", "hold"], False),
    ],
)
async def test_fence_lets_an_update_wait_until_no_pause_waits(
    script: str, failing: str, events: list[str], paused: bool
) -> None:
    """And a pause that fails releases the engine if nothing else holds it."""
    fence = fence_on(engine := Draining(failing=failing))
    asked: list[tuple[str, asyncio.Task[Any]]] = []
    for word in script.split():
        if word == "drain":
            engine.drained.set()
        else:
            ask = {"begin": lambda: fence.begin(begin()), "resume": fence.resume}.get(word, partial(fence.pause, word))
            asked.append((word, asyncio.create_task(ask())))
        await asyncio.sleep(0.01)
    token = ""
    for word, task in asked:
        with pytest.raises(EngineFault) if failing == f"pause, {word}" else nullcontext():
            answer = await task
            token = answer.token if word == "begin" else token
    await fence.end(end(token))
    assert engine.events == [*events, "renew", "version 1", *([] if paused else ["release"])]
    assert fence.paused is paused


async def test_fence_refuses_an_update_that_a_pause_keeps_waiting() -> None:
    fence = fence_on(engine := Draining())
    pausing = asyncio.create_task(fence.pause("wait"))
    await asyncio.sleep(0)
    with refusing(ServeError, "pause", 409):
        await fence.begin(begin(timeout_s=0.02))
    assert not fence.updating and engine.events == []
    engine.drained.set()
    await pausing
    assert engine.events == ["pause, wait", "forget"]


async def test_server_neither_sleeps_nor_wakes_up_within_an_update_and_none_begins_while_it_sleeps() -> None:
    """vLLM resumes generation as it wakes up."""
    fence = fence_on(engine := Engine())

    async def wake_up() -> None:
        await asyncio.sleep(0)

    sleep = mock.AsyncMock(side_effect=[EngineFault, None])
    server: Any = SimpleNamespace(
        fence=fence,
        args=SimpleNamespace(shared_weights=False, enable_sleep_mode=True),
        channels=SimpleNamespace(changing=asyncio.Lock()),
        engine=SimpleNamespace(sleep=sleep, is_sleeping=mock.AsyncMock(return_value=False), wake_up=wake_up),
    )
    begun = await fence.begin(begin())
    for route in (routes.sleep, routes.wake_up):
        with refusing(ServeError, "update", 409):
            await route(server)
    await fence.end(end(begun.token))
    with pytest.raises(EngineFault):
        await routes.sleep(server)
    assert not fence.asleep
    await routes.sleep(server)
    waking = asyncio.ensure_future(routes.wake_up(server))
    await asyncio.sleep(0)
    for ask in (fence.begin(begin()), fence.resume()):
        with refusing(ServeError, "sleep", 409):
            await ask
    await waking
    await fence.begin(begin())
    assert engine.events.count("hold") == 2


@pytest.mark.parametrize("writable", [True, False])
async def test_fence_of_an_engine_that_does_not_go_on_either_refuses_requests(writable: bool) -> None:
    """They would wait for ever, and so would those in flight. An update heals it, or without a trainer a resume."""
    fence = fence_on(engine := Engine(failing=f"hold | {KEEP} | release"), writable)
    with pytest.raises(EngineFault):
        await (fence.begin(begin()) if writable else fence.pause("keep"))
    assert engine.events == ["hold" if writable else KEEP, "release", "hold, abort"]
    field = "weights" if writable else "generation"
    with refusing(ServeError, field, 503) if writable else pytest.raises(EngineFault):
        await fence.resume()
    with refusing(ServeError, field, 503):
        await fence.passage()
    engine.failing = ""
    await (fence.end(end((await fence.begin(begin())).token)) if writable else fence.resume())
    await fence.passage()
    assert engine.events[-1] == "release" and not fence.paused


async def test_fence_update_outlives_a_resume_that_failed_before_it_began() -> None:
    fence, tokens = fence_on(engine := Engine()), list[str]()
    releases = engine.release

    async def pause(mode: str) -> None:
        await fence.resume()  # a client ends this pause, then it fails, and so does what undoes it
        engine.release = release
        raise EngineFault

    async def release() -> None:
        engine.release = releases
        tokens.append((await fence.begin(begin())).token)
        raise EngineFault

    engine.pause = pause
    with pytest.raises(EngineFault):
        await fence.pause("wait")
    assert fence.updating and fence.fault is None
    await fence.end(end(tokens[0]))
    await fence.passage()


async def test_fence_is_open_if_the_trainer_leaves_before_its_update_has_begun() -> None:
    """Nobody would end the update: it would count as torn."""
    fence, left = fence_on(engine := Engine()), asyncio.Event()
    engine.gate.clear()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    server: Any = SimpleNamespace(fence=fence)
    request: Any = SimpleNamespace(receive=receive)
    beginning = asyncio.ensure_future(routes.begin_update(server, request, begin()))
    await asyncio.sleep(0.01)
    assert fence.updating
    left.set()
    await asyncio.sleep(0.01)
    engine.gate.set()
    assert isinstance(answer := await beginning, Response) and answer.status_code == 499
    assert not fence.updating and engine.events == ["release"]


HEADER = b64encode(encode_header(lay_out([("w", (2, 2))], "F32"), {})).decode()
OPEN = ChannelRequest(boot_id=BOOT, spec=FolderSpec(folder="/x"), buckets=[HEADER])


class Workers:
    """Two workers, and what they answer; they know which channels are open."""

    def __init__(self, staging_bytes: tuple[int, int] = (16, 16), arrived: bool = True, **refusals: str) -> None:
        self.staging_bytes, self.arrived, self.refusals = staging_bytes, arrived, refusals
        self.calls: list[str] = []
        self.open: list[str] = []

    async def call(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        name = method.removeprefix("grpo_").removeprefix("weights_").removesuffix("_channel")
        self.calls.append(name)
        if name in ("open", "close"):
            getattr(self.open, {"open": "append", "close": "remove"}[name])(args[0])
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

    def __init__(self, workers: Workers | None = None) -> None:
        self.workers, self.fence = workers or Workers(), fence_on(Engine())
        self.channels = Channels(lambda *words, **args: self.workers.call(*words, **args), self.fence, True, None)

    async def begun(self) -> tuple[str, WeightsApplyRequest]:
        """Open a channel and begin an update; return its token and the request to write version 1."""
        self.fence.sent = True
        channel = (await self.channels.open(OPEN)).channel
        token = (await self.fence.begin(begin())).token
        return token, WeightsApplyRequest(channel=channel, version=1, token=token)


async def test_channel_that_one_worker_alone_can_stage_is_closed_in_all() -> None:
    workers = Workers(staging_bytes=(16, 0))
    with refusing(ServeError, "staging", 422):
        await Made(workers).channels.open(OPEN)
    assert workers.calls == ["open", "close"]


async def test_channel_writes_only_within_the_update_that_is_named() -> None:
    made = Made()
    opened = await made.channels.open(OPEN)
    assert opened.staging_bytes == 16
    await made.channels.stage(WeightsStageRequest(channel=opened.channel, version=1, timeout_s=1.0))
    with refusing(ServeError, "token"):
        await made.channels.apply(WeightsApplyRequest(channel=opened.channel, version=1, token="none"))
    assert "apply" not in made.workers.calls
    token = (await made.fence.begin(begin())).token
    done = await made.channels.apply(WeightsApplyRequest(channel=opened.channel, version=1, token=token))
    assert (done.seconds, done.replayed) == (0.2, False)


async def test_channel_whose_write_fails_poisons_the_weights() -> None:
    made = Made(Workers(apply="half"))
    _, request = await made.begun()
    with pytest.raises(ServeError):
        await made.channels.apply(request)
    assert made.fence.fault is not None and not made.fence.updating


async def test_channel_whose_write_never_began_leaves_the_weights() -> None:
    made = Made()
    token, _ = await made.begun()
    with refusing(ServeError, "update"):
        await made.fence.end(UpdateEndRequest(token=token, version=3))
    await made.fence.end(UpdateEndRequest(token=token, version=3, torn=True))
    assert (made.fence.fault, made.fence.updates, made.fence.updating) == (None, 0, False)


async def test_channel_whose_update_is_called_torn_while_it_writes_poisons_the_weights() -> None:
    made = Made()
    token, request = await made.begun()
    writing, answered = asyncio.Event(), asyncio.Event()

    async def half(method: str, *, args: tuple[Any, ...]) -> list[Any]:
        writing.set()
        await answered.wait()
        return [{}, {"refused": "the trainer is gone"}]

    made.workers.call = half
    applying = asyncio.create_task(made.channels.apply(request))
    await writing.wait()
    await made.fence.end(UpdateEndRequest(token=token, version=3, torn=True))
    answered.set()
    with refusing(ServeError, "weights", 422) as refused:
        await applying
    assert "gone" in refused.value.got, "the first error"
    assert made.fence.fault is not None


@pytest.mark.parametrize(
    ("made", "channel", "limit", "field", "status"),
    [
        (Workers(), "x", 1.0, "channel", 404),
        *((Workers(), "", limit, "timeout_s", 422) for limit in (0.0, float("inf"), float("nan"))),
        (Workers(arrived=False), "", 0.02, "weights", 422),
        (Workers(staged="connection lost"), "", 0.02, "weights", 422),
    ],
)
async def test_channel_stages_no_version_that_does_not_arrive_in_time(
    made: Workers, channel: str, limit: float, field: str, status: int
) -> None:
    channels = Made(made).channels
    request = WeightsStageRequest(channel=channel or (await channels.open(OPEN)).channel, version=1, timeout_s=limit)
    with refusing(ServeError, field, status):
        await channels.stage(request)
