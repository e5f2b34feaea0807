"""Ask a policy the rows of an evaluation: a limited number at once, and a row that fails does not lose the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from environments.config import ConfigError
from environments.peers.http import PeerError
from environments.running.runner import LOSSES, EnvironmentFailed, Failures
from environments.threads import as_exception

AT_ONCE: Final = 256
"""Rows that are generated and scored at the same time."""

Row = TypeVar("Row")
Found = TypeVar("Found")


async def examine_each(
    name: str, rows: Sequence[Row], examine: Callable[[Row], Awaitable[Found]], failures: Failures
) -> tuple[list[Found], int]:
    """Return what was found of the rows that did not fail, in their order, and how many failed.

    Args:
        name: the environment's.
        failures: logs the errors of rows, each kind once.

    Raises:
        ConfigError: The settings are wrong; the other rows are cancelled.
        PeerError: The server is gone; the other rows are cancelled.
        EnvironmentFailed: Every row failed.
    """
    found: dict[int, Found] = {}
    waiting = iter(enumerate(rows))
    last: list[Exception] = []

    async def work() -> None:
        for place, row in waiting:
            try:
                found[place] = await examine(row)
            except (Exception, KeyboardInterrupt, SystemExit) as raised:  # of the environment's code: it loses one row
                error = raised if isinstance(raised, Exception) else as_exception(raised)
                if isinstance(error, PeerError | ConfigError) and not isinstance(error, tuple(LOSSES)):
                    raise
                failures.log(name, row, error)
                last[:] = [error]

    workers = [asyncio.create_task(work()) for _ in range(min(len(rows), AT_ONCE))]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if last and not found:
        error = last[0]
        raise EnvironmentFailed(
            f"all {len(rows)} rows of the evaluation failed", field=name, got=repr(error), fix="see the log"
        ) from error
    return [found[place] for place in sorted(found)], len(rows) - len(found)
