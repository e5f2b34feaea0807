"""Ports for a run's processes: picks free ones on request."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Container

from grpo_common.errors import Problem
from grpo_common.ports import port_holder
from grpo_trainer.errors import PortBusyError

FREE_PORTS = range(20_000, 32_768)
"""Where free ports are chosen, unless `VARIABLE` says otherwise: below those that Linux gives to clients' connections.
One of these could take a port after it was chosen and before its server listens there."""

VARIABLE = "GRPO_PORTS"
"""Environment variable with another range, such as 20000-20999."""

_STRIDE = 97  # processes that choose at the same time begin at different places
_claims = itertools.count()


def claim_ports(wanted: dict[str, int], host: str = "127.0.0.1") -> dict[str, int]:
    """Return the ports of several processes, each 0 replaced by a free port.

    Args:
        wanted: process name -> port, 0 for any free one.

    Raises:
        PortBusyError: ports are taken; a problem for each names the holder.
    """
    busy = [
        Problem(
            f"--{name.partition('-')[0]}.port",
            f"{port}, held by {port_holder(port)}",
            "a free port",
            "end that process, or choose another port (0 picks a free one)",
        )
        for name, port in wanted.items()
        if port and not is_free(host, port)
    ]
    if len({port for port in wanted.values() if port}) < sum(1 for port in wanted.values() if port):
        got = ", ".join(f"{name} {port}" for name, port in wanted.items())
        busy.append(Problem("ports", got, "a port for each process", "choose another (0 picks a free one)"))
    if busy:
        raise PortBusyError.of(busy)
    claimed = {name: port for name, port in wanted.items() if port}
    for name, port in wanted.items():
        if not port:
            claimed[name] = _free_port(host, claimed.values())
    return {name: claimed[name] for name in wanted}


def _free_port(host: str, taken: Container[int]) -> int:
    ports = _free_ports()
    start = os.getpid() * _STRIDE + next(_claims)
    for step in range(len(ports)):
        port = ports[(start + step) % len(ports)]
        if port not in taken and is_free(host, port):
            return port
    raise PortBusyError(
        field=VARIABLE, got=f"{ports[0]}-{ports[-1]}, all held", wanted="a free port", fix="set a larger range"
    )


def _free_ports() -> range:
    given = os.environ.get(VARIABLE)
    if not given:
        return FREE_PORTS
    ends = re.fullmatch(r"(\d{1,5})-(\d{1,5})", given)
    ports = range(int(ends[1]), int(ends[2]) + 1) if ends else range(0)
    if not ports or ports[-1] > 65535:
        raise PortBusyError(field=VARIABLE, got=given, wanted="two ports such as 20000-20999", fix="correct it")
    return ports


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT does not block them
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
