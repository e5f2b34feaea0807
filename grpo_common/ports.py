"""Who listens on a port of this machine."""

from __future__ import annotations

import psutil


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
