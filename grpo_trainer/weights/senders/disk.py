"""Transport `disk`: safetensors files in a folder that the server sees too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from grpo_trainer.weights.senders.sender import Way
from vllm_server.protocol import DiskSource, WeightTransport
from vllm_server.protocol.file_parts import PartMemory, PartThreads, write_at
from vllm_server.protocol.flat import with_version

WRITING = "writing"
"""Name of the subfolder of a version that is not complete."""


class FolderSender:
    """Writes each version into a subfolder that gets the version's number when it is complete.

    The files are those of the version before, written over: their memory and their place on the disk are there already,
    and the folder never has two versions.
    """

    name: WeightTransport = "disk"
    is_ahead = True

    def __init__(self, way: Way) -> None:
        self._folder = way.folder.absolute()
        self._buckets = way.buckets
        self._threads = PartThreads(next(iter(way.stored.values())).device)
        self._written: int | None = None
        self.source = DiskSource(folder=str(self._folder))

    def join(self) -> None:
        """Remove what a killed trainer has left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        """Write a version; several threads write a bucket each.

        Raises:
            OSError: a file could not be written; with `filename`.
        """
        writing = self._folder / WRITING
        with suppress(FileNotFoundError):  # the first version, or someone has deleted it
            (self._folder / str(self._written)).rename(writing)
        writing.mkdir(parents=True, exist_ok=True)

        @torch.no_grad()
        def write(memory: PartMemory, number: int) -> None:
            header = with_version(self._buckets.headers[number], version)
            self._write(memory, number, header, stored, writing / f"{number}.safetensors")

        self._threads.each(write, range(len(self._buckets)))
        writing.rename(self._folder / str(version))
        self._written = version

    def _write(self, memory: PartMemory, number: int, header: bytes, stored: Mapping[str, Tensor], path: Path) -> None:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                write_at(file, header, 0)
                for span, part in self._buckets.parts(number, stored):
                    memory.write(file, len(header) + span.start, part, self._buckets.dtype)
            finally:
                os.close(file)
        except OSError as error:
            error.filename = str(path)
            raise

    def close(self) -> None:
        """Delete the files: the server has its own copy of what it serves."""
        self._threads.close()
        shutil.rmtree(self._folder, ignore_errors=True)
