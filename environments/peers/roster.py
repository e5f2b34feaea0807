"""Several inference servers with the same policy: servers may leave and join while requests are in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from environments.config import ServerConfig
from environments.peers.http import PeerGone
from environments.peers.inference import Completion, Inference, InferenceClient, Sampling
from environments.threads import elsewhere
from grpo_common.roster import in_use

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.25
"""Seconds between two looks at the list."""
SAY_AFTER_S = 10.0


def servers(config: ServerConfig, *, patience: float) -> Inference:
    """Return the client of the servers in a run's list, or else of those in `--openai.base_url`."""
    if config.roster is None and "," not in config.base_url:
        return InferenceClient(config, patience=patience)
    return ListedServers(config, patience=patience)


@dataclass(slots=True)
class _Server:
    """A server of the list.

    Attributes:
        under_way: completions in flight.
        requests: requests in flight; each ends if its limit is set to now.
    """

    boot: int
    client: Inference
    under_way: int = 0
    requests: set[asyncio.Timeout] = field(default_factory=set)


class ListedServers:
    """Each request goes to the server with the fewest completions in flight.

    Requests to a server that is away stay in flight, so it gets few new ones. A request to a server that leaves the
    list is asked again at another one. While the list is empty, requests wait.

    Args:
        config: settings of every server. Its `roster` is the run's folder of servers (`grpo_common.roster`); without
            it, the servers are those of its `base_url`, and none leaves or joins.
        patience: seconds that the list may be empty.
        connect: makes the client of one server.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        patience: float,
        connect: Callable[[ServerConfig], Inference] | None = None,
    ) -> None:
        self._config = config
        self._patience = patience
        self._connect = connect or (lambda config: InferenceClient(config, patience=patience))
        self._servers: dict[str, _Server] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return `n` completions, all of one server and one policy version; raise as `InferenceClient`."""
        return await self._asked(n, lambda client: client.generate(prompt_token_ids, n, sampling))

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Return, for each position but the first, the `top_k` likeliest tokens and the actual one."""
        return await self._asked(1, lambda client: client.prompt_logprobs(token_ids, top_k))

    async def close(self) -> None:
        """Close the connections."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*self._closing, *(server.client.close() for server in self._servers.values()))

    async def _asked(self, n: int, ask: Callable[[Inference], Coroutine[Any, Any, T]]) -> T:
        while True:
            with elsewhere():
                server = await self._chosen()
            server.under_way += n
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    server.requests.add(limit)
                    return await ask(server.client)
            except TimeoutError:
                if not limit.expired():
                    raise
            finally:
                server.under_way -= n
                server.requests.discard(limit)

    async def _chosen(self) -> _Server:
        """Return the server with the fewest completions in flight; wait for one if there is none.

        Raises:
            PeerGone: there was none for longer than the patience.
        """
        if self._watching is None:
            self._look()
            self._watching = asyncio.create_task(self._watch())
        since, said = time.monotonic(), False
        while not self._servers:
            waited = time.monotonic() - since
            if waited > self._patience:
                field = f"inference servers in {self._config.roster}"
                raise PeerGone(f"none within {self._patience:.0f} s", field=field, got="no server")
            if waited > SAY_AFTER_S and not said:
                said = True
                log.info("waiting for an inference server in %s (%.0f s so far)", self._config.roster, waited)
            await asyncio.sleep(POLL_S)
        return min(self._servers.values(), key=lambda server: server.under_way)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._look()

    def _look(self) -> None:
        """Compare the servers with the list: end the requests of those that left, and open those that came."""
        named = self._config.base_url.split(",")
        listed = in_use(self._config.roster) if self._config.roster else dict.fromkeys(named, 0)
        for url, server in list(self._servers.items()):
            if listed.get(url) != server.boot:
                del self._servers[url]
                log.info("inference server %s left; its %d completions are asked for elsewhere", url, server.under_way)
                for limit in server.requests:
                    limit.reschedule(asyncio.get_running_loop().time())
                closing = asyncio.create_task(server.client.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        for url, boot in listed.items():
            if url not in self._servers:
                log.info("inference server %s serves", url)
                client = self._connect(self._config.model_copy(update={"base_url": url}))
                self._servers[url] = _Server(boot, client)
