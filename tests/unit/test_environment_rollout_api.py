"""The environment's client of the rollout API, against the real API and against one that knows only JSON."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from environments.api import wire
from environments.api.app import build_app
from environments.api.service import Service
from environments.api.settings import Settings
from environments.config import BaseEnvConfig
from environments.peers.http import PeerError, PeerRefused
from environments.peers.rollout_api import NotRegistered, RolloutApi

WAIT = "wait for trainer to start"  # as the original protocol has it
CONFIG = BaseEnvConfig(tokenizer_name="model", group_size=2, retry_timeout=5.0)
TRAINER = wire.Register(
    wandb_group="group",
    wandb_project="project",
    batch_size=4,
    max_token_len=64,
    checkpoint_dir="checkpoints",
    save_checkpoint_interval=3,
    starting_step=0,
    num_steps=10,
)
GROUP = wire.ScoredData(
    tokens=[[1, 2, 3], [1, 2]],
    masks=[[-100, 2, 3], [-100, 2]],
    scores=[1.0, 0.0],
    inference_logprobs=[[1.0, -0.5, -0.25], [1.0, -1.5]],
    policy_versions=[3, 3],
)


class Tapped(httpx.AsyncBaseTransport):
    """The real API, or a handler, with every request kept for inspection; `losing` answers are lost on the way."""

    def __init__(self, inner: httpx.AsyncBaseTransport, losing: int = 0) -> None:
        self.inner = inner
        self.losing = losing
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.requests.append(request)
        response = await self.inner.handle_async_request(request)
        if request.url.path == "/scored_data" and self.losing:
            self.losing -= 1
            raise httpx.ReadError("the answer was lost")
        return response


def real_api() -> tuple[Service, httpx.ASGITransport]:
    service = Service(Settings())
    return service, httpx.ASGITransport(app=build_app(service))  # type: ignore[arg-type]


def with_api(transport: httpx.AsyncBaseTransport, work: Callable[[RolloutApi], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        api = RolloutApi(CONFIG, transport=transport)
        try:
            return await work(api)
        finally:
            await api.close()

    return asyncio.run(run())


def test_our_api_gets_message_pack_and_the_group_arrives_whole() -> None:
    service, transport = real_api()
    tapped = Tapped(transport)

    async def work(api: RolloutApi) -> None:
        assert (await api.register("sums")).status == WAIT
        await service.register(TRAINER)
        await service.next_batch()
        answer = await api.register("sums")
        assert (answer.status, answer.env_id, answer.num_steps) == ("success", 0, 10)
        assert await api.info() == wire.Info(batch_size=4, max_token_len=64)
        assert await api.wandb_info() == wire.WandbInfo(group="group", project="project")
        await api.post(msgspec.structs.replace(GROUP, env_id=0))
        status = await api.status(0)
        assert (status.current_step, status.queue_size, status.self_queue_size) == (0, 1, 1)
        await api.disconnect(0, patience=1.0)
        assert not service.status().environments[0].connected

    with_api(tapped, work)
    (post,) = [request for request in tapped.requests if request.url.path == "/scored_data"]
    assert post.headers["content-type"] == wire.MSGPACK
    assert wire.decode_group(post.content) == msgspec.structs.replace(GROUP, env_id=0)


def test_a_post_whose_answer_is_lost_counts_once() -> None:
    service, transport = real_api()
    tapped = Tapped(transport, losing=2)

    async def work(api: RolloutApi) -> None:
        await api.post(GROUP)

    with_api(tapped, work)
    assert len({request.headers["idempotency-key"] for request in tapped.requests}) == 1
    assert (len(tapped.requests), service.status().queue_size) == (3, 1)


@pytest.mark.parametrize(("repeats", "compressed"), [(1, False), (200, True)])
def test_an_api_of_the_original_protocol_gets_json_gzipped_where_long(repeats: int, compressed: bool) -> None:
    def original(request: httpx.Request) -> httpx.Response:
        answers = {"/register-env": {"status": WAIT}, "/scored_data": {"status": "received"}}
        return httpx.Response(200, json=answers[request.url.path])

    tapped = Tapped(httpx.MockTransport(original))
    group = msgspec.structs.replace(GROUP, messages=[[{"role": "user", "content": "1+1=" * repeats}]] * 2)

    async def work(api: RolloutApi) -> None:
        await api.register("sums")
        await api.post(group)

    with_api(tapped, work)
    post = tapped.requests[-1]
    assert post.headers["content-type"] == wire.JSON
    assert (post.headers.get("content-encoding") == "gzip") == compressed
    body = gzip.decompress(post.content) if compressed else post.content
    assert wire.decode_group(body, wire.JSON) == group


def test_an_unknown_environment_is_told_apart_from_other_refusals() -> None:
    _, transport = real_api()

    async def ask_status(api: RolloutApi) -> None:
        await api.status(3)

    async def post_nan(api: RolloutApi) -> None:
        await api.post(msgspec.structs.replace(GROUP, scores=[float("nan"), 0.0]))

    async def post_for_another(api: RolloutApi) -> None:
        await api.post(msgspec.structs.replace(GROUP, env_id=3))

    with pytest.raises(NotRegistered):
        with_api(transport, ask_status)
    with pytest.raises(PeerRefused) as nan:
        with_api(transport, post_nan)
    assert nan.value.key == "scores"
    with pytest.raises(PeerRefused) as unknown:
        with_api(transport, post_for_another)
    assert unknown.value.key == "env_id"


def test_another_kind_of_server_is_named() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>welcome</html>"))

    async def work(api: RolloutApi) -> None:
        await api.register("sums")

    with pytest.raises(PeerError) as error:
        with_api(transport, work)
    assert "/register-env" in error.value.field and "--env.rollout_server_url" in error.value.fix
