"""Ports for a run's processes: picks free ones on request."""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
from collections.abc import Container
from contextlib import suppress

import psutil

from grpo_common.errors import Problem
from grpo_common.ports import listener, port_holder, try_to_bind
from grpo_trainer.config.options import LARGEST_PORT
from grpo_trainer.errors import PortBusyError

FREE_PORTS = range(20_000, 30_000)
"""Where free ports are chosen, unless `VARIABLE` says otherwise. By default Linux gives clients' connections ports from
32768 on: one of these could take a port after it was chosen and before its server listens there."""

VARIABLE = "GRPO_PORTS"
"""Environment variable with another range, such as 20000-20999."""

RUN = re.compile(r"\bgrpo(_trainer)? run\b")
"""The command line of a run, whose processes are its children, and a trainer's server their child."""

_STRIDE = 97  # processes that choose at the same time begin at different places
_cursor = itertools.count(secrets.randbelow(1 << 16))  # in two containers, process ids may be the same


def claim_ports(wanted: dict[str, int], host: str = "127.0.0.1") -> dict[str, int]:
    """Return the ports of several processes by their names, each 0 replaced by a free port.

    Raises:
        PortBusyError: ports are taken; a problem for each names the holder.
    """
    busy = [
        Problem(
            f"--{name.partition('-')[0]}.port",
            f"{port}, held by {port_holder(port)}",
            "a free port",
            _remedy(port),
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


def _remedy(port: int) -> str:
    """Return what to do about a port that is held; a process of a run that goes on is not to be ended."""
    with suppress(psutil.Error, OSError):
        holder = listener(port)
        if holder is not None and any(RUN.search(" ".join(each.cmdline())) for each in holder.parents()):
            return "another grpo run holds it, so let this one pick free ports: --api.port 0 --server.port 0"
    return "end that process, or choose another port (0 picks a free one)"


def _free_port(host: str, taken: Container[int]) -> int:
    ports = _free_ports()
    for _ in ports:
        port = ports[(os.getpid() * _STRIDE + next(_cursor)) % len(ports)]
        if port in taken:
            continue
        try:
            try_to_bind(host, port, reuse=False)  # a server that starts may hold its port and not listen yet
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
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
    if not ports or ports[0] < 1024 or ports[-1] > LARGEST_PORT:
        raise PortBusyError(
            field=VARIABLE, got=given, wanted="two ports from 1024 to 65535, such as 20000-20999", fix="correct it"
        )
    return ports


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    try:
        try_to_bind(host, port)
    except OSError:
        return False
    return True
