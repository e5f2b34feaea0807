"""The bridges that restart the server on newer weights: `none` on a checkpoint, `lora_restart` on a merged model.

The trainer owns its servers, one or more. Every `--vllm-restart-interval` versions the bridge writes the weights as a
plain model folder while the old server still serves. Then it stops that server and starts a new one, and the proof
compares the new server with the trainer. Between restarts the server serves the version of its last launch, and its
answers name that version.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedTokenizerBase

from grpo_common.errors import Problem
from grpo_common.status import NOTICE
from grpo_trainer.alignment.proof import Change, Proof
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, warn_once
from grpo_trainer.files import folders_named, remove_remains, whole_folder
from grpo_trainer.launch.owned_server import OwnedServer, owned_servers
from grpo_trainer.metrics.types import Metric, Sum
from grpo_trainer.model.export import export_model
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import MODEL_CONFIG_FILE, Policy
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from grpo_trainer.weights.bridge import Published, WeightBridge, problems_of
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)

MERGED = r"merged_step_\d+"
"""Names of the folders that this bridge writes and prunes."""


@dataclass(frozen=True, repr=False)
class CheckpointModels:
    """The models of mode `none`: the run's own checkpoints."""

    base: str
    """The model that the run started from, which is version 0."""
    checkpoints: Checkpoints

    def export(self, version: int) -> str:
        return str(self.checkpoints.export(version)) if version else self.base

    def serving(self, model: str | None) -> None:
        if model != self.base:
            self.checkpoints.serving(Path(model) if model else None)


@dataclass(eq=False, repr=False)
class MergedModels:
    """The models of mode `lora_restart`: the adapter merged into a copy of the base model, in `ROOT/merged_step_N`."""

    base: str
    """The adapter's base model, which is served itself while the adapter has no effect."""
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype
    """Of the written weights."""
    root: Path
    keep: int = 1
    """Merged models to keep, at least 1, including those of an earlier process; the served one always stays. `grpo
    export` can rebuild a deleted one from a checkpoint of the adapter."""

    def __post_init__(self) -> None:
        remove_remains(self.root, MERGED)
        self._written = folders_named(self.root, MERGED, containing=MODEL_CONFIG_FILE)

    def export(self, version: int) -> str:
        layers: list[Any] = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        if not any(bool(layer.lora_B["default"].weight.any()) for layer in layers):  # the adapter has no effect
            return self.base
        path = self.root / f"merged_step_{version}"
        with whole_folder(path) as folder:
            export_model(self.model, self.tokenizer, folder, self.dtype)
        self._written = [*(each for each in self._written if each != path), path]
        return str(path)

    def serving(self, model: str | None) -> None:
        for old in [path for path in self._written[: -max(1, self.keep)] if str(path) != model]:
            self._written.remove(old)
            with suppress(FileNotFoundError):  # the user has deleted it already
                shutil.rmtree(old)
                log.info("pruned %s", old)


@dataclass(frozen=True)
class Launched:
    """One of the servers that the trainer starts."""

    server: OwnedServer  # its process, which the bridge stops on exit; only rank 0 has it
    client: ServerClient
    proof: Proof | None  # compares each launch with the trainer; None: no comparison


@dataclass(frozen=True)
class _Served:
    """What the servers serve now: the trainer's weights at one version."""

    version: int
    model: str
    infos: tuple[BridgeInfo, ...]


