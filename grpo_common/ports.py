"""Ports of this machine: whether a server could listen on one, and who does."""

from __future__ import annotations

import socket

import psutil


def try_to_bind(host: str, port: int, *, reuse: bool = True) -> None:
    """Bind a socket and close it. Raise an OSError if no server could listen there.

    With `reuse` it binds as servers do: TIME_WAIT is no obstacle, nor is a port that another process has bound, but
    does not listen on yet.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        probe.bind((host, port))


def listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a port, if this user may see it."""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr[1] == port and each.pid:
            return psutil.Process(each.pid)
    return None


def port_holder(port: int) -> str:
    """Describe the process that listens on a port, as far as this user may see it."""
    try:
        if (process := listener(port)) is not None:
            return f"pid {process.pid} ({' '.join(process.cmdline())[:120] or process.name()})"
    except (psutil.Error, OSError):
        pass  # no permission, or the process ended meanwhile
    return "a process of another user"
