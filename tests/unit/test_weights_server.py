"""The server's side of weights that are sent: who may open, stage and apply, and what is refused."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import pytest

from tests.unit.test_fence import BOOT, Engine, begin, fence_on
from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.protocol import (
    ChannelCloseRequest,
    DiskSource,
    UpdateEndRequest,
    WeightsApplyRequest,
    WeightsOpenRequest,
    WeightsStageRequest,
)
from vllm_server.protocol.flat import encode_header, lay_out
from vllm_server.weights import WeightChannels

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
        with pytest.raises(ServeError) as early:
            await made.apply(WeightsApplyRequest(channel=opened.channel, version=1, token="none"))
        assert early.value.field == "token" and "apply" not in workers.calls
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
            with pytest.raises(ServeError) as early:
                await fence.end(UpdateEndRequest(token=token, version=3))
            assert early.value.field == "update"
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
        with pytest.raises(ServeError) as gone:
            await made.stage(WeightsStageRequest(channel=first, version=1, timeout_s=1.0))
        assert (gone.value.status, gone.value.field) == (404, "channel")
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
