"""Transport `nccl`: the trainer broadcasts its packed adapter to every worker, over NVLink, PCIe or the network."""

from __future__ import annotations

from base64 import b64decode

import torch

from vllm_server.protocol import NcclChannel
from vllm_server.protocol.nccl import Communicator
from vllm_server.worker.packed import PackedAdapter, layout_of


class NcclReceiver:
    """One rank of the communicator: 1 + the worker's rank, since the trainer is rank 0.

    Raises:
        NcclError: the communicator could not be created in time.
    """

    def __init__(self, channel: NcclChannel, settings: str, device: torch.device, worker_rank: int) -> None:
        self._layout = layout_of(b64decode(channel.header), settings)
        self._buffer_E = torch.empty(self._layout.numel, dtype=self._layout.dtype, device=device)
        self._communicator = Communicator(b64decode(channel.unique_id), 1 + worker_rank, channel.world_size)
        self._receive()  # the first broadcast connects the ranks, and takes longest

    def receive(self) -> PackedAdapter:
        """Return the adapter that the trainer broadcasts now.

        Raises:
            NcclError: it did not arrive in time; the communicator is unusable then.
        """
        self._receive()
        return PackedAdapter(self._layout, self._buffer_E, lasting=True)

    def _receive(self) -> None:
        stream = torch.cuda.current_stream()
        nbytes = self._buffer_E.numel() * self._buffer_E.element_size()
        self._communicator.broadcast(self._buffer_E.data_ptr(), nbytes, root=0, stream=stream.cuda_stream)
        self._communicator.wait(stream.query)

    def close(self) -> None:
        """Leave the communicator."""
        self._communicator.close()
