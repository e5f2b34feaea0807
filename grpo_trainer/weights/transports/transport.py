"""The interface of a transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_server.protocol import LoraLoadResponse, Transport


@dataclass(frozen=True)
class Sent:
    """A publish that the server has answered.

    Attributes:
        pack_seconds: time to make the adapter ready to send (in GPU memory, in a file, …).
    """

    answer: LoraLoadResponse
    pack_seconds: float


class AdapterTransport(Protocol):
    """An open connection by which adapters reach the server."""

    name: Transport

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        """Publish the adapter's present values under a name, as `version`.

        Args:
            activate: requests that name no version get this one from now on.

        Raises:
            ServerError: the server does not answer, or refuses the adapter.
        """
        ...

    def close(self) -> None:
        """Free the resources of this transport, here and in the server."""
        ...
