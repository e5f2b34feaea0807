"""Bodies of requests in files in memory, which the engine's processes can read without a copy by way of the engine."""

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from vllm_server.adapters import WEIGHTS_FILE
from vllm_server.errors import ServeError

FIRST_BYTES = 1 << 20
TRUSTED_BYTES = 8 << 30  # a promise of more is not reserved: the file grows with what really comes


class MemoryFile:
    """A file that has no name and no disk; other processes of the same user open it by `path`."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("adapter")
        os.ftruncate(self._descriptor, FIRST_BYTES)
        self._mapped = mmap.mmap(self._descriptor, FIRST_BYTES)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reserve(self, nbytes: int) -> None:
        """Make it so long; what is in it stays, as far as it reaches."""
        if nbytes != len(self._mapped):
            self._mapped.resize(nbytes)

    def write(self, offset: int, piece: bytes) -> None:
        """Write, growing if need be."""
        if offset + len(piece) > len(self._mapped):
            self.reserve(max(offset + len(piece), 2 * len(self._mapped)))
        self._mapped[offset : offset + len(piece)] = piece

    def close(self) -> None:
        """Let go of it; who has it open keeps it."""
        self._mapped.close()
        os.close(self._descriptor)


@dataclass
class Bodies:
    """Files for bodies. The last one is kept for the next body: new pages cost more than the copy into them."""

    _idle: list[MemoryFile] = field(default_factory=list)

    @asynccontextmanager
    async def holding(self, pieces: AsyncIterator[bytes], nbytes: int | None) -> AsyncIterator[str]:
        """The path of a file with exactly these bytes, until the block is left.

        Args:
            nbytes: how many there will be, if that is known.

        Raises:
            ServeError: 422, there were none.
        """
        file = self._idle.pop() if self._idle else MemoryFile()
        try:
            if nbytes and nbytes <= TRUSTED_BYTES:
                file.reserve(nbytes)
            end = 0
            async for piece in pieces:
                file.write(end, piece)
                end += len(piece)
            if not end:
                raise ServeError(422, WEIGHTS_FILE, got="0 bytes", wanted="a whole safetensors file", fix="send it")
            file.reserve(end)  # nothing of an earlier, longer body behind it
            yield file.path
        finally:
            if self._idle:
                file.close()
            else:
                self._idle.append(file)
