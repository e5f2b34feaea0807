"""Peers that are away, refuse or stay away; posts to the rollout API that are repeated."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.api import wire
from environments.config import BaseEnvConfig
from environments.peers.http import Answer, Peer, PeerError, PeerGone, PeerRefused
from environments.peers.rollout_api import RolloutApi
from grpo_common.http import Complaint, complaint
from grpo_trainer.config.server import Server
from tests.processes import free_port
from tests.stand_ins import Asked, Reply, answering, then_closed
from vllm_server.errors import ServeError

NAME = "the oracle"
SLOW_S = 0.2
MSGPACK = "application/msgpack"


def ask(url: str, method: str = "GET", path: str = "/", *, patience: float = 30.0, timeout: float = 60.0) -> Answer:
    peer = Peer(NAME, url, patience=patience, timeout=timeout)
    return then_closed(peer, lambda peer: peer.request(method, path))


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
        (
            Reply(404, None, msgspec.msgpack.encode({"detail": "why", "field": "env_id"}), {"Content-Type": MSGPACK}),
            *("why", "env_id"),
        ),
        (Reply(501, content=b"not made"), "not made", None),
        (Reply(302, content=b"moved", headers={"Location": "http://127.0.0.1:1/"}), "moved", None),
    ],
)
def test_a_refusal_is_told_at_once_with_its_reason(reply: Reply, reason: str, key: str | None) -> None:
    replies = iter([reply])  # a second attempt would find none
    with answering(lambda _: next(replies)) as url, pytest.raises(PeerRefused) as caught:
        ask(url, "POST", "/here")
    assert caught.value.field.startswith(f"{NAME} at http://") and "POST /here" in caught.value.summary
    assert str(reply.status) in caught.value.got and reason in caught.value.got
    assert (caught.value.status, caught.value.key) == (reply.status, key)


def test_peer_is_gone_after_the_patience(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"  # nobody listens there
    with pytest.raises(PeerGone) as gone:
        ask(url, patience=0.01)
    assert gone.value.field == f"{NAME} at {url}" and gone.value.got.startswith("ClientConnectorError: ")
    caplog.clear()
    monkeypatch.setattr("environments.peers.http._SAY_AGAIN_AFTER_S", 0.0)
    seconds = iter([0.0, 0.0, 29.0, 30.0, 31.0])  # of the request, three failures and the answer
    monkeypatch.setattr("environments.peers.http.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    replies = iter([Reply(503), Reply(503), Reply(503), Reply()])
    with caplog.at_level(logging.INFO), answering(lambda _: next(replies)) as url:
        ask(url, patience=60.0)
    levels = [record.levelno for record in caplog.records if record.name == "environments.peers.http"]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING, logging.INFO]  # the last reports that it is back


CONFIG = BaseEnvConfig(tokenizer_name="model", group_size=2, retry_timeout=5.0)
GROUP = wire.ScoredData(
    tokens=[[1, 2, 3], [1, 2]],
    masks=[[-100, 2, 3], [-100, 2]],
    scores=[1.0, 0.0],
    inference_logprobs=[[1.0, -0.5, -0.25], [1.0, -1.5]],
    policy_versions=[3, 3],
)


def with_server(url: str, work: Callable[[RolloutApi], Awaitable[Any]]) -> Any:
    return then_closed(RolloutApi(CONFIG.model_copy(update={"rollout_server_url": url})), work)


def test_a_post_whose_answer_is_lost_is_repeated_whole_and_with_its_key() -> None:
    asked: list[Asked] = []

    def lose_twice(request: Asked) -> Reply | None:
        asked.append(request)
        lost = {1: None, 2: Reply(502)}
        return lost.get(len(asked), Reply(json={"status": "received"}, headers={"Content-Type": wire.JSON}))

    with answering(lose_twice) as url:
        with_server(url, lambda api: api.post(GROUP))
    assert len(asked) == 3 and len({each.headers["idempotency-key"] for each in asked}) == 1
    for each in asked:
        assert each.headers["content-type"] == wire.MSGPACK and wire.decode_group(each.content) == GROUP


def test_a_full_api_is_waited_for_however_short_the_patience() -> None:
    replies = iter([Reply(429), Reply(429), Reply(json={"status": "received"})])
    with answering(lambda _: next(replies)) as url:
        config = CONFIG.model_copy(update={"rollout_server_url": url, "retry_timeout": 1e-6})
        then_closed(RolloutApi(config), lambda api: api.post(GROUP))


def test_another_kind_of_server_is_named() -> None:
    page = Reply(content=b"<html>welcome</html>")
    with answering(lambda _: page) as url, pytest.raises(PeerError) as error:
        with_server(url, lambda api: api.register("sums"))
    assert "/register-env" in error.value.field and "--env.rollout_server_url" in error.value.fix


# error answers -------------------------------------------------------------------------------------------------------


def test_http_addresses_and_errors() -> None:
    config = Server(host="::1", port=9001, also=("[fd00::2]:9002",))
    assert [each.url for each in config.each] == ["http://[::1]:9001", "http://[fd00::2]:9002"]
    assert config.each[1].host == "fd00::2"  # as a socket has it

    body = msgspec.json.encode(ServeError(409, "version", got=3, wanted="4", fix="ask again").response())
    said = complaint(body, "application/json")
    assert (said.key, said.got, said.wanted, said.fix) == ("version", "3", "4", "ask again")


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (b'{"detail": "why", "field": "scores"}', "application/json", Complaint("why", "scores")),
        (b'{"error": {"message": "broken", "param": null}}', None, Complaint("broken")),
        (b'{"error": {"message": "got 0", "param": "n"}}', "application/json", Complaint("got 0", "n")),
        (msgspec.msgpack.encode({"detail": "why"}), MSGPACK, Complaint("why")),
        (b"\x81\xa1x\x01", MSGPACK, Complaint(f"4 bytes of {MSGPACK}")),
        (b"<html>", "text/html", Complaint("<html>")),
        (b"[1]", "application/json", Complaint("[1]")),
        (b"", None, Complaint("no reason given")),
    ],
)
def test_what_an_error_answer_says(body: bytes, content_type: str | None, said: Complaint) -> None:
    assert complaint(body, content_type) == said


@given(st.binary(max_size=2000), st.sampled_from([None, "text/html", "application/json", MSGPACK]))
def test_any_bytes_are_read(body: bytes, content_type: str | None) -> None:
    assert 0 < len(complaint(body, content_type).reason) <= 500
