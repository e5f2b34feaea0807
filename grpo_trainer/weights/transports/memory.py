"""Transport `memory`: the adapter is the body of an HTTP request. No files; the server may be on another host."""

from __future__ import annotations

import time

from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.packed import HostCopy, PackedAdapter
from grpo_trainer.weights.transports.transport import Sent
from vllm_server.protocol import LoraLoadRequest, Transport


class Memory:
    """Sends the bytes of a safetensors file over HTTP."""

    name: Transport = "memory"

    def __init__(self, packed: PackedAdapter, server: ServerClient) -> None:
        self._host = HostCopy(packed)
        self._server = server

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        started = time.perf_counter()
        body = self._host.take()
        packed = time.perf_counter() - started
        request = LoraLoadRequest(adapter_name=name, version=version, activate=activate)
        return Sent(self._server.load_adapter(request, body), packed)

    def close(self) -> None:
        """Do nothing: this transport holds no resources."""
