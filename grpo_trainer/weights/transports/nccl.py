"""Transport `nccl`: one broadcast from the trainer's GPU to every worker of the server, on other GPUs or hosts."""

from __future__ import annotations

import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import torch

from grpo_trainer.errors import BridgeError
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.gpus import gpu_uuid
from grpo_trainer.weights.packed import PackedAdapter
from grpo_trainer.weights.transports.transport import Sent
from vllm_server.protocol import LoraLoadRequest, NcclChannel, Transport
from vllm_server.protocol.nccl import Communicator, NcclError, unique_id

RECEIVED_SECONDS = 1.0
"""Time for a broadcast to finish after the server's answer, if its workers took part."""


class Nccl:
    """Rank 0 of a communicator with the server's workers.

    Args:
        world_size: number of ranks: the trainer and all workers.

    Raises:
        ServerError: the server's workers could not join.
        NcclError: this process could not join.
    """

    name: Transport = "nccl"

    def __init__(self, packed: PackedAdapter, server: ServerClient, world_size: int) -> None:
        self._packed = packed
        self._server = server
        identity = unique_id()
        request = NcclChannel(
            unique_id=b64encode(identity).decode(),
            world_size=world_size,
            gpu_uuid=gpu_uuid(packed.buffer_E.device),
            nbytes=packed.nbytes,
            header=b64encode(packed.header).decode(),
            adapter_config=packed.settings,
        )
        with ThreadPoolExecutor(1) as pool:  # both sides must join at the same time, so the request runs in a thread
            answer = pool.submit(server.open_channel, request)

            def refused() -> None:
                if answer.done():
                    answer.result()

            self._communicator = Communicator(identity, 0, world_size, refused)
            self._broadcast()
            self._communicator.wait(self._stream.query, refused)
            self._channel = answer.result()

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._packed.buffer_E.device)

    def _broadcast(self) -> None:
        """Enqueue the broadcast, which starts when the workers receive."""
        pointer = self._packed.pack().data_ptr()
        self._communicator.broadcast(pointer, self._packed.nbytes, root=0, stream=self._stream.cuda_stream)

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        started = time.perf_counter()
        try:
            self._broadcast()
            packed = time.perf_counter() - started
            request = LoraLoadRequest(channel=self._channel, adapter_name=name, version=version, activate=activate)
            answer = self._server.load_adapter(request)
            self._communicator.wait(self._stream.query)
        except NcclError as error:
            raise BridgeError(f"publishing {name}: {error}", field="--lora-transport", got="nccl") from error
        except BaseException:
            self._abort_unless_received()
            raise
        return Sent(answer, packed)

    def _abort_unless_received(self) -> None:
        """Keep the communicator after a refusal if the workers have received; else the broadcast would never finish."""
        deadline = time.monotonic() + RECEIVED_SECONDS
        while not self._stream.query():
            if time.monotonic() > deadline:
                self._communicator.abort()
                return
            time.sleep(0.001)

    def close(self) -> None:
        try:
            self._server.close_channel(self._channel)
        finally:
            self._communicator.close()
