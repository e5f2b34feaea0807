"""Check every request before any route of a server, including the routes of libraries, runs.

Without a key a server listens on loopback only. Programs of this machine may call it. Web pages may not, although any
page can make a browser send requests to loopback. The gate therefore requires:

* The Host header names this server. If a page's domain name resolves to 127.0.0.1 (DNS rebinding), the browser sends
  that domain name instead.
* The request does not come from a page of another origin. A browser reports the origin in Origin or Sec-Fetch-Site.
* A write with a body has a content type that a browser sends across origins only after a preflight request.

With a key, every request except a health probe must carry it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from grpo_common.errors import Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application, without a web framework's types."""

OPEN_PATHS: Final = frozenset({"/health", "/ping"})
"""Paths that need no key: health probes carry none, and the answer reveals only a status."""

NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SIMPLE = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Content types that a page may send across origins: https://fetch.spec.whatwg.org/#cors-safelisted-request-header"""
_OWN_PAGES = frozenset({"same-origin", "none"})
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@dataclass(frozen=True)
class Refusal:
    """Why the gate refuses a request, and the HTTP status of the answer."""

    status: int
    problem: Problem


def is_loopback(host: str | None) -> bool:
    """Return whether only programs of this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False  # a name may resolve to any address


def from_browser(headers: Collection[tuple[bytes, bytes]]) -> bool:
    """Return whether a request has headers that only browsers send."""
    return any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in headers)


class Gate:
    """ASGI middleware. Install it as the outermost one.

    Args:
        app: the application that gets the requests which pass.
        host: the address that the server listens on.
        keys: bearer tokens; without any, the address must be a loopback one.
        origins: web origins (`https://example.org`) whose pages may call.
        answer: makes the answer to a refused request.
    """

    def __init__(
        self,
        app: Application,
        *,
        host: str,
        answer: Callable[[Scope, Refusal], Application],
        keys: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        self.app = app
        self._keys = tuple(key.encode() for key in keys if key)
        self._names = frozenset({*NAMES, f"[{host}]" if ":" in host else host.lower()})
        self._origins = frozenset(origins) - {"*"}
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # closed before it is accepted: the client gets 403
        else:
            await self._answer(scope, refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        if not self._keys and (problem := self._wrong_host(scope, headers.get(b"host", []))):
            return Refusal(403, problem)
        if problem := self._foreign_page(headers):
            return Refusal(403, problem)
        if self._keys:
            return None if self._may_enter(scope, headers) else Refusal(401, _NO_KEY)
        problem = _simple_write(scope, headers)
        return Refusal(415, problem) if problem else None

    def _wrong_host(self, scope: Scope, hosts: list[bytes]) -> Problem | None:
        port = (scope.get("server") or (None, None))[1]  # None: a Unix domain socket
        host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        name, colon, given = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not colon:
            name, given = host, str(_DEFAULT_PORTS.get(scope.get("scheme", "http"), 80))
        if name in self._names and (port is None or given == str(port)):
            return None
        return Problem(
            "Host",
            got=" and ".join(repr(one.decode("latin-1")[:100]) for one in hosts) or "none",
            wanted=f"127.0.0.1:{port}: this server has no key and answers programs of its own machine only",
            fix="use this name in the URL, or start the server with --api-key",
        )

    def _foreign_page(self, headers: dict[bytes, list[bytes]]) -> Problem | None:
        if self._named(headers):
            return None
        origins = _texts(headers, b"origin")
        own = b"".join(headers.get(b"host", [])).decode("latin-1")
        sites = _texts(headers, b"sec-fetch-site")
        if _OWN_PAGES.issuperset(sites) and all(origin.partition("://")[2] == own for origin in origins):
            return None
        page = f"a page of {origins[0][:100]}" if origins else "a page of another site"
        return Problem("Origin", got=page, wanted="this server's own page, or a page of an allowed origin")

    def _named(self, headers: dict[bytes, list[bytes]]) -> bool:
        origins = _texts(headers, b"origin")
        return bool(origins) and self._origins.issuperset(origins)

    def _may_enter(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path.removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return True
        if scope.get("method") == "OPTIONS" and b"access-control-request-method" in headers and self._named(headers):
            return True  # a CORS preflight carries no key; the CORS middleware answers it
        scheme, _, given = headers.get(b"authorization", [b""])[0].partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _simple_write(scope: Scope, headers: dict[bytes, list[bytes]]) -> Problem | None:
    if scope.get("method", "GET") in _READING:
        return None
    kinds = [kind.partition(";")[0].strip().lower() for kind in _texts(headers, b"content-type")]
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", [b"0"]) != [b"0"]
    if kinds and not _SIMPLE.intersection(kinds) and all(kinds):
        return None
    if not kinds and not has_body:
        return None
    return Problem(
        "Content-Type",
        got=" and ".join(kind[:100] for kind in kinds) or "none",
        wanted="application/json, or another type that a web page cannot send unasked",
        fix="name the body's type; with curl, -H 'Content-Type: application/json'",
    )


def _texts(headers: dict[bytes, list[bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for value in headers.get(name, [])]


_NO_KEY = Problem(
    "Authorization",
    got="no valid key",
    wanted="Authorization: Bearer KEY",
    fix="send the key that the server was started with (--api-key)",
)
