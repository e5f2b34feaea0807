"""Measures `none`: each publish writes a checkpoint of all weights and restarts the server on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.alignment.model_proof import ModelProof
from grpo_trainer.bench.sync.common import (
    OwnServer,
    check_answers,
    gpu_used_gb,
    taken_since,
    train_values,
    weighed,
)
from grpo_trainer.bench.sync.figures import Baseline, Publish
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.server import server_spec
from grpo_trainer.bench.sync.step import Training
from grpo_trainer.bench.sync.subject import Facts, Place, WeightFigures
from grpo_trainer.config.bridge import CheckpointRestart
from grpo_trainer.config.checkpoints import CheckpointConfig
from grpo_trainer.config.options import build
from grpo_trainer.config.rules import checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import load_all_weights
from grpo_trainer.optim import build_optimizer
from grpo_trainer.policy import AllWeights, load_tokenizer
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights import checkpoint_restart
from grpo_trainer.weights.checkpoint_restart import CheckpointModels

log = logging.getLogger(__name__)

NO_LAST_VERSION = -1


@contextmanager
def opened(options: SyncOptions, place: Place) -> Iterator[RestartSubject]:
    """The trainer's model is in fp32, as in training; its optimizer has no states yet."""
    config = checked(build(TrainConfig, {**train_values(options, place, "none"), "vllm_restart_interval": 1}))
    assert isinstance(config.bridge, CheckpointRestart)
    model, weights = weighed(lambda: load_all_weights(config.model), place, attached=False)
    written = place.folder / "written"
    policy = AllWeights(model, load_tokenizer(config.model), getattr(torch, place.dtype))
    optimizer = build_optimizer(list(model.parameters()), config.optimizer)
    checkpoints = Checkpoints(CheckpointConfig(save_path=written, keep_checkpoints=1), policy, optimizer)

    def launch(path: str, version: int) -> ProcessSpec:
        flags = ["--policy-version", str(version)]
        there = Place(place.folder, place.logs, Path(path), place.on_gpu, place.dtype, place.server_args)
        return server_spec(config, options.server, there, flags, tiny=options.model.shape == "tiny")

    server = OwnedServer(launch, place.logs / "server.log", place.folder / "served")
    client = ServerClient(config.vllm)
    proof = ModelProof(model, client, place.dtype) if config.bridge.proof else None
    models = CheckpointModels(config.model.name, checkpoints)
    launched = [checkpoint_restart.Launched(server, client, proof)]
    with checkpoint_restart.CheckpointRestart(
        config.bridge, models, launched, config.model.seq_len, NO_LAST_VERSION
    ) as bridge:
        if place.on_gpu:
            torch.cuda.empty_cache()  # a launch does: what the loading has left is none of the server's
        before = gpu_used_gb(options)
        bridge.connect(0)
        training = Training(model, config, taken_since(before, options))
        yield RestartSubject(bridge, training, client, server, written, weights, config.vllm.url)


class RestartSubject(OwnServer):
    """A trainer that only publishes, by a connected bridge. During a publish the server answers no requests."""

    serves_on = False

    def __init__(
        self,
        bridge: checkpoint_restart.CheckpointRestart,
        training: Training,
        client: ServerClient,
        server: OwnedServer,
        written: Path,
        weights: WeightFigures,
        url: str,
    ) -> None:
        self._bridge = bridge
        super().__init__(server, training)
        self._weights = weights
        self.client = client
        self.url = url
        self.written = written
        self.base_routing: dict[str, Any] = {}
        self._version = 0
        self.info = client.wait_until_ready()
        noise = bridge.prove()
        self._proof = None if noise is None else {"noise": float(f"{noise:.3g}")}

    def facts(self) -> Facts:
        return Facts(None, None, self._proof, self._weights)

    def warm_up(self) -> None:
        """The first launch has compiled what there is to compile."""

    def publish(self) -> Publish:
        """Its parts are the checkpoint, the old server's end and the new one's start, and the proof."""
        self._version += 1
        started = time.perf_counter()
        published = self._bridge.publish(self._version)
        seconds = time.perf_counter() - started
        check_answers(self.client, self._version)
        numbers = reduce(published.metrics)
        away = numbers["publish/stop_time"] + numbers["publish/start_time"]
        return Publish(seconds, numbers["publish/save_time"], engine_seconds=away, stall_seconds=away)

    def baseline(self, repeat: int) -> Baseline | None:
        return None
