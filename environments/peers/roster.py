"""Several inference servers with the same policy: servers may leave and join while requests are in flight."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from environments.config import ServerConfig
from environments.peers.http import Answer, PeerGone
from environments.peers.inference import Completion, Inference, InferenceClient, Kind, Sampling
from grpo_common.roster import in_use

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.25
"""Seconds between two reads of the list."""
SAY_AFTER_S = 10.0
AWAY_S = 5.0
"""Seconds between two requests to a server that does not answer."""


def servers(config: ServerConfig, *, patience: float) -> Inference:
    """Return the client of the servers in a run's list, or else of those in `--openai.base_url`."""
    if config.roster is None and "," not in config.base_url:
        return InferenceClient(config, patience=patience)
    return ListedServers(config, patience=patience)


@dataclass(slots=True)
class _Server:
    """A server of the list; `requests` are the time limits of its requests, to end them, and their completions.

    `detecting` finds out its kind; requests go to servers whose kind is known. `ask_at` is when one that did not answer
    is asked again; 0: it answers.
    """

    boot: int
    client: InferenceClient
    detecting: asyncio.Task[Kind] = field(init=False)
    ask_at: float = 0.0
    requests: dict[asyncio.Timeout, int] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        return sum(self.requests.values())


class ListedServers:
    """Each request goes to the server with the fewest completions in flight.

    A request to a server that does not answer, or that leaves the list, is asked again at another one. While the list
    is empty, or no server answers, requests wait.

    `config.roster` is the run's folder of servers (`grpo_common.roster`); without it, the servers are those of
    `config.base_url`, and none leaves or joins. `patience` is how many seconds the list may be empty, no server may say
    its kind, or none may answer a request after the first did not.
    """

    def __init__(self, config: ServerConfig, *, patience: float) -> None:
        self._config = config
        self._patience = patience
        self._servers: dict[str, _Server] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return `n` completions, all of one server and one policy version."""
        return await self._ask(n, lambda client: client.generate(prompt_token_ids, n, sampling))

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        return await self._ask(1, lambda client: client.prompt_logprobs(token_ids, top_k))

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        return await self._ask(1, lambda client: client.ask(path, body))

    async def close(self) -> None:
        for task in (self._watching, *(server.detecting for server in self._servers.values())):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._closing, *(server.client.close() for server in self._servers.values()))

    async def _ask(self, n: int, ask: Callable[[Inference], Coroutine[Any, Any, T]]) -> T:
        since: float | None = None  # an answer may take longer than the patience
        while True:
            server, limit = await self._free_server(), asyncio.timeout(None)
            server.requests[limit] = n
            try:
                async with limit:
                    answer = await ask(server.client)
                server.ask_at = 0.0
                return answer
            except TimeoutError:
                if not limit.expired():
                    raise
            except PeerGone as gone:
                now = time.monotonic()
                since = now if since is None else since
                if now - since >= self._patience:
                    summary = f"not done within {self._patience:.0f} s"
                    raise PeerGone(summary, field=gone.field, got=gone.got) from None
                _leave_out(server, gone)
            finally:
                del server.requests[limit]
            if all(each.ask_at for each in self._servers.values()):
                await asyncio.sleep(random.uniform(0.5, 1.0) * AWAY_S)

    async def _free_server(self) -> _Server:
        """Return the server with the fewest completions in flight; wait for one, and raise PeerGone if none comes."""
        if self._watching is None:
            self._read_list()
            self._watching = asyncio.create_task(self._watch())
        since, is_reported = time.monotonic(), False
        while True:
            now, every = time.monotonic(), self._servers.values()
            if every:
                server = min(every, key=lambda each: (each.ask_at > now, not each.detecting.done(), each.in_flight))
                if server.detecting.done():
                    break
            listed = self._config.roster or self._config.base_url
            if now - since > self._patience:
                got = "no answer" if every else "no server"
                raise PeerGone(f"none within {self._patience:.0f} s", field=f"inference servers in {listed}", got=got)
            if now - since > SAY_AFTER_S and not is_reported:
                is_reported = True
                log.info("waiting for an inference server in %s (%.0f s so far)", listed, now - since)
            if every:
                asked = [each.detecting for each in every if not each.detecting.done()]
                await asyncio.wait(asked, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_S)
        if server.ask_at:
            server.ask_at = now + AWAY_S
        return server

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._read_list()

    def _read_list(self) -> None:
        """Compare the servers with the list: end the requests of those that left, and open those that joined."""
        config = self._config
        listed = in_use(config.roster) if config.roster else dict.fromkeys(config.base_url.split(","), 0)
        for url, server in list(self._servers.items()):
            if listed.get(url) != server.boot:
                del self._servers[url]
                log.info("inference server %s left; its %d completions are asked for elsewhere", url, server.in_flight)
                for limit in server.requests:
                    limit.reschedule(asyncio.get_running_loop().time())
                server.detecting.cancel()
                closing = asyncio.create_task(server.client.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        for url, boot in listed.items():
            if url not in self._servers:
                log.info("inference server %s serves", url)
                client = InferenceClient(config.model_copy(update={"base_url": url}), patience=0.0)
                self._servers[url] = server = _Server(boot, client)
                _detect(server)
        for server in self._servers.values():
            if server.ask_at <= time.monotonic() and _is_gone(server.detecting):
                _detect(server)


def _detect(server: _Server) -> None:
    """Find out a server's kind while requests go to others: one that does not answer takes its whole time limit."""

    def note(detecting: asyncio.Task[Kind]) -> None:
        if _is_gone(detecting):
            _leave_out(server, detecting.exception())

    server.detecting = asyncio.create_task(server.client.detected())
    server.detecting.add_done_callback(note)


def _is_gone(detecting: asyncio.Task[Kind]) -> bool:
    """Return whether the server did not answer."""
    return detecting.done() and not detecting.cancelled() and isinstance(detecting.exception(), PeerGone)


def _leave_out(server: _Server, gone: BaseException | None) -> None:
    """Send a server no requests for a while."""
    if not server.ask_at and isinstance(gone, PeerGone):
        log.warning("%s does not answer: its requests go to other servers (%s)", gone.field, gone.got)
    server.ask_at = time.monotonic() + AWAY_S
