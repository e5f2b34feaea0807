"""HTTP requests to the other processes of a run; a process that is away for a while is not an error."""

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from grpo_common.errors import UserError
from grpo_common.http import CLIENT_IDLE_S, CONNECT_S, complaint, may_pass
from grpo_common.status import WAITS

log = logging.getLogger(__name__)

_SAY_AGAIN_AFTER_S = 30.0
_FULL = 429
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SPREAD_S = 0.1, 5.0, 0.1


class PeerError(UserError, RuntimeError):
    """A request to another process failed. `field` names the process: `the rollout API at http://…`."""


class PeerGone(PeerError):
    """The process could not be reached, or kept failing, until the patience ran out."""


class PeerRefused(PeerError):
    """The process refused the request (4xx); a retry would not help. `key` is the request key at fault, if named."""

    def __init__(self, summary: str, status: int, *, field: str = "", got: str = "", key: str | None = None) -> None:
        super().__init__(summary, field=field, got=got)
        self.status = status
        self.key = key


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Header names are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Peer:
    """One HTTP server, with retries.

    A request that fails temporarily (no connection, time-out, 5xx, 429) is repeated for up to `patience` seconds. The
    log reports the wait when it begins, every half minute, and when it is over; as a warning only once half of the
    patience is used up, because a server that starts, or restarts on new weights, is away for a while. Of a server that
    `may_be_full`, as is the rollout API, 429 does not count: it is there, and has room later.
    A server may be silent for `timeout` seconds in one attempt. Further requests than `connections` wait.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        patience: float,
        timeout: float = 60.0,
        api_key: str | None = None,
        connections: int = 100,
        may_be_full: bool = False,
    ) -> None:
        self.name = name
        self.url = url
        self.patience = patience
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections, self._may_be_full = connections, may_be_full
        self._http: aiohttp.ClientSession | None = None
        self._away_since: float | None = None
        self._said_at = 0.0

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> Answer:
        """Return the answer, as soon as there is one. The body is `json`, encoded, or `content`, unchanged.

        Raise PeerGone if there is none within the patience, and PeerRefused if it is a permanent error.
        """
        if json is not None:
            content, headers = msgspec.json.encode(json), {"Content-Type": "application/json", **(headers or {})}
        patience = self.patience if patience is None else patience
        field, began, pause = f"{self.name} at {self.url}", time.monotonic(), _FIRST_PAUSE_S
        while True:
            answer, trouble = await self._attempt(method, path, content, headers)
            if answer is not None and not trouble:
                break
            now = time.monotonic()
            if answer is not None and answer.status == _FULL and self._may_be_full:
                began = now
            if now - began >= patience:
                raise PeerGone(f"not done within {patience:.0f} s", field=field, got=trouble)
            self._report_waiting(now, patience, trouble)
            await asyncio.sleep(pause + random.uniform(0.0, _SPREAD_S))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if self._away_since is not None:
            log.info("%s is back after %.0f s", self.name, time.monotonic() - self._away_since)
            self._away_since = None
        if answer.status >= 300:  # a redirect is not followed: what was posted would be lost
            refusal = complaint(answer.content, answer.headers.get("content-type"))
            got = f"{answer.status}: {refusal.reason}"
            raise PeerRefused(f"refused {method} {path}", answer.status, field=field, got=got, key=refusal.key)
        return answer

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _attempt(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str] | None
    ) -> tuple[Answer | None, str]:
        """Return the answer, if there is one, and the reason of a temporary failure."""
        if self._http is None:  # not in the constructor: a session belongs to the event loop of its requests
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=CLIENT_IDLE_S),
                timeout=self._timeout,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                # Ignore proxies of environment variables: peers are on loopback addresses or named by URL.
                trust_env=False,
            )
        url = f"{self.url}{path}"
        try:
            sent = self._http.request(method, url, data=content, headers=headers, allow_redirects=False)
            async with sent as response:
                answer = Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            return None, ": ".join(filter(None, [type(error).__name__, str(error)]))
        if may_pass(answer.status):
            return answer, f"{answer.status}: {complaint(answer.content, answer.headers.get('content-type')).reason}"
        return answer, ""

    def _report_waiting(self, now: float, patience: float, trouble: str) -> None:
        if self._away_since is None:
            self._away_since, self._said_at = now, float("-inf")
        if now - self._said_at >= _SAY_AGAIN_AFTER_S:
            self._said_at = now
            away = now - self._away_since
            level = logging.WARNING if away >= patience / 2 else logging.INFO
            message = "waiting for %s at %s (%.0f s so far): %s"
            log.log(level, message, self.name, self.url, away, trouble, extra=WAITS)
