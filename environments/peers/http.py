"""HTTP to the other processes of a run: they may be away for a while, and that is no error yet."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from environments.api import wire
from grpo_common.errors import UserError

log = logging.getLogger(__name__)

_MAY_PASS = frozenset({408, 425, 429, 499})
"""4xx that say nothing of the request itself; 499 is a server that ends and takes its clients for gone."""
_SAY_AGAIN_AFTER_S = 30.0


class PeerError(UserError, RuntimeError):
    """Another process did not do what it was asked for. `field` names it: `the rollout API at http://…`."""


class PeerGone(PeerError):
    """It could not be reached, or kept failing, for as long as we were willing to wait."""


class PeerRefused(PeerError):
    """It refused the request (4xx): asking again would not help. `key` is what it found fault with, if it said so."""

    def __init__(self, summary: str, status: int, *, field: str = "", got: str = "", key: str | None = None) -> None:
        super().__init__(summary, field=field, got=got)
        self.status = status
        self.key = key


class _Trouble(Exception):
    """A failure that may pass."""


class Peer:
    """One HTTP server, asked with patience.

    A request that fails for a reason that may pass (no connection, time-out, 5xx, 429) is repeated for up to
    `patience` seconds; the wait is logged when it begins, every half minute, and when it is over.
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`name` is how messages call it; `timeout` (seconds) bounds one attempt."""
        self.name = name
        self.url = url
        self.patience = patience
        self._away_since: float | None = None
        self._said_at = 0.0
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            transport=transport,
            # Peers are named by URL; a proxy from the shell's variables would see loopback addresses.
            trust_env=False,
        )

    async def request(self, method: str, path: str, *, patience: float | None = None, **kwargs: Any) -> httpx.Response:
        """The answer, once there is one; `kwargs` go to httpx.

        Raises:
            PeerGone: No answer within the patience.
            PeerRefused: The answer was a 4xx.
        """
        patience = self.patience if patience is None else patience
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Trouble),
            stop=stop_after_delay(patience),
            wait=wait_exponential(multiplier=0.1, max=5.0) + wait_random(0.0, 0.1),
            before_sleep=self._say_waiting,
            reraise=True,
        )
        try:
            response = await retrying(self._attempt, method, path, kwargs)
        except _Trouble as trouble:
            raise PeerGone(f"no answer for {patience:.0f} s", field=f"{self.name} at {self.url}", got=trouble) from None
        if self._away_since is not None:
            log.info("%s is back after %.0f s", self.name, time.monotonic() - self._away_since)
            self._away_since = None
        if response.is_client_error:
            complaint = _complaint(response)
            raise PeerRefused(
                f"refused {method} {path}",
                response.status_code,
                field=f"{self.name} at {self.url}",
                got=f"{response.status_code}: {complaint.reason}",
                key=complaint.key,
            )
        return response

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def _attempt(self, method: str, path: str, kwargs: dict[str, Any]) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **kwargs)
        except httpx.TransportError as error:
            raise _Trouble(": ".join(filter(None, [type(error).__name__, str(error)]))) from None
        if response.is_server_error or response.status_code in _MAY_PASS:
            raise _Trouble(f"{response.status_code}: {_complaint(response).reason}")
        return response

    def _say_waiting(self, state: RetryCallState) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since, self._said_at = now, float("-inf")
        if now - self._said_at >= _SAY_AGAIN_AFTER_S:
            self._said_at = now
            trouble = state.outcome.exception() if state.outcome else None
            log.warning(
                "waiting for %s at %s (%.0f s so far): %s", self.name, self.url, now - self._away_since, trouble
            )


@dataclass(frozen=True, slots=True)
class _Complaint:
    reason: str
    key: str | None


def _complaint(response: httpx.Response) -> _Complaint:
    """What an error answer says: `detail` and `field` (rollout API), `error` (inference server), or its text."""
    try:
        if wire.is_msgpack(response.headers.get("content-type")):
            body = msgspec.msgpack.decode(response.content)
        else:
            body = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return _Complaint(response.text[:200] or "no reason given", None)
    if not isinstance(body, dict):
        return _Complaint(str(body)[:500], None)
    error = body.get("error")
    if isinstance(error, dict):
        return _Complaint(str(error.get("message", error)), error.get("param"))
    return _Complaint(str(body.get("detail", body))[:500], body.get("field"))
