"""Keep request bodies in memory files, which the engine's processes read without another copy."""

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from vllm_server.adapters import WEIGHTS_FILE
from vllm_server.errors import ServeError

FIRST_BYTES = 1 << 20
TRUSTED_BYTES = 8 << 30  # a larger Content-Length is not reserved in advance: the file grows with the bytes received


class MemoryFile:
    """A file without a name and not on disk; other processes of the same user open it by `path`."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("adapter")
        os.ftruncate(self._descriptor, FIRST_BYTES)
        self._mapped = mmap.mmap(self._descriptor, FIRST_BYTES)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reserve(self, nbytes: int) -> None:
        """Resize the file to `nbytes`; keep its content up to that length."""
        if nbytes != len(self._mapped):
            self._mapped.resize(nbytes)

    def write(self, offset: int, piece: bytes) -> None:
        """Write `piece` at `offset`; grow the file if needed."""
        if offset + len(piece) > len(self._mapped):
            self.reserve(max(offset + len(piece), 2 * len(self._mapped)))
        self._mapped[offset : offset + len(piece)] = piece

    def close(self) -> None:
        """Close the file; processes that have it open can still read it."""
        self._mapped.close()
        os.close(self._descriptor)


@dataclass
class Bodies:
    """Files for bodies. The last file is reused: allocating new pages costs more than copying the body into them."""

    _idle: list[MemoryFile] = field(default_factory=list)

    @asynccontextmanager
    async def holding(self, pieces: AsyncIterator[bytes], nbytes: int | None) -> AsyncIterator[str]:
        """Yield the path of a file that has exactly these bytes while the block runs.

        Args:
            nbytes: the expected number of bytes, if known.

        Raises:
            ServeError: 422, the body is empty.
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
            file.reserve(end)  # drop the rest of an earlier, longer body
            yield file.path
        finally:
            if self._idle:
                file.close()
            else:
                self._idle.append(file)
