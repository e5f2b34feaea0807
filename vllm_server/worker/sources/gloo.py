"""Source `gloo`: the trainer broadcasts each bucket to all workers, from main memory to main memory."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_server.protocol import GlooSource
from vllm_server.protocol.gloo import GlooGroup


class GlooReceiver:
    """One rank of the group: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        RuntimeError: the group could not be formed in time.
    """

    def __init__(self, source: GlooSource, worker_rank: int) -> None:
        self._group = GlooGroup(source.host, source.port, 1 + worker_rank, source.world_size)

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Receive a bucket into a buffer on any device, by way of main memory. Buckets come in order.

        Raises:
            RuntimeError: it did not arrive in time; the group is unusable then.
        """
        here_E = buffer_E if buffer_E.device.type == "cpu" else torch.empty_like(buffer_E, device="cpu")
        self._group.broadcast(here_E.view(torch.uint8))
        if here_E is not buffer_E:
            buffer_E.copy_(here_E)

    def close(self) -> None:
        """Do nothing: the group ends with its last reference."""
