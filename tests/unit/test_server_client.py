"""The client of the inference server on connections that break: what is sent again, and what never is."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvicorn

from grpo_common.http import CLIENT_IDLE_S
from grpo_trainer import server_client, signals
from grpo_trainer.config.server import Server
from grpo_trainer.errors import ServerError
from grpo_trainer.phases import SERVER, START
from grpo_trainer.server_client import ServerClient, wait_for_servers
from tests.processes import free_port
from tests.stand_ins import Asked, Handle, Reply, answering
from tests.unit.factories import refusing
from vllm_server import protocol
from vllm_server.errors import ServeError

REFUSAL = ServeError(409, "version", got=3, wanted="4", fix="ask again").response()


LOADED = protocol.LoraLoadResponse(
    adapter_path="memory://1", adapter_name="policy-v1", adapter_id=1, load_count=1, adapter_config={},
    policy_version=1, transport="memory", slot=0, replayed=False, load_seconds=0.1, stall_seconds=0.1, unloaded=[],
)  # fmt: skip
BEGUN = protocol.UpdateBeginResponse(token="t", pause_seconds=0.0)
ENDED = protocol.UpdateEndResponse(policy_version=1, stall_seconds=0.0)
BEGIN = protocol.UpdateBeginRequest(boot_id="b", timeout_s=1.0)


def reply(said: object, status: int = 200, *, closes: bool = False) -> Reply:
    return Reply(status, content=msgspec.json.encode(said), closes=closes)


def well(asked: Asked) -> Reply:
    """The answer of a server that works."""
    said = {protocol.BRIDGE_UPDATE_BEGIN_ROUTE: BEGUN, protocol.BRIDGE_UPDATE_END_ROUTE: ENDED}
    return reply(said.get(asked.path, LOADED))


@contextmanager
def served(handle: Handle, **settings: Any) -> Iterator[tuple[ServerClient, list[Asked]]]:
    """A client of a server that answers from a function, and what the server has heard."""
    heard: list[Asked] = []

    def listen(asked: Asked) -> Reply | None:
        heard.append(asked)
        return handle(asked)

    with (
        answering(listen) as url,
        closing(ServerClient(Server(port=int(url.rpartition(":")[2]), **settings))) as client,
    ):
        yield client, heard


@contextmanager
def replies(*answers: Reply | None) -> Iterator[tuple[ServerClient, list[Asked]]]:
    """A server that gives these answers, one after another."""
    left = iter(answers)
    with served(lambda asked: next(left)) as (client, heard):
        yield client, heard


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


def update(client: ServerClient) -> None:
    assert client.begin_update(BEGIN) == BEGUN
    assert client.end_update(protocol.UpdateEndRequest(token="t", version=1)) == ENDED


def connections(heard: list[Asked]) -> int:
    return len({asked.connection for asked in heard})


@pytest.mark.parametrize("publish", [by_name, by_body])
def test_client_sends_a_publish_again_whose_answer_was_lost(publish: Callable[[ServerClient], None]) -> None:
    with replies(None, reply(LOADED)) as (client, heard):
        publish(client)
    first, second = ((asked.path, asked.content) for asked in heard)
    assert first == second and b"request_id" in first[0].encode() + first[1][:1000]
    assert publish is by_name or len(first[1]) == 3 << 20


def test_client_does_not_begin_an_update_twice() -> None:
    with replies(None) as (client, heard), pytest.raises(ServerError) as unanswered:
        client.begin_update(BEGIN)
    assert len(heard) == 1
    assert unanswered.value.field.startswith("POST http://") and "ProtocolError" in unanswered.value.got


def test_client_updates_on_one_connection_and_sends_the_key() -> None:
    with served(well, api_key="secret") as (client, heard):
        update(client)
        update(client)
    assert connections(heard) == 1 and {asked.headers["Authorization"] for asked in heard} == {"Bearer secret"}
    routes = [protocol.BRIDGE_UPDATE_BEGIN_ROUTE, protocol.BRIDGE_UPDATE_END_ROUTE] * 2
    assert [asked.path for asked in heard] == routes


def test_client_updates_on_no_connection_that_the_server_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "CLIENT_IDLE_S", 999.0)
    with replies(reply(BEGUN, closes=True), reply(ENDED)) as (client, heard):
        client.begin_update(BEGIN)
        while client._kept is not None and not server_client._is_readable(client._kept):
            time.sleep(0.01)
        client.end_update(protocol.UpdateEndRequest(token="t", version=1))
    assert connections(heard) == len(heard) == 2


@pytest.mark.parametrize("ask", [update, by_name_twice])
def test_client_uses_no_connection_that_was_idle_for_long(
    ask: Callable[[ServerClient], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's and vLLM's own default is 5 s; a server of ours waits longer."""
    assert uvicorn.Config("app").timeout_keep_alive / 2 >= CLIENT_IDLE_S
    for idle, used in ((CLIENT_IDLE_S, 1), (-1.0, 2)):  # in the second case each has been idle for longer
        monkeypatch.setattr(server_client, "CLIENT_IDLE_S", idle)
        with served(well) as (client, heard):
            ask(client)
        assert connections(heard) == used and len(heard) == 2


