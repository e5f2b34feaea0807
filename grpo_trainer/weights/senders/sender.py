"""What every way to a server has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from grpo_trainer.errors import BridgeError
from grpo_trainer.weights.buckets import Buckets
from vllm_server.protocol import BridgeInfo, WeightTransport
from vllm_server.protocol.weights import Source


@dataclass(frozen=True)
class Way:
    """What senders are made from.

    Attributes:
        url: the server's.
        info: what the server says of itself.
        folder: for files; of this server alone.
        buckets: how the weights travel.
        stored: the weights.
    """

    url: str
    info: BridgeInfo
    folder: Path
    buckets: Buckets
    stored: Mapping[str, Tensor]


class WeightSender(Protocol):
    """One way to one server.

    Attributes:
        source: where the server takes the weights from.
        is_ahead: whether a version is complete before the server is asked to take it; else it is sent meanwhile.
    """

    name: WeightTransport
    is_ahead: bool

    @property
    def source(self) -> Source: ...

    def join(self) -> None:
        """Meet the server's workers, which are opening the channel at the same time."""
        ...

    def send(self, version: int, stored: Mapping[str, Tensor]) -> None:
        """Send the present weights, which are those of `version`."""
        ...

    def close(self) -> None: ...


def failed(
    summary: str,
    transport: WeightTransport,
    error: Exception,
    fix: str = "see the server's log; --resume auto continues",
) -> BridgeError:
    """Return the error of a transport that failed."""
    return BridgeError(
        summary,
        field="--broadcast-transport",
        got=f"{transport}: {str(error).strip().partition(chr(10))[0]}",
        fix=fix,
    )
