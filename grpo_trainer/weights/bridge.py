"""What every weight bridge is to the loop, and the one place that chooses one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from peft import PeftModel

from grpo_trainer.config import TrainConfig, require_available
from grpo_trainer.metrics.types import Metrics


@dataclass(frozen=True)
class Published:
    """A policy version that the server has answered to generate with from now on."""

    version: int
    name: str
    metrics: Metrics


class WeightBridge(Protocol):
    """Keeps one inference server on the trainer's weights. A context manager: leaving it frees what it holds."""

    def __enter__(self) -> WeightBridge: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def connect(self, policy_version: int) -> int:
        """Wait for the server, check that it can take this bridge, and agree on where versions start.

        Args:
            policy_version: the version of the weights that the trainer holds, by its own count.

        Returns:
            That version, or a higher one when the server has seen it before.
        """
        ...

    def prove(self) -> None:
        """Show that the server generates with what is published and with nothing else.

        Raises:
            BridgeError: it does not.
        """
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Held while the trainer's weights change; a bridge that shares memory fences the server here."""
        ...

    def publish(self, version: int) -> Published:
        """Make the server generate with the trainer's weights, as `version`."""
        ...


def build_bridge(config: TrainConfig, model: PeftModel, check_stop: Callable[[], None]) -> WeightBridge:
    """The bridge that `--weight-bridge-mode` names.

    Raises:
        NotAvailableError: it is not in this version.
    """
    from grpo_trainer.server_client import ServerClient
    from grpo_trainer.weights.lora_swap import LoraSwap

    bridge = require_available(config.bridge)
    root = bridge.lora_root or Path(config.log_dir) / "adapters"
    return LoraSwap(bridge, model, ServerClient(config.vllm, check_stop), root.absolute(), config.model.seq_len)