def test_client_uses_the_connection_after_a_refused_update() -> None:
    with replies(reply(REFUSAL, 409), reply(BEGUN), reply(ENDED)) as (client, heard):
        with pytest.raises(ServerError) as refused:
            update(client)
        update(client)
    assert (refused.value.field, refused.value.got, refused.value.fix) == ("version", "3", "ask again")
    assert connections(heard) == 1


def test_client_updates_no_server_that_does_not_listen_or_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ServerClient(Server(port=free_port()))) as client, pytest.raises(ServerError) as missing:
        client.begin_update(BEGIN)
    assert missing.value.got.startswith("ConnectError") and missing.value.field.endswith("/bridge/update/begin")
    monkeypatch.setattr(server_client, "ANSWER_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        closing(ServerClient(Server(port=mute.getsockname()[1]))) as client,
        pytest.raises(ServerError) as unanswered,
    ):
        client.begin_update(BEGIN)
    assert unanswered.value.got.startswith("ReadTimeout")


def test_client_asks_a_question_again_but_not_for_ever() -> None:
    with served(lambda asked: None) as (client, heard), pytest.raises(ServerError) as unanswered:
        client.lora_status()
    assert len(heard) == server_client.ATTEMPTS and unanswered.value.field.startswith("GET http://")


@pytest.mark.parametrize("silent", [True, False])
def test_client_gives_up_a_server_that_is_silent_but_none_that_works_for_long(
    tmp_path: Path, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its time with an adapter; one that works answers other requests meanwhile."""
    monkeypatch.setattr(server_client, "KNOCK_SECONDS", 0.5)
    limit = 1.0 if silent else 6.0  # longer than a busy machine stalls this process
    monkeypatch.setattr(server_client, "SILENT_SECONDS", limit)
    take, awake = threading.Event(), threading.Event()

    def slow(asked: Asked) -> Reply:
        (take if asked.method == "POST" else awake).wait()
        return reply(LOADED) if asked.method == "POST" else Reply(503)

    with served(slow, roster=tmp_path) as (client, _):
        try:
            for publish in (by_name, by_body) if silent else ():
                with pytest.raises(ServerError) as given_up:
                    publish(client)
                assert "silent" in given_up.value.got
            awake.set()
            if silent:
                take.set()
                monkeypatch.setattr(server_client, "SILENT_SECONDS", 60.0)
            else:
                threading.Timer(1.5 * limit, take.set).start()
            by_name(client)
        finally:
            take.set()
            awake.set()


def test_client_counts_no_time_for_which_the_trainer_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop of a day during the wait for an answer, and one during a knock, which therefore gets none."""
    now, done, knocks = [0.0], threading.Event(), iter((False, False, True))
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server_client, "running_time", signals.RunningTime())
    monkeypatch.setattr(server_client, "wait", lambda futures, _: waited(futures, 0.1))
    config = Server(port=free_port(), roster=tmp_path)

    def waited(futures: list[Future[bool]], seconds: float) -> Any:
        now[0] += 86_400.0
        return wait(futures, seconds)

    def is_there() -> bool:
        now[0] += 86_400.0
        if next(knocks):
            done.set()
        return done.is_set()

    with closing(ServerClient(config)) as client:
        monkeypatch.setattr(client, "_is_there", is_there)
        assert client._unless_silent(lambda: done.wait(60))


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (reply(REFUSAL, 409), ("version", "3", "4")),
        (
            reply({"error": {"message": "broken", "type": "InternalServerError", "code": 500}}, 500),
            ("", "broken", ""),
        ),
        (reply("no JSON of ours", 502), ("", '"no JSON of ours"', "")),
    ],
)
def test_client_raises_the_servers_own_parts(answer: Reply, parts: tuple[str, str, str]) -> None:
    field, got, wanted = parts
    with replies(answer) as (client, _), refusing(ServerError, field, got=got, wanted=wanted) as refused:
        client.lora_status()
    assert str(answer.status) in re.findall(r"\w+", refused.value.summary)


def test_client_refuses_the_answer_of_another_kind_of_server() -> None:
    with replies(reply({"of": "another kind"})) as (client, _), pytest.raises(ServerError, match="lora_available"):
        client.lora_status()


def test_wait_for_servers_ends_in_time_and_is_a_phase() -> None:
    START.begin("connect", time.time())
    config = Server(port=free_port(), also=(f"127.0.0.1:{free_port()}",), startup_timeout=0.3)
    with refusing(ServerError, "--server.startup-timeout"):
        wait_for_servers(config, lambda: None)
    seconds = START.end()
    assert seconds is not None and seconds[SERVER] >= 0.3
