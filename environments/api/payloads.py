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
    """Bytes by group id.

    Args:
        memory_limit: bytes of groups that are kept in memory.
    """

    def __init__(self, store: Store | None = None, memory_limit: int = 1 << 30) -> None:
        self.durable = store is not None
        self.memory_limit = memory_limit
        self.in_memory = 0
        self._disk = store  # or the temporary file, once it is needed
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._bodies: dict[int, bytes | None] = {}  # None: on disk alone

    def adopt(self, ids: Iterable[int]) -> None:
        """These are in the store already, from an earlier process."""
        self._bodies.update(dict.fromkeys(ids))

    def put(self, group_id: int, body: bytes) -> None:
        """Keep a group's bytes; durably once the store has committed."""
        fits = self.in_memory + len(body) <= self.memory_limit
        self._bodies[group_id] = body if fits else None
        self.in_memory += len(body) if fits else 0
        if self.durable or not fits:
            if self._disk is None:
                self._folder = tempfile.TemporaryDirectory(prefix="rollout-api-")
                self._disk = Store(Path(self._folder.name) / "spill.sqlite")
            self._disk.put_payload(group_id, body)

    async def get(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of these groups, in this order."""
        found = {each: self._bodies[each] for each in ids}
        from_disk = [each for each, body in found.items() if body is None]
        if from_disk and self._disk is not None:
            await self._disk.commit()
            found |= await asyncio.to_thread(self._disk.read_payloads, from_disk)
        return [body for body in found.values() if body is not None]

    def leave(self, ids: Iterable[int]) -> None:
        """Keep these groups in the store alone: a trainer has them, and they come again only if it is killed."""
        for each in self._bodies.keys() & set(ids) if self.durable else ():
            self.in_memory -= len(self._bodies[each] or b"")
            self._bodies[each] = None

    def drop(self, ids: Iterable[int]) -> None:
        """Forget these groups."""
        for each in ids:
            body = self._bodies.pop(each, None)
            self.in_memory -= len(body or b"")
            if self._disk is not None and (self.durable or body is None):
                self._disk.drop_payload(each)

    def clear(self) -> None:
        """Forget everything."""
        self.drop([*self._bodies])

    @property
    def on_disk(self) -> int:
        """Groups whose bytes are not in memory."""
        return sum(body is None for body in self._bodies.values())

    async def flush(self) -> None:
        """Let the temporary file take what was left for it, so that it does not gather in memory."""
        if self._disk is not None:
            await self._disk.commit()

    def close(self) -> None:
        """Let the temporary file go."""
        if self._disk is not None and self._folder is not None:
            self._disk.close()
            self._folder.cleanup()
