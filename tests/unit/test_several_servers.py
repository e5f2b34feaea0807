"""Several servers behind one trainer, also such as leave and join, by bridges that only remember what was asked."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from grpo_common.roster import MEMBERS_FILE, SERVED_FILE, Member, Served, State, in_use, read_served
from grpo_trainer import server_client
from grpo_trainer.config.server import Server
from grpo_trainer.errors import BridgeError, LostError, ServerError
from grpo_trainer.metrics.types import Sum, reduce
from grpo_trainer.server_client import present
from grpo_trainer.weights import fleet
from grpo_trainer.weights.bridge import Published, WeightBridge
from grpo_trainer.weights.fleet import Fleet

A, B, C = (f"http://127.0.0.1:{port}" for port in (9001, 9002, 9003))


class Bridge(WeightBridge):
    """Remembers what was asked of it, and fails with `fails`."""

    def __init__(
        self, seen: int = 0, noise: float | None = 0.01, seconds: float = 1.0, fails: Exception | None = None
    ) -> None:
        self.seen, self.noise, self.seconds, self.fails = seen, noise, seconds, fails
        self.said: list[str] = []
        self.together: threading.Barrier | None = None  # with how many others it is asked at the same time
        self.serves: int | None = None

    def _asked(self) -> None:
        if self.together is not None:
            self.together.wait(60)
        if self.fails is not None:
            raise self.fails

    def __enter__(self) -> Bridge:
        self.said.append("in")
        return self

    def close(self) -> None:
        self.said.append("out")

    def connect(self, policy_version: int) -> int:
        self._asked()
        return max(policy_version, self.seen)

    def prove(self) -> float | None:
        self.said.append("proved")
        return self.noise

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self.said.append("pause")
        yield
        self.said.append("resume")

    def publish(self, version: int) -> Published:
        self._asked()
        self.said.append(f"v{version}")
        metrics = {"train/sync_time": Sum(self.seconds), "publish/version": Sum(version)}
        return Published(self.serves or version, f"policy-v{version}", metrics)

    def welcome(self) -> None:
        raise AssertionError("of all servers, not of one")


def several(*bridges: Bridge) -> Fleet:
    """A fixed list of servers."""
    config = Server(host="host-0", port=9001, also=tuple(f"host-{number}:9001" for number in range(1, len(bridges))))
    left = iter(bridges)
    return Fleet(config, lambda name, server: next(left))


def test_several_are_as_one_bridge() -> None:
    """The highest version that one has seen, the largest noise, the longest time; the weights change while all wait."""
    bridges = [Bridge(0, 0.01, 1.0), Bridge(7, 0.03, 3.0), Bridge(3, 0.02, 2.0)]
    with several(*bridges) as servers:
        assert servers.connect(2) == 7 and servers.prove() == 0.03
        with servers.updating():
            assert all(bridge.said[-1] == "pause" for bridge in bridges)
        published = servers.publish(8)
    assert (published.version, published.name) == (8, "policy-v8")
    assert reduce(published.metrics) == {"train/sync_time": 3.0, "publish/version": 8.0}
    assert [bridge.said for bridge in bridges] == [["in", "proved", "pause", "resume", "v8", "out"]] * 3
    with several(Bridge(noise=None), Bridge(noise=None)) as servers:
        assert servers.prove() is None


@pytest.mark.parametrize("ask", [Fleet.connect, Fleet.publish])
def test_several_are_asked_together_and_each_failure_is_named(ask: Callable[[Fleet, int], object]) -> None:
    gone = ServerError("the connection broke", field="POST /x")  # names its server itself
    bridges = [Bridge(fails=gone), Bridge(), Bridge(fails=BridgeError(field="model", got="another"))]
    barrier = threading.Barrier(3)
    for bridge in bridges:
        bridge.together = barrier
    with several(*bridges) as servers, pytest.raises(BridgeError) as refused:
        ask(servers, 1)
    problems = [(each.field, each.got) for each in refused.value.problems]
    assert problems == [("POST /x", gone.got), ("server http://host-2:9001: model", "another")]
    assert bridges[1].said == (["in", "v1", "out"] if ask is Fleet.publish else ["in", "out"])
    with several(Bridge(), Bridge(fails=gone)) as servers, pytest.raises(ServerError) as raised:
        ask(servers, 1)
    assert raised.value is gone


def test_several_on_different_versions() -> None:
    behind = Bridge()
    behind.serves = 3
    with several(Bridge(), behind) as servers, pytest.raises(BridgeError) as error:
        servers.publish(4)
    assert error.value.wanted == "4" and error.value.got == "4 at http://host-0:9001, 3 at http://host-1:9001"


def test_one_that_can_not_be_entered_ends_those_before_it() -> None:
    class Refusing(Bridge):
        def __enter__(self) -> Bridge:
            raise BridgeError("no")

    first = Bridge()
    with pytest.raises(BridgeError), several(first, Refusing()):
        pass
    assert first.said == ["in", "out"]


class Run:
    """A run's list of servers, and the bridges that were opened to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: dict[str, list[Bridge]] = {}
        self.make: Callable[[], Bridge] = Bridge

    def list(self, *members: tuple[str, State, int]) -> None:
        rows = [Member(f"server-{url[-1]}", url, "here", state, boot) for url, state, boot in members]
        (self.folder / MEMBERS_FILE).write_bytes(msgspec.json.encode(rows))

    def open(self, name: str, vllm: Server) -> Bridge:
        self.opened.setdefault(vllm.url, []).append(bridge := self.make())
        return bridge

    def servers(self) -> Fleet:
        """As `grpo run` starts it with the two servers A and B, published once."""
        self.list((A, "starting", 1), (B, "starting", 1))
        config = present(Server(host="127.0.0.1", port=1, roster=self.folder))
        return Fleet(config, self.open)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(fleet, "FIRST_PAUSE_SECONDS", 0.0)
    return Run(tmp_path)


