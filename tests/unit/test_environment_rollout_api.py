"""The environment's client of the rollout API, against the real API and against one that knows only JSON."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from environments.api import wire
from environments.api.app import build_app
from environments.api.service import Service
from environments.api.settings import Settings
from environments.config import BaseEnvConfig
from environments.peers.http import PeerError, PeerRefused
from environments.peers.rollout_api import NotRegistered, RolloutApi
from tests.stand_ins import Asked, Reply, answering, local_api, registration

WAIT = "wait for trainer to start"  # as the original protocol has it
CONFIG = BaseEnvConfig(tokenizer_name="model", group_size=2, retry_timeout=5.0)
TRAINER = registration(4, max_token_len=64, num_steps=10)
GROUP = wire.ScoredData(
    tokens=[[1, 2, 3], [1, 2]],
    masks=[[-100, 2, 3], [-100, 2]],
    scores=[1.0, 0.0],
    inference_logprobs=[[1.0, -0.5, -0.25], [1.0, -1.5]],
    policy_versions=[3, 3],
)


class Tapped:
    """The real API with every request kept for inspection; `losing` answers to posts are lost on the way."""

    def __init__(self, service: Service, losing: int = 0) -> None:
        self.service = service
        self.inner = build_app(service)
        self.losing = losing
        self.requests: list[Request] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.inner(scope, receive, send)
        request = Request(scope, receive)
        body = await request.body()
        self.requests.append(request)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        if request.url.path != "/scored_data" or not self.losing:
            return await self.inner(scope, again, send)
        self.losing -= 1

        async def lose(_: Message) -> None:
            return

        await self.inner(scope, again, lose)
        return await Response(status_code=502)(scope, again, send)


def with_server(url: str, work: Callable[[RolloutApi], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        api = RolloutApi(CONFIG.model_copy(update={"rollout_server_url": url}))
        try:
            return await work(api)
        finally:
            await api.close()

    return run()


def with_api(work: Callable[[RolloutApi], Awaitable[Any]], tapped: Tapped | None = None) -> Any:
    async def run() -> Any:
        tap = tapped or Tapped(Service(Settings()))
        async with local_api(tap.service, tap) as local:
            return await with_server(local.url, work)

    return asyncio.run(run())


def test_our_api_gets_message_pack_and_the_group_arrives_whole() -> None:
    service = Service(Settings())
    tapped = Tapped(service)

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

    with_api(work, tapped)
    (post,) = [request for request in tapped.requests if request.url.path == "/scored_data"]
    assert post.headers["content-type"] == wire.MSGPACK
    assert wire.decode_group(asyncio.run(post.body())) == msgspec.structs.replace(GROUP, env_id=0)


def test_a_post_whose_answer_is_lost_counts_once() -> None:
    service = Service(Settings())
    tapped = Tapped(service, losing=2)

    async def work(api: RolloutApi) -> None:
        await api.post(GROUP)

    with_api(work, tapped)
    assert len({request.headers["idempotency-key"] for request in tapped.requests}) == 1
    assert (len(tapped.requests), service.status().queue_size) == (3, 1)


@pytest.mark.parametrize(("repeats", "compressed"), [(1, False), (200, True)])
def test_an_api_of_the_original_protocol_gets_json_gzipped_where_long(repeats: int, compressed: bool) -> None:
    asked: list[Asked] = []
    answers = {"/register-env": {"status": WAIT}, "/scored_data": {"status": "received"}}

    def original(request: Asked) -> Reply:
        asked.append(request)
        return Reply(json=answers[request.path])

    group = msgspec.structs.replace(GROUP, messages=[[{"role": "user", "content": "1+1=" * repeats}]] * 2)

    async def work(api: RolloutApi) -> None:
        await api.register("sums")
        await api.post(group)

    with answering(original) as url:
        asyncio.run(with_server(url, work))
    post = asked[-1]
    assert post.headers["content-type"] == wire.JSON
    assert (post.headers.get("content-encoding") == "gzip") == compressed
    body = gzip.decompress(post.content) if compressed else post.content
    assert wire.decode_group(body, wire.JSON) == group


def test_an_unknown_environment_is_told_apart_from_other_refusals() -> None:
    async def ask_status(api: RolloutApi) -> None:
        await api.status(3)

    async def post_nan(api: RolloutApi) -> None:
        await api.post(msgspec.structs.replace(GROUP, scores=[float("nan"), 0.0]))

    async def post_for_another(api: RolloutApi) -> None:
        await api.post(msgspec.structs.replace(GROUP, env_id=3))

    with pytest.raises(NotRegistered):
        with_api(ask_status)
    with pytest.raises(PeerRefused) as nan:
        with_api(post_nan)
    assert nan.value.key == "scores"
    with pytest.raises(PeerRefused) as unknown:
        with_api(post_for_another)
    assert unknown.value.key == "env_id"


def test_another_kind_of_server_is_named() -> None:
    async def work(api: RolloutApi) -> None:
        await api.register("sums")

    page = Reply(content=b"<html>welcome</html>")
    with answering(lambda _: page) as url, pytest.raises(PeerError) as error:
        asyncio.run(with_server(url, work))
    assert "/register-env" in error.value.field and "--env.rollout_server_url" in error.value.fix


def test_news_are_told_when_there_are_some_and_an_original_api_is_not_waited_for() -> None:
    service = Service(Settings())

    async def work(api: RolloutApi) -> tuple[wire.StatusEnv, wire.StatusEnv]:
        await service.register(TRAINER)
        await service.next_batch()
        await api.register("sums")
        known = await api.status(0)
        assert (known.leased, known.seen is None) == (0, False)
        news = asyncio.create_task(api.status(0, wait=20.0, seen=known.seen or ""))
        await api.post(msgspec.structs.replace(GROUP, env_id=0))
        await api.post(msgspec.structs.replace(GROUP, env_id=0))  # these leave no more room than there was
        assert not news.done()
        assert await service.next_batch(lease=60.0) is not None
        return known, await news

    before, after = with_api(work, Tapped(service))
    assert (before.queue_size, after.queue_size, after.leased) == (0, 0, 2) and before.seen != after.seen
    six = msgspec.to_builtins(after)
    del six["leased"], six["seen"]

    async def ask(api: RolloutApi) -> wire.StatusEnv:
        return await api.status(0, wait=20.0)

    with answering(lambda _: Reply(json=six)) as url:
        assert asyncio.run(with_server(url, ask)).seen is None
