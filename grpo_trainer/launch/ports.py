"""Ports for a run's processes: picks free ones on request."""

from __future__ import annotations

import socket

from grpo_common.errors import Problem
from grpo_common.ports import port_holder
from grpo_trainer.errors import PortBusyError


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
    held = []
    claimed = {}
    for name, port in wanted.items():
        if not port:  # keep each socket open until all are known, or the kernel may hand out one port twice
            probe = socket.socket()
            probe.bind((host, 0))
            held.append(probe)
            port = int(probe.getsockname()[1])
        claimed[name] = port
    for probe in held:
        probe.close()
    return claimed


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT does not block them
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
