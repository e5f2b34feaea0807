"""The ways all weights reach a server: one class for each `--broadcast-transport`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo_trainer.errors import BridgeError
from grpo_trainer.files import write_bytes
from vllm_server.protocol import DiskSource, GlooSource, WeightTransport
from vllm_server.protocol.gloo import GlooGroup, address_towards, make_store

BUCKET_SECONDS = 60.0
"""Time limit of a broadcast: then a worker is presumed dead."""

LOOPBACK = "127.0.0.1"


class WeightSender(Protocol):
    """One way to one server.

    Attributes:
        source: what the server is told: where the weights come from.
        is_ahead: whether a version is complete before the server is asked to take it; else it is sent meanwhile.
    """

    name: WeightTransport
    source: GlooSource | DiskSource
    is_ahead: bool

    def join(self) -> None:
        """Meet the server's workers, which are opening the channel at the same time."""
        ...

    def send(self, buckets: Iterator[Tensor]) -> None:
        """Send a version's buckets, each a flat tensor in main memory that is valid until the next is asked for."""
        ...

    def close(self) -> None: ...


class GlooSender:
    """Rank 0 of a Gloo group with the server's workers.

    Args:
        url: the server's.
        workers: number of its workers.
    """

    name: WeightTransport = "gloo"
    is_ahead = False

    def __init__(self, url: str, workers: int) -> None:
        at = urlsplit(url)
        host = address_towards(at.hostname, at.port) if at.hostname and at.port else LOOPBACK
        self._store = make_store(host, 1 + workers)
        self.source = GlooSource(host=host, port=self._store.port, world_size=1 + workers)
        self._group: GlooGroup | None = None

    def join(self) -> None:
        asked = self.source
        try:
            self._group = GlooGroup(asked.host, asked.port, 0, asked.world_size, BUCKET_SECONDS, self._store)
        except RuntimeError as error:
            raise _failed("the server's workers did not join", self.name, error) from error

    def send(self, buckets: Iterator[Tensor]) -> None:
        assert self._group is not None, "join comes first"
        try:
            for bucket_E in buckets:
                self._group.broadcast(bucket_E.view(torch.uint8))
        except RuntimeError as error:
            raise _failed("a worker of the server has ended, or did not receive in time", self.name, error) from error

    def close(self) -> None:
        self._group = None


class FolderSender:
    """Writes each version into a folder that the server sees, over the one before.

    Args:
        folder: of this sender alone.
        headers: of the buckets' files.
    """

    name: WeightTransport = "disk"
    is_ahead = True

    def __init__(self, folder: Path, headers: list[bytes]) -> None:
        self._folder = folder.absolute()
        self._headers = headers
        self.source = DiskSource(folder=str(self._folder))

    def join(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def send(self, buckets: Iterator[Tensor]) -> None:
        self.join()  # someone may have deleted it
        for number, bucket_E in enumerate(buckets):
            data = bucket_E.view(torch.uint8).numpy().tobytes()
            write_bytes(self._folder / f"{number}.safetensors", self._headers[number] + data)

    def close(self) -> None:
        """Delete the files: the server has its own copy of what it serves."""
        shutil.rmtree(self._folder, ignore_errors=True)


SENDERS: dict[WeightTransport, Callable[[str, int, Path, list[bytes]], WeightSender]] = {
    "gloo": lambda url, workers, folder, headers: GlooSender(url, workers),
    "disk": lambda url, workers, folder, headers: FolderSender(folder, headers),
}
"""The first is `auto`. Each takes the server's URL, the number of its workers, a folder, and the buckets' headers."""


def _failed(summary: str, transport: WeightTransport, error: Exception) -> BridgeError:
    return BridgeError(
        summary,
        field="--broadcast-transport",
        got=f"{transport}: {str(error).strip().partition(chr(10))[0]}",
        fix="see the server's log; --resume auto continues",
    )
