"""What a check says."""

from __future__ import annotations

import json
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


def failure(code: int, out: str, err: str) -> str | None:
    """Return why a trial failed; None: its last line of JSON says `"ok": true`.

    Args:
        code, out, err: exit code and output of the process that made the trial.
    """
    said = [line for line in out.splitlines() if line.startswith("{")]
    if code == 0 and said and json.loads(said[-1])["ok"]:
        return None
    return (err.strip().splitlines() or [f"exit code {code}"])[-1][:200]
