"""Source `disk`: each bucket is a safetensors file in a folder that trainer and server see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_server.protocol import DiskSource
from vllm_server.protocol.flat import read_header
from vllm_server.worker.sources.main_memory import in_main_memory


class FolderReader:
    """Reads the buckets of `DiskSource.folder`.

    Args:
        headers: the agreed header of each bucket. Another one in a file means that the file is another version's or
            another trainer's.
    """

    def __init__(self, source: DiskSource, headers: Sequence[bytes]) -> None:
        self._folder = Path(source.folder)
        self._headers = headers

    def fill(self, number: int, buffer_E: Tensor) -> None:
        """Read a bucket into a buffer on any device.

        Raises:
            ValueError: the file is not what was agreed, or ends early.
            OSError: it can't be read.
        """
        path = self._folder / f"{number}.safetensors"
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise ValueError(f"{path}: no regular file")
        with in_main_memory(buffer_E) as here_E, path.open("rb") as file:
            memory = here_E.view(torch.uint8).numpy().data
            if read_header(file) != self._headers[number]:
                raise ValueError(f"{path}: other tensors than the channel was opened with")
            done = 0
            while done < len(memory):
                count = file.readinto(memory[done:])  # pyright: ignore[reportAttributeAccessIssue]
                if not count:
                    raise ValueError(f"{path}: ends after {done} of {len(memory)} bytes of data")
                done += count
