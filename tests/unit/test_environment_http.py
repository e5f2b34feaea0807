"""Peers that are away for a while, refuse, or stay away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from environments.peers.http import Answer, Peer, PeerGone, PeerRefused
from tests.processes import free_port
from tests.stand_ins import Asked, Reply, answering

NAME = "the oracle"
SLOW_S = 0.2


def ask(url: str, method: str = "GET", path: str = "/", *, patience: float = 30.0, timeout: float = 60.0) -> Answer:
    async def scene() -> Answer:
        peer = Peer(NAME, url, patience=patience, timeout=timeout)
        try:
            return await peer.request(method, path)
        finally:
            await peer.close()

    return asyncio.run(scene())


def ask_one_that_says(replies: Iterator[Reply | None], method: str = "GET", path: str = "/") -> Answer:
    with answering(lambda _: next(replies)) as url:
        return ask(url, method, path)


def test_what_may_pass_is_asked_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    replies = iter(
        [Reply(503, {"detail": "starting"}), Reply(429), None, Reply(500), Reply(499), Reply(content=b"yes")]
    )
    with caplog.at_level(logging.INFO), answering(lambda _: next(replies)) as url:
        # A GET on a connection that was used before would be sent again by the client itself.
        assert ask(url, "POST").content == b"yes"
    waiting, back = [record for record in caplog.records if record.name == "environments.peers.http"]
    assert waiting.levelno == logging.INFO and NAME in waiting.message and url in waiting.message
    assert "starting" in waiting.message
    assert back.levelno == logging.INFO and NAME in back.message


def test_an_attempt_ends_where_the_server_is_silent() -> None:
    asked: list[Asked] = []

    def slow_at_first(request: Asked) -> Reply:
        asked.append(request)
        time.sleep(SLOW_S if len(asked) == 1 else 0.0)
        return Reply(content=b"yes")

    with answering(slow_at_first) as url:
        assert ask(url, timeout=SLOW_S / 2).content == b"yes"
    assert len(asked) >= 2  # a slow machine may need one more


@pytest.mark.parametrize(
    ("reply", "reason", "key"),
    [
        (Reply(422, {"detail": "scores: NaN", "field": "scores"}), "scores: NaN", "scores"),
        (Reply(422, {"error": {"message": "max_tokens: got 0", "param": "max_tokens"}}), "got 0", "max_tokens"),
        (Reply(404, content=b"nothing here"), "nothing here", None),
        (Reply(501, content=b"not made"), "not made", None),
        (
            Reply(
                404,
                content=msgspec.msgpack.encode({"detail": "env_id 3 is unknown", "field": "env_id"}),
                headers={"Content-Type": "application/msgpack"},
            ),
            "env_id 3 is unknown",
            "env_id",
        ),
        (Reply(302, content=b"moved", headers={"Location": "http://127.0.0.1:1/"}), "moved", None),
    ],
)
def test_a_refusal_is_told_at_once_with_its_reason(reply: Reply, reason: str, key: str | None) -> None:
    with pytest.raises(PeerRefused) as caught:
        ask_one_that_says(iter([reply]), "POST", "/here")  # a second attempt would find none
    assert caught.value.field.startswith(f"{NAME} at http://") and "POST /here" in caught.value.summary
    assert str(reply.status) in caught.value.got and reason in caught.value.got
    assert (caught.value.status, caught.value.key) == (reply.status, key)


def test_patience_ends() -> None:
    url = f"http://127.0.0.1:{free_port()}"  # nobody listens there
    with pytest.raises(PeerGone) as gone:
        ask(url, patience=0.01)
    assert gone.value.field == f"{NAME} at {url}" and gone.value.got.startswith("ClientConnectorError: ")
    assert "0 s" in gone.value.summary


def test_an_absence_is_a_warning_when_half_of_the_patience_is_used_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("environments.peers.http._SAY_AGAIN_AFTER_S", 0.0)
    seconds = iter(
        [0.0, 0.0, 29.0, 30.0, 31.0]
    )  # of the request, three failures and the answer: how long they take here says nothing
    monkeypatch.setattr("environments.peers.http.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    replies = iter([Reply(503), Reply(503), Reply(503), Reply()])
    with caplog.at_level(logging.INFO), answering(lambda _: next(replies)) as url:
        ask(url, patience=60.0)
    levels = [record.levelno for record in caplog.records if record.name == "environments.peers.http"]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING, logging.INFO]  # the last says that it is back


def test_what_is_asked_goes_out_as_it_was_given() -> None:
    asked: list[Asked] = []

    async def scene(url: str) -> None:
        peer = Peer(NAME, f"{url}/under", patience=1.0, api_key="key")
        try:
            await peer.request("POST", "/a?b=c", json={"x": [1.5, None]}, headers={"X-More": "1"})
            await peer.request("GET", "/d", content=b"raw", headers={"Content-Type": "text/plain"})
        finally:
            await peer.close()

    def note(request: Asked) -> Reply:
        asked.append(request)
        return Reply()

    with answering(note) as url:
        asyncio.run(scene(url))
    first, second = asked
    assert (first.method, first.path, first.json()) == ("POST", "/under/a?b=c", {"x": [1.5, None]})
    assert (first.headers["content-type"], first.headers["x-more"]) == ("application/json", "1")
    assert (second.method, second.path, second.content) == ("GET", "/under/d", b"raw")
    assert (second.headers["content-type"], second.headers["authorization"]) == ("text/plain", "Bearer key")
