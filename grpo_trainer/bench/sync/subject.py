"""The subject of a measurement: a bridge with its model and its server. Each bridge has a module that builds one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from grpo_trainer.bench.sync.figures import Baseline, Publish
from grpo_trainer.bench.sync.step import Training
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import BridgeInfo


@dataclass(frozen=True)
class Place:
    """The folders and settings of a measurement.

    Attributes:
        folder: folder for all written files, which is deleted after the measurement.
        logs: folder of the logs.
        model: folder of the model.
        dtype: dtype of trainer and server.
        server_args: additional arguments of the server.
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
        attach_ms: time to attach it to the server's memory; None: it is not attached.
        model_gb: its weights in the server's dtype, in units of 1e9 bytes, without an adapter.
        trainer_extra_gb: GPU memory for loading or attaching it (and for an adapter); None: there is no GPU.
    """

    attach_ms: float | None
    model_gb: float
    trainer_extra_gb: float | None


@dataclass(frozen=True)
class Facts:
    """A bridge's own figures.

    Attributes:
        transport: the transport in use.
        adapter_mb: size of one publish, in units of 1e6 bytes.
        proof: the figures of its proof, in nats a token.
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
        url: address of its server.
        written: folder that it writes to.
        base_routing: fields by which a request selects the base model.
        serves_on: the server answers requests during a publish.
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
        """Run the first publishes, which do additional work."""
        ...

    def publish(self) -> Publish:
        """Change the weights, publish them as the next version, and check that it answers a request.

        Raises:
            BridgeError: another version answers.
        """
        ...

    def training(self) -> Training:
        """Return the trained model of its trainer."""
        ...

    def check(self) -> None:
        """Raise an error if the server has ended by itself."""
        ...

    def baseline(self, repeat: int) -> Baseline | None:
        """Publish by vLLM's own means, if it has any. Call this last: nothing can be published afterwards."""
        ...
