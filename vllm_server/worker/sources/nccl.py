"""Source `nccl`: the trainer broadcasts each bucket to all workers, from GPU memory to GPU memory."""

from __future__ import annotations

from base64 import b64decode

import torch
from torch import Tensor

from vllm_server.protocol.nccl import Communicator
from vllm_server.protocol.weights import NcclSource


class NcclReceiver:
    """One rank of the communicator: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        NcclError: the communicator could not be created, or the ranks could not connect, in time.
    """

    def __init__(self, source: NcclSource, device: torch.device, worker_rank: int) -> None:
        self._communicator = Communicator(b64decode(source.unique_id), 1 + worker_rank, source.world_size)
        self._receive(torch.empty(1, dtype=torch.uint8, device=device))  # the first broadcast connects the ranks

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Receive a bucket into a buffer on the GPU, on the current stream. Buckets come in order.

        Raises:
            NcclError: it did not arrive in time; the communicator is unusable then.
        """
        self._receive(buffer_E)

    def _receive(self, buffer_E: Tensor) -> None:
        stream = torch.cuda.current_stream(buffer_E.device)
        self._communicator.broadcast(buffer_E.data_ptr(), buffer_E.nbytes, root=0, stream=stream.cuda_stream)
        self._communicator.wait(stream.query)

    def close(self) -> None:
        """Leave the communicator. A bucket that is being received ends in an error."""
        self._communicator.close()
