"""What is measured: a bridge with its model and its server. One module for each bridge makes one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from grpo_trainer.bench.sync.figures import Baseline, Publish
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.step import Training
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import BridgeInfo


@dataclass(frozen=True)
class Place:
    """Where a measurement happens.

    Attributes:
        folder: for what is written; it goes when the measurement is over.
        logs: folder of the logs.
        model: folder of the model.
        dtype: of trainer and server.
        server_args: more of the server's arguments.
    """

    folder: Path
    logs: Path
    model: Path
    on_gpu: bool
    dtype: str
    server_args: tuple[str, ...]


@dataclass(frozen=True)
class WeightFigures:
    """The trainer's model.

    Attributes:
        attach_ms: to have it in the server's memory; None: it is not.
        model_gb: its weights in the server's dtype, in units of 1e9 bytes; an adapter is not counted.
        trainer_extra_gb: what loading or attaching it (and making an adapter) took of the GPU; None: there is none.
    """

    attach_ms: float | None
    model_gb: float
    trainer_extra_gb: float | None


@dataclass(frozen=True)
class Facts:
    """What a bridge says of itself.

    Attributes:
        transport: the one really used.
        adapter_mb: what one publish sends, in units of 1e6 bytes.
        proof: the figures of its proof, nats a token.
        own: figures that only this bridge has.
    """

    transport: str | None
    adapter_mb: float | None
    proof: dict[str, float] | None
    weights: WeightFigures
    own: dict[str, Any] = field(default_factory=dict)


class Subject(Protocol):
    """A bridge that is connected and proved.

    Attributes:
        url: of its server.
        written: folder that it writes to.
        base_routing: what a request to the server says to be answered by the base model.
        serves_on: it answers requests while a publish is under way.
    """

    url: str
    info: BridgeInfo
    written: Path
    base_routing: dict[str, Any]
    serves_on: bool

    @property
    def client(self) -> ServerClient: ...

    @property
    def server_pid(self) -> int: ...

    def facts(self) -> Facts: ...

    def warm_up(self) -> None:
        """Do once what only the first publishes do."""
        ...

    def publish(self) -> Publish:
        """Change the weights, publish them as the next version, and see one request answered by that.

        Raises:
            BridgeError: another version answers.
        """
        ...

    def training(self) -> Training:
        """What its trainer trains."""
        ...

    def check(self) -> None:
        """Raise if the server has ended by itself."""
        ...

    def baseline(self, repeat: int) -> Baseline | None:
        """The same by vLLM's own means, if it has any. Comes last: nothing can be published afterwards."""
        ...


Open = Callable[[SyncOptions, Place], AbstractContextManager[Subject]]


def opener(bridge: str) -> Open:
    """What starts the measurement of a bridge."""
    from grpo_trainer.bench.sync import lora_only, restart, shared_vllm

    return {"lora_only": lora_only.opened, "shared_vllm": shared_vllm.opened, "none": restart.opened}[bridge]
