"""Measures `shared_vllm`: a fence around a write of every weight, like an optimizer's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.bench.sync.common import (
    OwnServer,
    check_answers,
    explained_by,
    gpu_used_gb,
    rounded,
    taken_since,
    train_values,
    weighed,
)
from grpo_trainer.bench.sync.figures import Baseline, Publish, median_ms
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.server import server_spec, serving
from grpo_trainer.bench.sync.step import Training
from grpo_trainer.bench.sync.subject import Facts, Place, WeightFigures
from grpo_trainer.config.bridge import SharedVllm
from grpo_trainer.config.options import build
from grpo_trainer.config.rules import checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.metrics.types import reduce
from grpo_trainer.policy import SharedWeights, build_policy
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.shared_weights import SharedBridge
from vllm_server.protocol import InFlight
from vllm_server.protocol.bridge_config import FILE_NAME

log = logging.getLogger(__name__)

WARM_UP = 3


@contextmanager
def opened(options: SyncOptions, place: Place, in_flight: InFlight = "keep") -> Iterator[SharedSubject]:
    """Start the server first, since the trainer uses its memory."""
    config = checked(build(TrainConfig, train_values(options, place, "shared_vllm") | {"in_flight": in_flight}))
    assert isinstance(config.bridge, SharedVllm)
    flags = ["--shared-weights", "--bridge-config-path", str(place.folder / FILE_NAME)]
    spec = server_spec(config, options.server, place, flags, tiny=options.model.shape == "tiny")
    before = gpu_used_gb(options)
    with serving(spec, place) as server, explained_by(server):
        alone = taken_since(before, options)
        client = ServerClient(config.vllm)
        policies: list[SharedWeights] = []

        def attached() -> torch.nn.Module:
            policy = build_policy(config)
            assert isinstance(policy, SharedWeights)
            policies.append(policy)
            return policy.model

        _, weights = weighed(attached, place, attached=True)
        with SharedBridge(config.bridge, policies[0], client, config.model.seq_len) as bridge:
            written = place.folder / "written"
            yield SharedSubject(
                bridge, config, alone, policies[0], client, server, written, weights, config.vllm.url, options.repeat
            )


class SharedSubject(OwnServer):
    """A trainer that only writes its weights.

    It multiplies them by one, which rewrites the same bits. That reads and writes as many bytes as an optimizer's copy
    of new weights from the gradients' memory, without needing that memory.

    Attributes:
        parameters: all parameters, in the server's memory.
        version: version that the server generates with.
    """

    serves_on = True

    def __init__(
        self,
        bridge: SharedBridge,
        config: TrainConfig,
        server_gb: float | None,
        policy: SharedWeights,
        client: ServerClient,
        server: OwnedServer,
        written: Path,
        weights: WeightFigures,
        url: str,
        repeat: int,
    ) -> None:
        self._bridge = bridge
        training = Training(policy.model, config, server_gb, bridge.updating, self._step_written)
        super().__init__(server, training)
        self._weights = weights
        self.parameters = [parameter.detach() for parameter in policy.model.parameters()]
        self._fences: list[dict[str, float]] = []
        self._measured = slice(WARM_UP, WARM_UP + repeat)
        self.client = client
        self.url = url
        self.written = written
        self.base_routing: dict[str, Any] = {}
        self.version = bridge.connect(0)
        self.info = client.wait_until_ready()
        bridge.prove()
        self._proof = rounded(bridge.proved)

    def _step_written(self) -> None:
        self.version += 1
        self._bridge.publish(self.version)

    def facts(self) -> Facts:
        fences = self._fences[self._measured] or self._fences

        def median(name: str) -> float:
            return median_ms([fence[f"publish/{name}"] for fence in fences])

        own = {
            "write": "every weight times one, in place",
            "write_ms": median("write_time"),
            "pause_ms": median("pause_time"),
            "after_write_ms": median("end_time"),
            "stall_beside_write_ms": median_ms(
                [fence["publish/stall_time"] - fence["publish/write_time"] for fence in fences]
            ),
        }
        return Facts(None, None, self._proof, self._weights, own)

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.publish()

    def publish(self) -> Publish:
        """Its parts are the write, the server's own part of the pause, and all that is between."""
        written = self.write(lambda: torch._foreach_mul_(self.parameters, 1.0))  # pyright: ignore[reportPrivateImportUsage]
        check_answers(self.client, self.version)
        return written

    def write(self, change: Callable[[], object]) -> Publish:
        """Change the weights within a fence; unlike `publish`, without a check of the answering version."""
        self.version += 1
        with torch.no_grad(), self._bridge.updating():
            change()
        numbers = reduce(self._bridge.publish(self.version).metrics)
        self._fences.append(numbers)
        return Publish(
            seconds=numbers["train/sync_time"],
            pack_seconds=numbers["publish/write_time"],
            engine_seconds=numbers["publish/pause_time"],
            stall_seconds=numbers["publish/stall_time"],
        )

    def baseline(self, repeat: int) -> Baseline | None:
        return None
