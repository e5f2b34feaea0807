"""Transport `gloo`: a broadcast over the network, from the trainer's main memory to every worker's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo_trainer.launch.places import LOOPBACK
from grpo_trainer.weights.senders.sender import Way, failed
from vllm_server.protocol import GlooSource, WeightTransport
from vllm_server.protocol.gloo import GlooGroup, address_towards, make_store


class GlooSender:
    """Rank 0 of a Gloo group with the server's workers."""

    name: WeightTransport = "gloo"
    is_ahead = False

    def __init__(self, way: Way) -> None:
        at, workers = urlsplit(way.url), len(way.info.workers)
        host = address_towards(at.hostname, at.port) if at.hostname and at.port else LOOPBACK
        self._buckets = way.buckets
        self._store = make_store(host, 1 + workers)
        self.source = GlooSource(host=host, port=self._store.port, world_size=1 + workers)
        self._group: GlooGroup | None = None

    @cached_property
    def _buffer_E(self) -> Tensor:
        on_gpu = torch.cuda.is_available()  # page-locked memory is several times faster to copy into
        return torch.empty(self._buckets.largest, dtype=self._buckets.dtype, pin_memory=on_gpu)

    def join(self) -> None:
        asked = self.source
        try:
            self._group = GlooGroup(asked.host, asked.port, 0, asked.world_size, self._store)
        except RuntimeError as error:
            raise failed("the server's workers did not join", self.name, error) from error

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        assert self._group is not None, "join comes first"
        for number in range(len(self._buckets)):
            bucket_E = self._buckets.pack(number, stored, self._buffer_E)
            try:
                self._group.broadcast(bucket_E.view(torch.uint8))
            except RuntimeError as error:
                summary = "a worker of the server has ended, or did not receive in time"
                raise failed(summary, self.name, error) from error

    def close(self) -> None:
        self._group = None
