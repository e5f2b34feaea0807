"""The client of the inference server on connections that break: what is sent again, and what never is."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest
import uvicorn

from grpo_common.http import CLIENT_IDLE_S
from grpo_trainer import quick_post, server_client
from grpo_trainer.config.server import Server
from grpo_trainer.errors import ServerError
from grpo_trainer.phases import SERVER, START
from grpo_trainer.server_client import ServerClient, wait_for_servers
from tests.processes import free_port
from tests.unit.factories import refusing
from vllm_server import protocol
from vllm_server.errors import ServeError

ANSWER = protocol.LoraLoadResponse(
    adapter_path="memory://1", adapter_name="policy-v1", adapter_id=1, load_count=1, adapter_config={},
    policy_version=1, transport="memory", slot=0, replayed=False, load_seconds=0.1, stall_seconds=0.1, unloaded=[],
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Of another status than 200."""

    status: int
    body: object


@contextmanager
def server(answers: list[object | None]) -> Iterator[tuple[ServerClient, list[bytes]]]:
    """One that reads a request for each of `answers` and closes the connection without a word where that is None."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    heard.append(_request(connection))
                    if answer is not None:
                        status, said = (answer.status, answer.body) if isinstance(answer, Answer) else (200, answer)
                        body = msgspec.json.encode(said)
                        head = f"HTTP/1.1 {status} Status\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                        connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = ServerClient(Server(port=listening.getsockname()[1]))
        yield client, heard
        client.close()
        thread.join(10)


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, body = data.split(b"\r\n\r\n", 1)
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < int(lengths[0].split(b":")[1] if lengths else 0):
        body += connection.recv(65536)
    return head.partition(b"\r\n")[0] + b"\n" + body


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_WAIT_SECONDS", 0.0)


def by_name(client: ServerClient) -> None:
    client.load_adapter(protocol.LoraLoadRequest(adapter_path="/a", adapter_name="policy-v1", version=1))


def by_body(client: ServerClient) -> None:
    client.load_adapter(protocol.LoraLoadRequest(adapter_name="policy-v1", version=1), memoryview(b"x" * (3 << 20)))


def by_name_twice(client: ServerClient) -> None:
    by_name(client)
    by_name(client)


@pytest.mark.parametrize("publish", [by_name, by_body])
def test_client_sends_a_publish_again_whose_answer_was_lost(publish: Callable[[ServerClient], None]) -> None:
    with server([None, ANSWER]) as (client, heard):
        publish(client)
    assert heard[0] == heard[1] and b"request_id" in heard[0]
    assert publish is by_name or len(heard[0]) > 3 << 20


def test_client_does_not_begin_an_update_twice() -> None:
    begin = protocol.UpdateBeginRequest(boot_id="b", timeout_s=1.0)
    with server([None]) as (client, heard), pytest.raises(ServerError) as unanswered:
        client.begin_update(begin)
    assert len(heard) == 1
    assert unanswered.value.field.startswith("POST http://") and "ProtocolError" in unanswered.value.got


class Answering(BaseHTTPRequestHandler):
    """Answers what a trainer posts; closes a connection without a word after `most` requests on it."""

    protocol_version = "HTTP/1.1"
    most = 99
    answered = 0
    heard: ClassVar[list[tuple[str, str, str | None]]] = []

    def do_POST(self) -> None:
        self.heard.append((str(self.client_address), self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers["Content-Length"]))
        said = {protocol.BRIDGE_UPDATE_BEGIN_ROUTE: BEGUN, protocol.BRIDGE_UPDATE_END_ROUTE: ENDED}
        self._say(200, said.get(self.path, ANSWER))

    def _say(self, status: int, said: object) -> None:
        body = msgspec.json.encode(said)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.answered += 1
        self.close_connection = self.answered == self.most

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


BEGUN = protocol.UpdateBeginResponse(token="t", pause_seconds=0.0)
ENDED = protocol.UpdateEndResponse(policy_version=1, stall_seconds=0.0)


class Refusing(Answering):
    """Refuses the first request, and answers the next on the same connection."""

    def _say(self, status: int, said: object) -> None:
        if self.answered:
            super()._say(status, said)
        else:
            super()._say(409, ServeError(409, "update", got="one", wanted="none", fix="wait").response())


class Slow(Answering):
    """Takes its time with an adapter, and answers other requests for as long as it is `awake`."""

    protocol_version = "HTTP/1.0"
    awake = threading.Event()
    take = threading.Event()

    def do_POST(self) -> None:
        self.take.wait()
        super().do_POST()

    def do_GET(self) -> None:
        self.awake.wait()
        self._say(503, None)


@contextmanager
def listening(kind: type[Answering] = Answering, **settings: Any) -> Iterator[ServerClient]:
    kind.heard.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as at:
        thread = threading.Thread(target=at.serve_forever)
        thread.start()
        client = ServerClient(Server(port=at.server_port, **settings))
        yield client
        client.close()
        Slow.awake.set()
        Slow.take.set()
        at.shutdown()
        thread.join()


def connections() -> int:
    """On which the server has heard something."""
    return len({address for address, _, _ in Answering.heard})


def update(client: ServerClient) -> None:
    assert client.begin_update(protocol.UpdateBeginRequest(boot_id="b", timeout_s=1.0)) == BEGUN
    assert client.end_update(protocol.UpdateEndRequest(token="t", version=1)) == ENDED


def test_client_updates_on_one_connection_and_sends_the_key() -> None:
    with listening(api_key="secret") as client:
        update(client)
        update(client)
    assert connections() == 1
    routes = [protocol.BRIDGE_UPDATE_BEGIN_ROUTE, protocol.BRIDGE_UPDATE_END_ROUTE] * 2
    assert [heard[1:] for heard in Answering.heard] == [(route, "Bearer secret") for route in routes]


def test_client_updates_on_no_connection_that_the_server_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "most", 1)
    monkeypatch.setattr(quick_post, "CLIENT_IDLE_S", 999.0)
    with listening() as client:
        client.begin_update(protocol.UpdateBeginRequest(boot_id="b", timeout_s=1.0))
        while client._quick.is_open:
            time.sleep(0.01)
        client.end_update(protocol.UpdateEndRequest(token="t", version=1))
    assert connections() == len(Answering.heard) == 2


@pytest.mark.parametrize(("module", "ask"), [(quick_post, update), (server_client, by_name_twice)])
def test_client_uses_no_connection_that_was_idle_for_long(
    module: ModuleType, ask: Callable[[ServerClient], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's and vLLM's own default is 5 s; a server of ours waits longer."""
    assert uvicorn.Config("app").timeout_keep_alive / 2 >= CLIENT_IDLE_S
    for idle, used in ((CLIENT_IDLE_S, 1), (-1.0, 2)):  # in the second case each has been idle for longer
        monkeypatch.setattr(module, "CLIENT_IDLE_S", idle)
        with listening() as client:
            ask(client)
        assert connections() == used and len(Answering.heard) == 2


