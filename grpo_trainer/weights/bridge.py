"""The interface of a weight bridge."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

from grpo_trainer.metrics.types import Metric, Metrics, Sum


@dataclass(frozen=True)
class Published:
    """The policy version that the server generates with from now on, as the server has confirmed."""

    version: int
    name: str
    metrics: Metrics


def quiet(version: int) -> dict[str, Metric]:
    """Return the metrics of a publish that had nothing to do."""
    return {"train/sync_time": Sum(0.0), "publish/version": Sum(version)}


class WeightBridge(Protocol):
    """Keeps one inference server on the trainer's weights. A context manager: its exit frees the bridge's resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the bridge's resources."""
        ...

    def connect(self, policy_version: int) -> int:
        """Wait for the server, check that it supports this bridge, and agree on the first version.

        Args:
            policy_version: the version of the trainer's weights, by the trainer's own count.

        Returns:
            That version, or a higher one if the server has served that version before.
        """
        ...

    def prove(self) -> float | None:
        """Prove that the server generates with the published weights and with no others.

        Returns:
            Mean |server - trainer| on the present weights, in nats a token; None: not measured.

        Raises:
            BridgeError: the server generates with other weights.
        """
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Return the context in which the trainer's weights change; a bridge that shares memory fences the server.

        The next published version is one higher than the last.
        """
        return nullcontext()  # the server has its own copy

    def publish(self, version: int) -> Published:
        """Make the server generate with the trainer's weights as `version`, if this bridge updates at this version.

        After a skipped step the version is the same as before, and there is nothing to do.

        Returns:
            The version that the server generates with: `version` or an older one.
        """
        ...

    def welcome(self) -> None:
        """Bring servers that have joined to the newest version; called while the trainer waits for a batch.

        Do nothing if this bridge's servers stay the same.
        """