@pytest.fixture
def servers(run: Run) -> Iterator[Fleet]:
    """Connected, proved and published to as version 0, then both run; environments hear of them once they have it."""
    with run.servers() as both:
        assert in_use(run.folder) == {}
        assert both.connect(0) == 0 and both.prove() == 0.01
        both.publish(0)
        run.list((A, "running", 1), (B, "running", 1))
        assert in_use(run.folder) == {A: 1, B: 1}
        assert [run.opened[url][-1].said for url in (A, B)] == [["in", "proved", "v0"]] * 2
        yield both


def test_a_server_that_fails_a_publish_leaves_and_the_run_goes_on(run: Run, servers: Fleet) -> None:
    run.opened[B][0].fails = ServerError("no answer")
    run.make = lambda: Bridge(fails=ServerError("still no answer"))
    published = servers.publish(1)
    assert published.version == 1 and reduce(published.metrics)["publish/servers"] == 1
    assert in_use(run.folder) == {A: 1}
    assert run.opened[B][0].said[-1] == "out"
    assert read_served(run.folder)[B].note


def test_a_server_that_restarts_is_proved_and_gets_the_newest_version_before_it_serves(
    run: Run, servers: Fleet
) -> None:
    run.list((A, "running", 1), (B, "restarting", 2))
    servers.welcome()
    assert in_use(run.folder) == {A: 1}
    servers.publish(1)
    run.list((A, "running", 1), (B, "running", 2))
    assert in_use(run.folder) == {A: 1}, "it runs, and has no weights yet"
    servers.welcome()
    assert in_use(run.folder) == {A: 1, B: 2}
    assert run.opened[B][1].said == ["in", "proved", "v1"]


def test_with_no_server_left_the_next_one_gets_the_weights(run: Run, servers: Fleet) -> None:
    run.list((A, "gone", 1), (B, "gone", 1))
    assert reduce(servers.publish(1).metrics)["publish/servers"] == 0
    run.list((C, "running", 1))
    servers.welcome()
    assert in_use(run.folder) == {C: 1} and run.opened[C][0].said == ["in", "proved", "v1"]


def test_a_version_that_all_refuse_ends_the_run(run: Run, servers: Fleet) -> None:
    for url in (A, B):
        run.opened[url][0].fails = BridgeError(field="rank", got=64)
    with pytest.raises(BridgeError) as refused:
        servers.publish(1)
    assert refused.value.field.endswith("rank") and A in refused.value.field


def test_connections_that_break_end_neither_the_run_nor_what_a_server_may_try(run: Run, servers: Fleet) -> None:
    for url in (A, B):
        run.opened[url][0].fails = LostError("did not receive in time")
    run.make = lambda: Bridge(fails=LostError("did not join"))
    servers.publish(1)
    run.make = Bridge
    servers.welcome()
    assert in_use(run.folder) == {A: 1, B: 1}


def test_a_server_that_fails_its_proof_never_serves_until_it_restarts(run: Run, servers: Fleet) -> None:
    class Unproved(Bridge):
        def prove(self) -> float | None:
            raise BridgeError("generates with other weights")

    run.make = Unproved
    run.list((A, "running", 1), (B, "running", 1), (C, "running", 1))
    for _ in range(3):
        servers.welcome()
    assert in_use(run.folder) == {A: 1, B: 1} and len(run.opened[C]) == 1
    assert run.opened[C][0].said == ["in", "out"]
    run.make = Bridge
    run.list((A, "running", 1), (B, "running", 1), (C, "running", 2))
    servers.welcome()
    assert in_use(run.folder) == {A: 1, B: 1, C: 2}


