"""What foreign clients send, and what the gate promises at every route that an application really has."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute, Mount, Route

FOREIGN: dict[str, Mapping[str, str]] = {
    "rebound name": {"host": "evil.example"},
    "rebound name with the port": {"host": "evil.example:{port}"},
    "other port": {"host": "127.0.0.1:1"},
    "cross-site": {"sec-fetch-site": "cross-site"},
    "same-site": {"sec-fetch-site": "same-site"},
    "origin": {"origin": "http://evil.example"},
    "opaque origin": {"origin": "null"},
    "page of a rebound name": {
        "host": "evil.example:{port}",
        "origin": "http://evil.example:{port}",
        "sec-fetch-site": "same-origin",
    },
}
"""Headers of requests that a web page can make a browser send; `{port}` is the server's."""

SIMPLE_TYPES = (
    *("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data"),
    " Text/Plain ; x=application/json",
)
OPEN = frozenset({"/health", "/ping"})
NO_ROUTES = [("GET", "/no/such/route"), ("POST", "/no/such/route"), ("OPTIONS", "/batch"), ("PUT", "/generate")]
NO_ROUTES += [("GET", "//health")]

Knock = Callable[[str, str, Mapping[str, str], bytes | None], int]
"""Send method, path, headers and body; return the status."""
Routes = Iterable[tuple[str, str]]
"""Methods, WEBSOCKET among them, and paths."""


def assert_no_route_answers(knock: Knock, routes: Routes, headers: Mapping[str, str]) -> None:
    """Headers of a foreign page."""
    for method, path in [*routes, *NO_ROUTES]:
        assert knock(method, path, headers, None) == 403, (method, path)


def assert_no_write_has_a_simple_type(knock: Knock, routes: Routes) -> None:
    """One that any page can send."""
    for method, path in routes:
        if method not in ("GET", "HEAD", "WEBSOCKET"):
            for headers in ({}, *({"content-type": kind} for kind in ("", *SIMPLE_TYPES))):
                assert knock(method, path, headers, b"{}") == 415, (path, headers)


def assert_every_route_asks_for_the_key(knock: Knock, routes: Routes) -> None:
    """The key is `secret`."""
    for method, path in [*routes, *NO_ROUTES, *(("GET", path) for path in OPEN)]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            status = knock(method, path, headers, None)
            if path in OPEN:
                assert status in (200, 404, 405), (method, path)
            else:
                assert status == (403 if method == "WEBSOCKET" else 401), (method, path)


def foreign(name: str, port: int) -> dict[str, str]:
    return {header: value.format(port=port) for header, value in FOREIGN[name].items()}


def endpoints(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of each route, those of mounted applications included."""
    for route in routes:
        if isinstance(route, Route):
            yield from ((method, prefix + filled(route.path)) for method in route.methods or {"GET"})
        elif isinstance(route, Mount):
            yield "GET", prefix + route.path + "/"
            yield from endpoints(list(route.routes), prefix + route.path)


def filled(path: str) -> str:
    """A path with something in the place of its parameters."""
    return "/".join("1" if part.startswith("{") else part for part in path.split("/"))


def innermost(app: Any) -> Any:
    """The application behind middleware that keeps what is behind it as `app`, or in a closure of that name."""
    while not hasattr(app, "routes"):
        app = app.app if hasattr(app, "app") else closed_over(app)["app"]
    return app


def closed_over(function: Any) -> dict[str, Any]:
    names, cells = function.__code__.co_freevars, function.__closure__
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


# bodies that are nearly right -----------------------------------------------------------------------------------

ODD: list[object] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, float("nan"), float("-inf"), "", "x", "\ud800"),
    *([], {}, [[]], [[[]]], {"a": {}}, [None], [[None]], [{}], ["x"], "9" * 5000, [-1], [2**63], {"1": -1}),
]
JUNK = [
    *(b"", b"\x00", b"null", b"[]", b"1", b'"x"', b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{} {}", b"{,}"),
    *(b"[" * 50_000, b'{"a":' * 50_000, b'{"prompt":' * 400, b'"' + b"\\" * 999, b'{"prompt": "\xed\xa0\x80"}'),
    *(b'{"prompt": "1", "temperature": NaN}', b'{"prompt": "1", "n": 1e999}', b'{"prompt": "1", "prompt": 2}'),
    *(b'{"prompt": {"prompt_token_ids": [' + b"9" * 5000 + b"]}}", b'{"prompt": {"prompt_token_ids": [-1]}}'),
    *(b"{'a':1}", b"\x93" * 300, b"\xdf\xff\xff\xff\xff"),
]


def mangled(draw: random.Random, good: Mapping[str, Any], others: Sequence[str] = ("z",)) -> bytes:
    """A good body with fields replaced, bent, dropped or added; or bytes that are no JSON any more; or just bytes."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return draw.choice(JUNK)
    body = copy.deepcopy(dict(good))
    for _ in range(draw.randrange(1, 3)):
        name, odd = draw.choice([*good, *others]), copy.deepcopy(draw.choice(ODD))
        value = body.get(name)
        if draw.random() < 0.2:
            body.pop(name, None)
        elif draw.random() < 0.5 and isinstance(value, list) and value:
            value[draw.randrange(len(value))] = odd
        else:
            body[name] = odd
    encoded = json.dumps([body] if kind == 2 else body).encode()
    at = draw.randrange(len(encoded))
    if kind == 3:
        return encoded[:at] + draw.randbytes(draw.randrange(1, 4)) + encoded[at + draw.randrange(3) :]
    return encoded[:at] if kind == 4 else encoded