def test_client_uses_the_connection_after_a_refused_update() -> None:
    with listening(Refusing) as client:
        with pytest.raises(ServerError) as refused:
            update(client)
        update(client)
    assert (refused.value.field, refused.value.got, refused.value.fix) == ("update", "one", "wait")
    assert connections() == 1


def test_client_updates_no_server_that_does_not_listen_or_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = protocol.UpdateBeginRequest(boot_id="b", timeout_s=1.0)
    with closing(ServerClient(Server(port=free_port()))) as client, pytest.raises(ServerError) as missing:
        client.begin_update(begin)
    assert missing.value.got.startswith("ConnectError") and missing.value.field.endswith("/bridge/update/begin")
    monkeypatch.setattr(server_client, "ANSWER_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        closing(ServerClient(Server(port=mute.getsockname()[1]))) as client,
        pytest.raises(ServerError) as unanswered,
    ):
        client.begin_update(begin)
    assert unanswered.value.got.startswith("ReadTimeout")


def test_client_asks_a_question_again_but_not_for_ever() -> None:
    with server([None] * server_client.ATTEMPTS) as (client, heard), pytest.raises(ServerError) as unanswered:
        client.lora_status()
    assert len(heard) == server_client.ATTEMPTS and unanswered.value.field.startswith("GET http://")


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerClient]:
    """A client of a server that may leave."""
    monkeypatch.setattr(server_client, "KNOCK_SECONDS", 0.5)
    monkeypatch.setattr(server_client, "SILENT_SECONDS", 6.0)  # longer than a busy machine stalls this process
    Slow.awake.clear()
    Slow.take.clear()
    with listening(Slow, roster=tmp_path) as client:
        yield client


def test_client_waits_for_a_server_that_works_for_long(slow: ServerClient) -> None:
    Slow.awake.set()
    threading.Timer(1.5 * server_client.SILENT_SECONDS, Slow.take.set).start()
    by_name(slow)


def test_client_gives_up_a_silent_server_until_it_answers(slow: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "SILENT_SECONDS", 1.0)
    for publish in (by_name, by_body):
        with pytest.raises(ServerError) as silent:
            publish(slow)
        assert "silent" in silent.value.got
    Slow.awake.set()
    Slow.take.set()
    by_name(slow)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (Answer(409, ServeError(409, "version", got=3, wanted="4", fix="ask again").response()), ("version", "3", "4")),
        (Answer(500, {"error": {"message": "broken", "type": "InternalServerError", "code": 500}}), ("", "broken", "")),
        (Answer(502, "no JSON of ours"), ("", '"no JSON of ours"', "")),
    ],
)
def test_client_raises_the_servers_own_parts(answer: Answer, parts: tuple[str, str, str]) -> None:
    with server([answer]) as (client, _), pytest.raises(ServerError) as refused:
        client.lora_status()
    assert (refused.value.field, refused.value.got, refused.value.wanted) == parts
    assert str(answer.status) in re.findall(r"\w+", refused.value.summary)


def test_wait_for_servers_ends_in_time_and_is_a_phase() -> None:
    START.begin("connect", time.time())
    config = Server(port=free_port(), also=(f"127.0.0.1:{free_port()}",), startup_timeout=0.3)
    with refusing(ServerError, "--server.startup-timeout"):
        wait_for_servers(config, lambda: None)
    seconds = START.end()
    assert seconds is not None and seconds[SERVER] >= 0.3
