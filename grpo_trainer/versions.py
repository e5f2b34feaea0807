"""Counts the updates behind a policy version, whose number may have jumped.

A server that outlives its trainer may have served versions later than the trainer's checkpoint. Their names must not be
used again, so a resumed trainer continues with a higher number (`WeightBridge.connect`), on the same weights:

    saved as version 90, the server has served 100   ▶   resumed as version 101, of which 11 are no updates
    a batch of version 89, served again              ▶   89 updates
    the first new samples, of version 101            ▶   101 - 11 = 90 updates, as without the interruption
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class VersionOffset:
    """From version `to` on, `skipped` version numbers since the start are no updates."""

    to: int
    skipped: int


@dataclass(frozen=True)
class VersionOffsets:
    """The offsets of a run, in order."""

    jumps: tuple[VersionOffset, ...] = ()

    def updates(self, version: int) -> int:
        """Return the number of updates from the start to a version."""
        return version - next((offset.skipped for offset in reversed(self.jumps) if offset.to <= version), 0)

    def jumped(self, version: int, to: int) -> VersionOffsets:
        """Return the offsets after the weights of `version` are renamed to version `to`."""
        if to == version:
            return self
        return replace(self, jumps=(*self.jumps, VersionOffset(to, to - self.updates(version))))


NO_OFFSETS = VersionOffsets()
