"""Source `gloo`: the trainer broadcasts each bucket to all workers, from main memory to main memory."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_server.protocol import GlooSource
from vllm_server.protocol.gloo import GlooGroup

BUCKET_SECONDS = 60.0
"""Time limit of a broadcast: then the trainer is presumed dead."""


class GlooReceiver:
    """One rank of the group: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        RuntimeError: the group could not be formed in time.
    """

    def __init__(self, source: GlooSource, worker_rank: int) -> None:
        self._group = GlooGroup(source.host, source.port, 1 + worker_rank, source.world_size, BUCKET_SECONDS)

    def fill(self, number: int, buffer_E: Tensor) -> None:
        """Receive a bucket into a buffer on any device. Buckets come in order.

        Raises:
            RuntimeError: it did not arrive in time; the group is unusable then.
        """
        here_E = buffer_E if buffer_E.device.type == "cpu" else torch.empty_like(buffer_E, device="cpu")
        self._group.broadcast(here_E.view(torch.uint8))
        if here_E is not buffer_E:
            buffer_E.copy_(here_E)
