"""Environments whose inference servers leave and join while requests are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from environments.config import ServerConfig
from environments.peers import roster
from environments.peers.http import PeerGone
from environments.peers.inference import Completion, Sampling
from environments.peers.roster import ListedServers
from grpo_common.roster import MEMBERS_FILE, SERVED_FILE, Member, Served

A, B = "http://127.0.0.1:9001", "http://127.0.0.1:9002"
ONE = Sampling(max_tokens=1)


class Server:
    """Answers when it is let."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked = self.given_up = 0
        self.let = asyncio.Event()
        self.closed = False

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked += 1
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return [Completion(prompt_token_ids, [1], [0.0], self.url, "stop", 0)] * n

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        return [None]

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
        await until(lambda: sum(each[0].asked for each in run.made.values()) == 2)
        assert [each[0].asked for each in run.made.values()] == [1, 1], "the one with the fewest in flight is asked"
        run.list(B=1)
        await until(lambda: run.made[B][0].asked == 2)
        run.made[B][0].let.set()
        answers = await asyncio.gather(*asked)
        assert [[each.text for each in answer] for answer in answers] == [[B, B], [B, B]]
        assert run.made[A][0].given_up == 1 and run.made[A][0].closed

    play(tmp_path, scene)


def test_a_server_that_starts_again_is_another_one(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        run.list(A=1)
        asked = asyncio.create_task(run.servers.generate([3], 1, ONE))
        await until(lambda: A in run.made and run.made[A][0].asked == 1)
        run.list(A=2)
        await until(lambda: len(run.made[A]) == 2 and run.made[A][1].asked == 1)
        run.made[A][1].let.set()
        assert len(await asked) == 1 and run.made[A][0].given_up == 1

    play(tmp_path, scene)


def test_requests_wait_while_no_server_is_left(tmp_path: Path) -> None:
    async def scene(run: Scene) -> None:
        asked = asyncio.create_task(run.servers.generate([3], 1, ONE))
        await asyncio.sleep(0.1)
        assert not run.made and not asked.done()
        run.list(B=1)
        await until(lambda: B in run.made and run.made[B][0].asked == 1)
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
        await until(lambda: A in run.made and run.made[A][0].asked == 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert run.made[A][0].given_up == 1

    play(tmp_path, scene)
