"""How much may wait in the queue. What comes beyond it is refused, so that no disk fills while nobody trains."""

import logging

from msgspec.structs import replace

from environments.api import wire
from environments.api.queue import RolloutQueue
from environments.api.records import ApiError
from grpo_common.errors import Problem

log = logging.getLogger("rollout-api")

RETRY_AFTER_S = 5
"""When a client that was refused may ask again: a trainer that is alive has taken a batch by then, as a rule."""


class QueueFull(ApiError):
    """As many groups wait as may; a post is refused with 429."""


class QueueLimit:
    """The limit of the bytes of queued groups, on disk and in memory together.

    Leased groups do not count: a trainer keeps them until its next checkpoint, and needs more batches to reach it.

    Attributes:
        limit: bytes; reached by the last post that was taken, which may go beyond it.
    """

    def __init__(self, queue: RolloutQueue, limit: int) -> None:
        self.queue = queue
        self.limit = limit
        self._said = 0

    def check(self) -> None:
        """Raise QueueFull if no more may come in."""
        if self.queue.waiting_bytes >= self.limit:
            problem = Problem(
                "--max-queued-mb",
                got=f"{self.queue.waiting_bytes >> 20} MiB of groups that wait",
                wanted=f"less than {self.limit >> 20} MiB",
                fix="post again when the trainer has taken a batch, and pace yourself by GET /status-env",
                summary="the queue is full",
            )
            raise QueueFull(429, problem)

    def shown_in(self, status: wire.Status) -> wire.Status:
        """Return the status with the limit, and a warning from half of it on."""
        warnings = [self._warning(level)] if (level := self._level()) else []
        return replace(status, max_queued_bytes=self.limit, warnings=[*status.warnings, *warnings])

    def report(self) -> None:
        """Log when half of the limit is passed, and when it is reached; again only after three quarters are free."""
        level = self._level()
        if level > self._said:
            log.warning("%s", self._warning(level))
        if level > self._said or self.queue.waiting_bytes < self.limit // 4:
            self._said = level

    def _level(self) -> int:
        """2: full, 1: at least half full, 0: less."""
        return min(2, 2 * self.queue.waiting_bytes // self.limit)

    def _warning(self, level: int) -> str:
        used = f"{self.queue.waiting_bytes >> 20} of {self.limit >> 20} MiB (--max-queued-mb)"
        if level == 2:
            return f"the queue is full, {used}: posts are refused with 429 until the trainer takes a batch"
        return f"the queue is half full, {used}: environments post faster than the trainer takes batches"
