"""Ports for a run's processes: named ones, and free ones of a range."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress

import pytest

from grpo_trainer.errors import PortBusyError
from grpo_trainer.launch.ports import FREE_PORTS, VARIABLE, claim_ports
from tests.processes import free_port


def test_a_busy_port_names_its_holder_and_free_ones_differ() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortBusyError) as error:
            claim_ports({"api": port, "server": 0})
        assert error.value.field == "--api.port"
        assert str(port) in error.value.got and f"pid {os.getpid()}" in error.value.got
        assert error.value.exit_code == 2
    claimed = claim_ports({"a": 0, "b": 0, "c": 0})
    assert list(claimed) == ["a", "b", "c"]
    assert len({*claimed.values(), *claim_ports({"a": 0, "b": 0}).values()}) == 5


def test_free_ports_are_those_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert claim_ports({"a": 0})["a"] in FREE_PORTS
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server that starts: it does not listen yet
        holder.bind(("127.0.0.1", port := free_port()))
        monkeypatch.setenv(VARIABLE, f"{port}-{port + 1}")
        assert claim_ports({"a": 0}) == {"a": port + 1}
        with pytest.raises(PortBusyError) as error:
            claim_ports({"a": 0, "b": 0})
        assert error.value.field == VARIABLE and "held" in error.value.got.split()


def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls in a row, with held ports between."""
    first = free_port()
    monkeypatch.setenv(VARIABLE, f"{first}-{first + 19}")
    with ExitStack() as held:
        for port in range(first, first + 20, 2):
            with suppress(OSError):  # a server of another test holds it
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert len({free_port() for _ in range(5)}) == 5


@pytest.mark.parametrize("given", ["x", "1", "9-8", "2009-2008", "0-5000", "65535-65536", "-1-5"])
def test_a_range_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(PortBusyError) as error:
        claim_ports({"a": 0})
    assert (error.value.field, error.value.got) == (VARIABLE, given)


def test_one_port_for_two_processes_is_refused() -> None:
    port = free_port()
    with pytest.raises(PortBusyError) as error:
        claim_ports({"api": port, "server": port})
    assert error.value.field == "ports" and error.value.got == f"api {port}, server {port}"
