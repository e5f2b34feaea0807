"""Several servers behind one trainer, by bridges that only remember what was asked of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import Sum, reduce
from grpo_trainer.weights.bridge import Published, WeightBridge
from grpo_trainer.weights.multi_server import SeveralServers


class Bridge(WeightBridge):
    def __init__(self, seen: int = 0, noise: float | None = 0.01, seconds: float = 1.0) -> None:
        self.seen, self.noise, self.seconds = seen, noise, seconds
        self.said: list[Any] = []
        self.together: threading.Barrier | None = None
        self.fails: Exception | None = None
        self.serves: int | None = None

    def __enter__(self) -> Bridge:
        self.said.append("in")
        return self

    def close(self) -> None:
        self.said.append("out")

    def connect(self, policy_version: int) -> int:
        if self.together is not None:
            self.together.wait(10)  # broken if the others are connected to only later
        if self.fails is not None:
            raise self.fails
        return max(policy_version, self.seen)

    def prove(self) -> float | None:
        return self.noise

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self.said.append("pause")
        yield
        self.said.append("resume")

    def publish(self, version: int) -> Published:
        if self.together is not None:
            self.together.wait(10)  # broken if the others are published to only later
        if self.fails is not None:
            raise self.fails
        self.said.append(version)
        metrics = {"train/sync_time": Sum(self.seconds), "publish/version": Sum(version)}
        return Published(self.serves or version, f"policy-v{version}", metrics)

    def welcome(self) -> None:
        raise AssertionError("one server of several welcomes nobody")


def several(*bridges: Bridge) -> SeveralServers:
    return SeveralServers({f"http://host-{number}:9001": bridge for number, bridge in enumerate(bridges)})


def test_all_begin_with_the_highest_version_that_one_has_seen() -> None:
    with several(Bridge(), Bridge(seen=7), Bridge(seen=3)) as servers:
        assert servers.connect(2) == 7


def test_all_are_connected_to_at_the_same_time_and_each_that_fails_is_named() -> None:
    bridges = [Bridge(), Bridge(), Bridge()]
    barrier = threading.Barrier(3)
    for number, bridge in enumerate(bridges):
        bridge.together = barrier
        bridge.fails = BridgeError(field="model", got=f"model {number}") if number != 1 else None
    with several(*bridges) as servers, pytest.raises(BridgeError) as refused:
        servers.connect(0)
    assert [(each.field, each.got) for each in refused.value.problems] == [
        ("server http://host-0:9001: model", "model 0"),
        ("server http://host-2:9001: model", "model 2"),
    ]


def test_servers_that_can_not_be_reached_are_named_beside_those_that_refuse() -> None:
    bridges = [Bridge(), Bridge()]
    bridges[0].fails = ServerError("the connection broke", field="POST /x")
    bridges[1].fails = BridgeError(field="model", got="another")
    with several(*bridges) as servers, pytest.raises(BridgeError) as refused:
        servers.connect(0)
    assert [each.field for each in refused.value.problems] == ["POST /x", "server http://host-1:9001: model"]


def test_each_is_proved_and_the_largest_noise_counts() -> None:
    with several(Bridge(noise=0.01), Bridge(noise=0.03)) as servers:
        assert servers.prove() == 0.03
    with several(Bridge(noise=None), Bridge(noise=None)) as servers:
        assert servers.prove() is None


def test_all_are_published_to_at_the_same_time_and_the_slowest_counts() -> None:
    bridges = [Bridge(seconds=1.0), Bridge(seconds=3.0), Bridge(seconds=2.0)]
    barrier = threading.Barrier(3)
    for bridge in bridges:
        bridge.together = barrier
    with several(*bridges) as servers:
        published = servers.publish(4)
    assert (published.version, published.name) == (4, "policy-v4")
    assert reduce(published.metrics) == {"train/sync_time": 3.0, "publish/version": 4.0}
    assert [bridge.said for bridge in bridges] == [["in", 4, "out"]] * 3


def test_a_server_that_refuses_is_named_when_all_have_answered() -> None:
    good, bad = Bridge(), Bridge()
    bad.fails = BridgeError(field="rank", got=64)
    with several(good, bad) as servers, pytest.raises(BridgeError) as refused:
        servers.publish(1)
    assert (refused.value.field, refused.value.got) == ("server http://host-1:9001: rank", "64")
    assert good.said == ["in", 1, "out"] and bad.said == ["in", "out"]
    bad.fails = ServerError("gone", field="http://host-1:9001")  # names its server itself
    with several(good, bad) as servers, pytest.raises(ServerError) as gone:
        servers.publish(1)
    assert gone.value is bad.fails


def test_servers_on_different_versions_are_an_error() -> None:
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


def test_weights_change_while_all_are_told() -> None:
    bridges = [Bridge(), Bridge()]
    with several(*bridges) as servers, servers.updating():
        assert all(bridge.said[-1] == "pause" for bridge in bridges)
    assert all(bridge.said == ["in", "pause", "resume", "out"] for bridge in bridges)
