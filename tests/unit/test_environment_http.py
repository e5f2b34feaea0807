"""Peers that are away for a while, refuse, or stay away."""

import asyncio
import logging
from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest

from environments.peers.http import Peer, PeerGone, PeerRefused

Answer = httpx.Response | Exception
NAME, URL = "the oracle", "http://oracle"


def peer(answers: Iterator[Answer], patience: float = 30.0) -> Peer:
    def handle(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Peer(NAME, URL, patience=patience, transport=httpx.MockTransport(handle))


def forever(make: Callable[[], Answer]) -> Iterator[Answer]:
    while True:
        yield make()


def test_what_may_pass_is_asked_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Answer] = [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(503, json={"detail": "starting"}),
        httpx.Response(429),
        httpx.ReadError("connection reset by peer"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        httpx.Response(500, text="Internal Server Error"),
        httpx.Response(499),
        httpx.Response(200, text="yes"),
    ]
    with caplog.at_level(logging.INFO):
        response = asyncio.run(peer(iter(answers)).request("GET", "/"))
    assert response.text == "yes"
    waiting, back = [record for record in caplog.records if record.name == "environments.peers.http"]
    assert waiting.levelno == logging.WARNING and NAME in waiting.message and URL in waiting.message
    assert "refused" in waiting.message
    assert back.levelno == logging.INFO and NAME in back.message


@pytest.mark.parametrize(
    ("answer", "reason", "key"),
    [
        (httpx.Response(422, json={"detail": "scores: NaN", "field": "scores"}), "scores: NaN", "scores"),
        (
            httpx.Response(422, json={"error": {"message": "max_tokens: got 0", "param": "max_tokens"}}),
            "got 0",
            "max_tokens",
        ),
        (httpx.Response(404, text="nothing here"), "nothing here", None),
        (
            httpx.Response(
                404,
                content=msgspec.msgpack.encode({"detail": "env_id 3 is unknown", "field": "env_id"}),
                headers={"content-type": "application/msgpack"},
            ),
            "env_id 3 is unknown",
            "env_id",
        ),
    ],
)
def test_a_refusal_is_told_at_once_with_its_reason(answer: httpx.Response, reason: str, key: str | None) -> None:
    answers = iter([answer])  # a second attempt would find none
    with pytest.raises(PeerRefused) as caught:
        asyncio.run(peer(answers).request("POST", "/here"))
    assert caught.value.field == f"{NAME} at {URL}" and "POST /here" in caught.value.summary
    assert str(answer.status_code) in caught.value.got and reason in caught.value.got
    assert (caught.value.status, caught.value.key) == (answer.status_code, key)


def test_patience_ends() -> None:
    answers = forever(lambda: httpx.ConnectError("refused"))
    with pytest.raises(PeerGone) as gone:
        asyncio.run(peer(answers, patience=0.01).request("GET", "/"))
    assert (gone.value.field, gone.value.got) == (f"{NAME} at {URL}", "ConnectError: refused")
    assert "0 s" in gone.value.summary
