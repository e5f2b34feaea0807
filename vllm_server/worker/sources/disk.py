"""Source `disk`: each bucket is a safetensors file in a folder that trainer and server see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_server.protocol import DiskSource
from vllm_server.protocol.file_parts import PART_BYTES, PartMemory, PartThreads
from vllm_server.protocol.flat import decode_header, read_header, with_version


class FolderReader:
    """Reads the buckets of a version from its subfolder of `DiskSource.folder`.

    Args:
        headers: the agreed header of each bucket. Another one in a file means that the file is another trainer's, or of
            another version: a network disk may show a file's old content.
        device: where the buffers are.
    """

    def __init__(self, source: DiskSource, headers: Sequence[bytes], device: torch.device) -> None:
        self._folder = Path(source.folder)
        self._headers = headers
        self._threads = PartThreads(device)

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Read a bucket into a buffer; some threads copy parts to a GPU while others read.

        Raises:
            ValueError: the file is not what was agreed, or ends early.
            OSError: it can't be read.
        """
        path = self._folder / str(version) / f"{number}.safetensors"
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise ValueError(f"{path}: no regular file")
        if buffer_E.device.type == "cuda":
            torch.cuda.current_stream(buffer_E.device).synchronize()  # it may still copy the buffer's last content
        data_B = buffer_E.view(torch.uint8)
        wanted = decode_header(with_version(self._headers[number], version))
        with path.open("rb") as file:
            found = decode_header(read_header(file))
            if (found.spans, found.metadata) != (wanted.spans, wanted.metadata):
                raise ValueError(f"{path}: another version, or other tensors than the channel was opened with")
            begin, handle = found.size, file.fileno()

            def read(memory: PartMemory, start: int) -> None:
                memory.read(handle, begin + start, data_B[start : start + PART_BYTES])

            try:
                self._threads.each(read, range(0, len(data_B), PART_BYTES))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error

    def close(self) -> None:
        self._threads.close()
