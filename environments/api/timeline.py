"""How long groups are queued and batches leased, for the run's timeline (`grpo_common.trace`)."""

from collections.abc import Iterable

from environments.api.records import Group
from grpo_common.trace import recording, since


class Timeline:
    """Remembers, if a timeline is recorded, when each group came and each batch was leased (monotonic seconds)."""

    def __init__(self) -> None:
        """Know of nothing yet."""
        self._came: dict[int, float] = {}
        self._leased: dict[str, float] = {}

    def taken(self, group_id: int, now: float) -> None:
        """Note that a group has joined the queue."""
        if recording():
            self._came[group_id] = now

    def leased(self, batch_id: str, groups: Iterable[Group], now: float) -> None:
        """Record how long each group of a batch was queued."""
        if recording():
            self._leased.setdefault(batch_id, now)
        for group in groups:
            if (came := self._came.pop(group.id, None)) is not None:
                since("queue", came, lane=f"group {group.id}", group=group.id, version=group.newest_version)

    def ended(self, batch_id: str) -> None:
        """Record how long a batch was leased."""
        if (leased := self._leased.pop(batch_id, None)) is not None:
            since("lease", leased, lane=f"batch {batch_id}", batch=batch_id)