def test_a_server_that_was_used_before_joins_with_a_version_that_it_has_not_served(run: Run, servers: Fleet) -> None:
    run.make = lambda: Bridge(seen=1)
    run.list((A, "running", 1), (C, "running", 1))
    servers.welcome()  # with version 0; the attempt may have made it one of version 1
    servers.publish(1)
    assert C not in in_use(run.folder) and len(run.opened[C]) == 1
    servers.publish(2)
    assert in_use(run.folder) == {A: 1, C: 1} and run.opened[C][1].said == ["in", "proved", "v2"]


def test_an_only_server_that_is_ahead_has_the_trainer_start_again(run: Run, servers: Fleet) -> None:
    run.opened[B][0].fails = ServerError("the connection broke")
    run.make = lambda: Bridge(seen=2)
    servers.publish(1)
    assert in_use(run.folder) == {A: 1}, "B may have become one of version 1"
    run.list((A, "gone", 1), (B, "running", 1))
    with pytest.raises(ServerError) as error:
        servers.welcome()
    assert error.value.exit_code == os.EX_TEMPFAIL and B in error.value.field


def test_fleet_keeps_a_server_that_restarted_while_it_was_waited_for(run: Run) -> None:
    with run.servers() as servers:
        run.list((A, "running", 1), (B, "running", 2))
        servers.connect(0)
        servers.publish(0)
        assert in_use(run.folder) == {A: 1, B: 2} and len(run.opened[B]) == 1
    (run.folder / SERVED_FILE).write_bytes(msgspec.json.encode({A: Served(1, 5), B: Served(1, 5)}))
    run.list((A, "running", 2), (B, "running", 1))
    assert in_use(run.folder) == {B: 1}, "an entry of a server's former process does not count"


def test_a_trainer_that_starts_again_takes_the_servers_that_there_are(run: Run) -> None:
    run.list((A, "restarting", 2), (B, "running", 1), (C, "running", 1))
    config = present(Server(port=9001, also=("127.0.0.1:9002",), roster=run.folder))
    assert [each.url for each in config.each] == [B, C]


@pytest.mark.parametrize("one_answers", [True, False])
def test_present_leaves_a_silent_server(run: Run, monkeypatch: pytest.MonkeyPatch, one_answers: bool) -> None:
    """The silent one accepts connections and says nothing, as a stopped process does; C still starts."""
    monkeypatch.setattr(server_client, "KNOCK_SECONDS", 0.5)
    with ExitStack() as up:
        silent = up.enter_context(socket.create_server(("127.0.0.1", 0)))
        health = up.enter_context(HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler))  # answers 501 to each GET
        if one_answers:
            threading.Thread(target=health.serve_forever, daemon=True).start()
            up.callback(health.shutdown)
        urls = [f"http://127.0.0.1:{port}" for port in (silent.getsockname()[1], health.server_port)]
        run.list((urls[0], "running", 1), (urls[1], "running", 1), (C, "starting", 2))
        config = Server(roster=run.folder)
        assert [each.url for each in present(config).each] == [*urls, C], "at the start of a run all are waited for"
        (run.folder / SERVED_FILE).write_bytes(msgspec.json.encode({url: Served(1, 5) for url in urls}))
        assert [each.url for each in present(config).each] == ([urls[1]] if one_answers else [*urls, C])


def test_a_trainer_that_starts_again_goes_on_without_a_server_that_fails(run: Run, servers: Fleet) -> None:
    with run.servers() as again:
        run.opened[B][-1].fails = ServerError("the connection broke")
        run.list((A, "running", 1), (B, "running", 1))
        assert again.connect(1) == 1 and again.prove() == 0.01
        assert run.opened[B][-1].said == ["in", "out"]
        again.publish(1)
        assert run.opened[A][-1].said == ["in", "proved", "v1"]
        assert in_use(run.folder) == {A: 1, B: 1}, "it may join again"


def test_fleet_connects_to_all_at_the_same_time_and_at_first_every_one_must_work(run: Run) -> None:
    with run.servers() as servers:
        barrier = threading.Barrier(2)
        for url in (A, B):
            run.opened[url][0].together = barrier
        run.opened[B][0].seen = 3
        assert servers.connect(0) == 3
        run.opened[B][0].fails = ServerError("the connection broke")
        with pytest.raises(ServerError):
            servers.connect(0)
