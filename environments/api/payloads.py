"""The groups' bytes: in memory up to a limit, beyond it on disk.

The oldest groups are trained first, so it is the newest that are left on disk when memory is full. Without a
store to leave them in, they go to a temporary file that vanishes with the process.
"""

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from environments.api.store import Store


class Payloads:
    """Bytes by group id."""

    def __init__(self, store: Store | None = None, memory_limit: int = 1 << 30) -> None:
        """`memory_limit`: bytes of groups that are kept in memory."""
        self.store = store
        self.memory_limit = memory_limit
        self.in_memory = 0
        self._bodies: dict[int, bytes] = {}
        self._on_disk: set[int] = set()
        self._spill: Store | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def adopt(self, ids: Iterable[int]) -> None:
        """These are in the store already, from an earlier process."""
        self._on_disk.update(ids)

    def put(self, group_id: int, body: bytes) -> None:
        """Keep a group's bytes; durably once the store has committed."""
        if self.store is not None:
            self.store.put_payload(group_id, body)
        if self.in_memory + len(body) <= self.memory_limit:
            self._bodies[group_id] = body
            self.in_memory += len(body)
            return
        self._on_disk.add(group_id)
        if self.store is None:
            self._spilled().put_payload(group_id, body)

    async def get(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of these groups, in this order."""
        found = {each: self._bodies[each] for each in ids if each in self._bodies}
        if from_disk := [each for each in ids if each not in found]:
            disk = self.store or self._spilled()
            await disk.commit()
            found |= await asyncio.to_thread(disk.read_payloads, from_disk)
        return [found[each] for each in ids]

    def leave(self, ids: Iterable[int]) -> None:
        """Keep these groups in the store alone: a trainer has them, and they come again only if it is killed."""
        if self.store is None:
            return
        for each in ids:
            if (body := self._bodies.pop(each, None)) is not None:
                self.in_memory -= len(body)
                self._on_disk.add(each)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget these groups; the store drops its rows by its own journal."""
        for each in ids:
            if (body := self._bodies.pop(each, None)) is not None:
                self.in_memory -= len(body)
            elif each in self._on_disk:
                self._on_disk.discard(each)
                if self._spill is not None:
                    self._spill.drop([each])

    def clear(self) -> None:
        """Forget everything."""
        self.drop([*self._bodies, *self._on_disk])

    @property
    def on_disk(self) -> int:
        """Groups whose bytes are not in memory."""
        return len(self._on_disk)

    async def flush(self) -> None:
        """Let the temporary file take what was left for it, so that it does not gather in memory."""
        if self._spill is not None:
            await self._spill.commit()

    def close(self) -> None:
        """Let the temporary file go."""
        if self._spill is not None and self._directory is not None:
            self._spill.close()
            self._directory.cleanup()

    def _spilled(self) -> Store:
        if self._spill is None:
            self._directory = tempfile.TemporaryDirectory(prefix="rollout-api-")
            self._spill = Store(Path(self._directory.name) / "spill.sqlite")
        return self._spill
