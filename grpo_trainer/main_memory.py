"""Main memory that this process may use: the machine's, or what its container has of it. Needs no torch.

A container's limit is that of a control group (cgroup, `man 7 cgroups`), of version 2 or 1. Groups lie in each other,
and each bounds all that is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")


@dataclass(frozen=True)
class MainMemory:
    """In bytes: what there is, and what can be taken now without swapping or being killed."""

    total: int
    available: int


@dataclass(frozen=True)
class _Files:
    """What a group's files are called."""

    limit: str
    used: str
    reclaimable: str  # in memory.stat: file pages that the kernel lets go of first


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def main_memory(root: Path = ROOT) -> MainMemory:
    """Of the machine and of every control group that this process is in, the least.

    Args:
        root: where `proc` and `sys` are.
    """
    machine = psutil.virtual_memory()
    found = [MainMemory(machine.total, machine.available)]
    found += [group for folder, files in _groups(root) if (group := _of_group(folder, files)) is not None]
    return MainMemory(min(each.total for each in found), min(each.available for each in found))


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's groups, each with all that it lies in."""
    listed = root / "proc/self/cgroup"
    if not listed.is_file():
        return
    mount = root / "sys/fs/cgroup"
    for line in listed.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = mount, _V2
        elif "memory" in controllers.split(","):
            top, files = mount / "memory", _V1
        else:
            continue
        own = top / path.lstrip("/")  # within a container it may be the machine's path, which is not to be seen there
        yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(top))


def _of_group(folder: Path, files: _Files) -> MainMemory | None:
    """None: it has no limit."""
    limit, used = _number(folder / files.limit), _number(folder / files.used)
    if limit is None:
        return None
    stat = folder / "memory.stat"
    entries = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    held = max(0, (used or 0) - int(entries.get(files.reclaimable, 0)))
    return MainMemory(limit, max(0, limit - held))


def _number(file: Path) -> int | None:
    """None: it is not there, or says `max`."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
