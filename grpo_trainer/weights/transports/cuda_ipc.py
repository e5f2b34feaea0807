"""Transport `cuda_ipc`: the server maps the trainer's buffer and copies GPU memory to GPU memory, on one machine."""

from __future__ import annotations

import time
from base64 import b64encode

import torch

from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.gpus import gpu_uuid, handle_of
from grpo_trainer.weights.packed import PackedAdapter
from grpo_trainer.weights.transports.transport import Sent
from vllm_server.protocol import CudaIpcChannel, LoraLoadRequest, Transport


class CudaIpc:
    """Sends the server a handle of the packed buffer, which the server keeps mapped.

    Raises:
        ServerError: the server can't map it.
    """

    name: Transport = "cuda_ipc"

    def __init__(self, packed: PackedAdapter, server: ServerClient) -> None:
        self._packed = packed
        self._server = server
        request = CudaIpcChannel(
            gpu_uuid=gpu_uuid(packed.buffer_E.device),
            handle=handle_of(packed.buffer_E.untyped_storage()),
            nbytes=packed.nbytes,
            header=b64encode(packed.header).decode(),
            adapter_config=packed.settings,
        )
        self._channel = server.open_channel(request)

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        started = time.perf_counter()
        device = self._packed.pack().device
        torch.cuda.current_stream(device).synchronize()  # the server's process can't wait for our stream
        packed = time.perf_counter() - started
        request = LoraLoadRequest(channel=self._channel, adapter_name=name, version=version, activate=activate)
        return Sent(self._server.load_adapter(request), packed)

    def close(self) -> None:
        self._server.close_channel(self._channel)
