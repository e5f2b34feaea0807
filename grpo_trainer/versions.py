"""How many updates a policy version is from the start, though its number may have jumped.

A server that outlives its trainer has served versions that the trainer's checkpoint does not know; their names are used
up, so who resumes goes on with a higher number (`WeightBridge.connect`). The weights have not moved by that:

    saved as version 90, the server saw 100   ▶   resumed as version 101, 11 of which are no updates
    a batch that comes again, of version 89   ▶   89 updates
    the first new samples, of version 101     ▶   101 - 11 = 90 updates, as old as if there had been no end
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Jump:
    """From version `to` on, `skipped` numbers since the start were no updates."""

    to: int
    skipped: int


@dataclass(frozen=True)
class Numbering:
    """The jumps of a run, in order."""

    jumps: tuple[Jump, ...] = ()

    def updates(self, version: int) -> int:
        """How many updates a version is from the start."""
        return version - next((jump.skipped for jump in reversed(self.jumps) if jump.to <= version), 0)

    def jumped(self, version: int, to: int) -> Numbering:
        """With the same weights under another number from now on."""
        if to == version:
            return self
        return replace(self, jumps=(*self.jumps, Jump(to, to - self.updates(version))))


NO_JUMPS = Numbering()
