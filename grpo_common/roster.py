"""The inference servers of a run, which may change during the run: two files in `RUN_DIR/servers`.

`grpo run` writes the servers that there are (`members.json`), the trainer those that serve its weights (`served.json`).
Environments ask the servers that are in both. A server that starts again has a new `boot`, so that an entry of its
former process does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from grpo_common.formats import check_format

T = TypeVar("T")

log = logging.getLogger(__name__)

FOLDER = "servers"
"""In a run's folder."""
MEMBERS_FILE, SERVED_FILE = "members.json", "served.json"
FORMAT = 1
"""Number of the format of both files, which have no place for it yet."""

State = Literal["starting", "running", "restarting", "waiting for a machine", "leaving", "gone"]


class Member(msgspec.Struct, frozen=True):
    """A server that `grpo run` started, or that `grpo servers add` named."""

    name: str
    url: str  # empty while it waits for a machine
    where: str  # the machine
    state: State
    boot: int = 1  # how often it was started


class Served(msgspec.Struct, frozen=True):
    """What the trainer knows of a server."""

    boot: int
    version: int | None = None  # the policy version that it generates with; None: the trainer does not use it
    note: str = ""  # why the trainer does not use it


def read_members(folder: Path) -> tuple[Member, ...]:
    """Return the servers that there are; none if nothing is written yet."""
    return _read(folder / MEMBERS_FILE, tuple[Member, ...], ())


def read_served(folder: Path) -> Mapping[str, Served]:
    """Return what the trainer knows of each server, by its URL."""
    return _read(folder / SERVED_FILE, dict[str, Served], {})


def in_use(folder: Path, members: Iterable[Member] | None = None) -> dict[str, int]:
    """Return the boots of the servers that environments may ask, by their URLs; `members` go before the file's."""
    served = read_served(folder)
    known = {url: one.boot for url, one in served.items() if one.version is not None}
    return {
        member.url: member.boot
        for member in (read_members(folder) if members is None else members)
        if member.state == "running" and known.get(member.url) == member.boot
    }


def _read(path: Path, kind: type[T], default: T) -> T:
    """Return a file's content; raise a FormatError if a newer version wrote it.

    Files are replaced as a whole: one that can't be read is of an earlier run, and damaged.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
        check_format(str(path), content, FORMAT)
        return msgspec.convert(content, type=kind)
    except FileNotFoundError:
        return default
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s can't be read, and counts as empty: %s", path, error)
        return default
