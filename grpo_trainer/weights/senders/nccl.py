"""Transport `nccl`: a broadcast from the trainer's GPU to every worker of the server, on other GPUs or machines."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_trainer.weights.senders.sender import Way, failed
from vllm_server.protocol import NcclSource, WeightTransport
from vllm_server.protocol.nccl import Communicator, NcclError, unique_id


class NcclSender:
    """Rank 0 of a communicator with the server's workers.

    Weights that are sharded over processes arrive in rank 0's main memory, and go to its GPU bucket by bucket.

    Raises:
        NcclError: this process has no NCCL.
    """

    name: WeightTransport = "nccl"
    is_ahead = False

    def __init__(self, way: Way) -> None:
        self._buckets = way.buckets
        self._device = next(iter(way.stored.values())).device
        self._stream = torch.cuda.Stream(self._device)  # a slow server must not hold up what others are sent
        self._identity = unique_id()
        encoded = b64encode(self._identity).decode()
        self.source = NcclSource(unique_id=encoded, world_size=1 + len(way.info.workers))
        self._communicator: Communicator | None = None

    def join(self) -> None:
        """Create the communicator, and connect the ranks by a first broadcast, while another transport can be tried."""
        with torch.cuda.stream(self._stream):  # a thread starts on the first GPU
            try:
                self._communicator = Communicator(self._identity, 0, self.source.world_size)
                first = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self._communicator.broadcast(first.data_ptr(), 1, root=0, stream=self._stream.cuda_stream)
                self._communicator.wait(self._stream.query)
            except NcclError as error:
                fix = "set NCCL_DEBUG=INFO to see why, or use --broadcast-transport gloo"
                raise failed("the server's workers did not join", self.name, error, fix) from error

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        assert self._communicator is not None, "join comes first"
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))  # the optimizer's
            try:
                self._broadcast_all(self._communicator, stored)
            except NcclError as error:
                summary = "a worker of the server has ended, or did not receive in time"
                raise failed(summary, self.name, error) from error
            except BaseException:
                self._communicator.abort()  # the workers wait for buckets that will not come
                raise

    def _broadcast_all(self, communicator: Communicator, stored: Mapping[str, Tensor]) -> None:
        """Enqueue each bucket while the one before is sent: its packing, into the same memory, and its broadcast.

        Packing from main memory waits for the stream without a limit, so the bucket before is waited for first.
        """
        buckets, stream = self._buckets, self._stream
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):  # so that training can use the memory again
            buffer_E = torch.empty(buckets.largest, dtype=buckets.dtype, device=self._device)
        buffer_E.record_stream(stream)
        before, gathered = None, next(iter(stored.values())).device.type == "cpu"
        for number in range(len(buckets)):
            if gathered and before is not None:
                communicator.wait(before.query)
            bucket_E = buckets.pack(number, stored, buffer_E)
            communicator.broadcast(bucket_E.data_ptr(), bucket_E.nbytes, root=0, stream=stream.cuda_stream)
            if before is not None:
                communicator.wait(before.query)  # its time limit is that of one bucket
            before = stream.record_event()
        communicator.wait(stream.query)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