@dataclass(eq=False, repr=False)
class RestartBridge(WeightBridge):
    """The `none` and `lora_restart` bridges."""

    config: BridgeConfig
    models: CheckpointModels | MergedModels
    """Writes the weights for the server."""
    launched: Sequence[Launched]
    """The servers, which this bridge starts."""
    seq_len: int
    """Longest sequence of the training."""
    last_version: int
    """The version after the last step. The servers are not restarted on it, since no rollout needs it."""
    world: World = field(default_factory=World)
    """The processes over which the weights are sharded; all call this bridge together."""
    _served: _Served | None = None

    def close(self) -> None:
        with ExitStack() as leaving:
            if self.world.leads:
                leaving.callback(self.models.serving, None)  # last: then all servers have stopped
            for one in self.launched if self.world.leads else ():
                leaving.callback(one.server.close)
                leaving.callback(one.client.close)

    def connect(self, policy_version: int) -> int:
        self._launch(policy_version)
        return policy_version

    def prove(self) -> float | None:
        assert self._served is not None, "connect comes first"
        gaps = self._prove(self._served)
        if not gaps:
            warn_once(log, "bridge proof skipped (--no-proof): nothing shows that the server uses what is published")
        return max(gaps, default=None)

    def _prove(self, served: _Served) -> list[float]:
        """Return mean |server - trainer| of each server that has a proof, in nats a token."""
        gaps = []
        for one, info in zip(self.launched, served.infos, strict=True):
            if one.proof is not None:
                gap, allowed = one.proof.compare(info, Change(one.proof.model, served.version, self.world))
                log.info(
                    "bridge proved: the server on version %d is within %.2g nats a token of the trainer (allowed %.2g)",
                    *(served.version, gap, allowed),
                    extra=NOTICE if self.world.leads else {},
                )
                gaps.append(gap)
        return gaps

    def publish(self, version: int) -> Published:
        """Restart the servers if a restart is due, and return the version that they serve now."""
        assert self._served is not None, "connect comes first"
        started = time.perf_counter()
        metrics: dict[str, Metric] = {}
        due = version % self.config.vllm_restart_interval == 0 and version != self.last_version
        if due and version != self._served.version:
            metrics = self._launch(version)
            self._prove(self._served)
        served = self._served
        metrics |= {
            "train/sync_time": Sum(time.perf_counter() - started),
            "publish/version": Sum(version),
            "publish/served_version": Sum(served.version),
        }
        return Published(served.version, served.model, metrics)

    def _launch(self, version: int) -> dict[str, Metric]:
        """Write the weights, stop the running servers, start new ones, and check that the new ones answer."""
        started = time.perf_counter()
        model = self.models.export(version)
        saved = time.perf_counter() - started
        self._served, metrics = self.world.lead(lambda: self._restart(version, model, saved))
        return metrics

    def _restart(self, version: int, model: str, saved: float) -> tuple[_Served, dict[str, Metric]]:
        before = self._served
        with ThreadPoolExecutor(len(self.launched)) as stopping:
            stopped = max(stopping.map(lambda one: one.server.stop(), self.launched))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # vLLM sizes its cache by the free memory
        paths = [one.server.start(model, version) for one in self.launched]
        ready = max([one.server.wait_ready() for one in self.launched])
        infos = tuple(one.client.wait_until_ready() for one in self.launched)
        for number, (info, path) in enumerate(zip(infos, paths, strict=True)):
            self._check(info, version, path, before.infos[number] if before else None)
        for one, info in zip(self.launched, infos if before is None else (), strict=before is None):
            log.info(
                "started the inference server: vLLM %s on %s, %s, log %s",
                *(info.vllm_version, info.device, info.dtype, one.server.log_path),
            )
        self.models.serving(model)
        log.info(
            "the server is on version %d (%s): saved in %.1f s, stopped in %.1f s, started in %.1f s",
            *(version, model, saved, stopped, ready),
        )
        metrics: dict[str, Metric] = {
            "publish/save_time": Sum(saved),
            "publish/stop_time": Sum(stopped),
            "publish/start_time": Sum(ready),
        }
        return _Served(version, model, infos), metrics

    def _check(self, info: BridgeInfo, version: int, path: str, before: BridgeInfo | None) -> None:
        """Raise a `BridgeError` unless the answering server is the one that was started."""
        started = "the inference server that was started"
        problems = []
        if before is not None and info.boot_id == before.boot_id:
            problems.append(Problem(f"{started}: boot_id", f"{info.boot_id}, that of the last server", "another"))
        if info.policy_version != version:
            problems.append(Problem(f"{started}: policy_version", str(info.policy_version), str(version)))
        if info.model_name != path:
            problems.append(Problem(f"{started}: model_name", info.model_name, path))
        problems += problems_of(info, self.seq_len, by="give it --server.extra-args")
        if problems:
            raise BridgeError.of(problems)


def build_restart(
    config: TrainConfig,
    models: CheckpointModels | MergedModels,
    policy: Policy,
    last_version: int,
    stop: StopSignal,
    world: World,
) -> RestartBridge:
    """Return a bridge that owns its servers; if one of them exits unexpectedly, every wait of the trainer ends.

    Raises:
        PortBusyError: a server's port is taken.
    """
    on_gpu = torch.cuda.is_available()
    dtype = config.trainer_dtype(on_gpu=on_gpu)
    launched = []
    own = world.only_first(lambda: owned_servers(config, on_gpu=on_gpu, check_stop=stop.check))
    for number, vllm in enumerate(config.server.each):
        client = ServerClient(vllm, stop.check)
        server = world.only_first(lambda number=number: own[number])
        if world.leads:
            stop.watch(server.check)
        proof = Proof(policy.model, client, dtype, world) if config.proof else None
        launched.append(Launched(server, client, proof))
    return RestartBridge(config, models, launched, config.seq_len, last_version, world)
