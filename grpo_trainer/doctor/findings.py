"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One check's answer.

    Attributes:
        status: ok; warn: it may work, but look; fail: it would not; skip: there is nothing to look at, `got` says why.
        fix: what to do; empty where there is nothing to do.
    """

    name: str
    status: Status
    got: str
    wanted: str = ""
    fix: str = ""


def ok(name: str, got: str) -> Finding:
    return Finding(name, "ok", got)


def warn(name: str, got: str, wanted: str, fix: str) -> Finding:
    return Finding(name, "warn", got, wanted, fix)


def fail(name: str, got: str, wanted: str, fix: str) -> Finding:
    return Finding(name, "fail", got, wanted, fix)


def skip(name: str, why: str) -> Finding:
    return Finding(name, "skip", why)
