"""Environments with several inference servers, which may leave and join while requests are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from environments.config import ServerConfig
from environments.peers import roster
from environments.peers.http import PeerGone, PeerRefused
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.peers.roster import ListedServers, servers
from grpo_common.roster import MEMBERS_FILE, SERVED_FILE, Member, Served

A, B = "http://127.0.0.1:9001", "http://127.0.0.1:9002"
ONE = Sampling(max_tokens=1)


class Server:
    """Answers when it is let."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[int] = []
        self.given_up = 0
        self.let = asyncio.Event()
        self.closed = False

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append(n)
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return [Completion(prompt_token_ids, [1], [0.0], self.url, "stop", 0)] * n

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        return [None, {len(token_ids): float(top_k)}]

    async def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.made: dict[str, list[Server]] = {}
        config = ServerConfig(roster=folder, server_type="vllm", model_name="m")
        self.servers = ListedServers(config, patience=patience, connect=self._connect)

    def _connect(self, config: ServerConfig) -> Server:
        url = config.base_url.removesuffix("/v1")
        self.made.setdefault(url, []).append(server := Server(url))
        return server

    def list(self, **boots: int) -> None:
        """The servers that run and have the weights, such as A=1."""
        urls = {"A": A, "B": B}
        members = [Member(name, urls[name], "here", "running", boot) for name, boot in boots.items()]
        (self.folder / MEMBERS_FILE).write_bytes(msgspec.json.encode(members))
        served = {urls[name]: Served(boot, 3) for name, boot in boots.items()}
        (self.folder / SERVED_FILE).write_bytes(msgspec.json.encode(served))


def play(folder: Path, scene: Callable[[Scene], Awaitable[None]], patience: float = 10.0) -> None:
    async def played() -> None:
        made = Scene(folder, patience)
        try:
            await asyncio.wait_for(scene(made), 20)
        finally:
            await made.servers.close()

    asyncio.run(played())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "POLL_S", 0.01)


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.005)


def test_a_request_under_way_is_asked_again_where_a_server_is_left(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        run.list(A=1, B=1)
        asked = [asyncio.create_task(run.servers.generate([3], 2, ONE)) for _ in range(2)]
        await until(lambda: sum(len(each[0].asked) for each in run.made.values()) == 2)
        assert [each[0].asked for each in run.made.values()] == [[2], [2]], "the one with the fewest in flight is asked"
        run.list(B=1)
        await until(lambda: len(run.made[B][0].asked) == 2)
        run.made[B][0].let.set()
        answers = await asyncio.gather(*asked)
        assert [[each.text for each in answer] for answer in answers] == [[B, B], [B, B]]
        assert run.made[A][0].given_up == 1 and run.made[A][0].closed

    play(tmp_path, scene)


def test_a_server_that_starts_again_is_another_one(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        run.list(A=1)
        asked = asyncio.create_task(run.servers.generate([3], 1, ONE))
        await until(lambda: A in run.made and len(run.made[A][0].asked) == 1)
        run.list(A=2)
        await until(lambda: len(run.made[A]) == 2 and len(run.made[A][1].asked) == 1)
        run.made[A][1].let.set()
        assert len(await asked) == 1 and run.made[A][0].given_up == 1

    play(tmp_path, scene)


def test_requests_wait_while_no_server_is_left(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        asked = asyncio.create_task(run.servers.generate([3], 1, ONE))
        await asyncio.sleep(0.1)
        assert not run.made and not asked.done()
        run.list(B=1)
        await until(lambda: B in run.made and len(run.made[B][0].asked) == 1)
        run.made[B][0].let.set()
        assert (await asked)[0].text == B

    play(tmp_path, scene)


def test_a_list_that_stays_empty_is_an_error(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        with pytest.raises(PeerGone) as gone:
            await run.servers.generate([3], 1, ONE)
        assert str(tmp_path) in gone.value.field

    play(tmp_path, scene, patience=0.05)


def test_a_request_that_the_environment_gives_up_is_given_up_at_the_server(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        run.list(A=1)
        asked = asyncio.create_task(run.servers.generate([3], 1, ONE))
        await until(lambda: A in run.made and len(run.made[A][0].asked) == 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert run.made[A][0].given_up == 1

    play(tmp_path, scene)


def named(servers: Sequence[Server]) -> ListedServers:
    """The client of servers that are named with commas."""
    by_url = {server.url: server for server in servers}
    config = ServerConfig(base_url=",".join(by_url))
    return ListedServers(config, patience=1.0, connect=lambda config: by_url[config.base_url])


def test_requests_go_to_the_server_with_the_fewest_completions_under_way() -> None:
    async def scenario() -> None:
        first, second, third = every = [Server(url) for url in (A, B, "http://127.0.0.1:9003")]
        several = named(every)
        waiting = []

        async def ask(n: int) -> None:
            waiting.append(asyncio.create_task(several.generate([1], n, ONE)))
            await asyncio.sleep(0.001)

        for n in (8, 2, 4, 1, 3):  # under way afterwards: 8, 2 + 1 + 3, 4
            await ask(n)
        assert (first.asked, second.asked, third.asked) == ([8], [2, 1, 3], [4])
        await ask(1)
        assert third.asked == [4, 1]
        first.let.set()
        await waiting[0]
        await ask(2)  # the first has nothing under way now
        assert first.asked == [8, 2]
        for server in every:
            server.let.set()
        await asyncio.gather(*waiting)
        assert await several.prompt_logprobs([1, 2], 3) == [None, {2: 3.0}]
        await several.close()
        assert all(server.closed for server in every)

    asyncio.run(scenario())


def test_one_that_fails_is_not_counted_as_busy() -> None:
    class Refusing(Server):
        async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
            raise PeerRefused("no", 400)

    async def scenario() -> None:
        refusing, good = Refusing(A), Server(B)
        good.let.set()
        several = named([refusing, good])
        for _ in range(2):
            with pytest.raises(PeerRefused):
                await several.generate([1], 8, ONE)
        assert good.asked == []

    asyncio.run(scenario())


def test_several_servers_are_named_with_commas() -> None:
    config = ServerConfig(base_url="http://a:9001/v1/, http://b:9002/v1", model_name="m")
    assert config.base_url == "http://a:9001/v1,http://b:9002/v1"
    assert isinstance(servers(config, patience=1.0), ListedServers)
    assert isinstance(servers(ServerConfig(base_url="http://a:9001/v1"), patience=1.0), InferenceClient)
    with pytest.raises(ValidationError, match="base_url"):
        ServerConfig(base_url="http://a:9001/v1,b:9002")
