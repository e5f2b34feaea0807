"""The interface of a weight bridge, and the only place that chooses one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from peft import PeftModel

from grpo_trainer.config.bridge import CheckpointRestart, LoraOnly, LoraRestart, SharedVllm
from grpo_trainer.config.server import server_names
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.metrics.types import Metrics
from grpo_trainer.model.policy import Policy, SharedWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.signals import StopSignal


@dataclass(frozen=True)
class Published:
    """The policy version that the server generates with from now on, as the server has confirmed."""

    version: int
    name: str
    metrics: Metrics


class WeightBridge(Protocol):
    """Keeps one inference server on the trainer's weights. A context manager: its exit frees the bridge's resources."""

    def __enter__(self) -> WeightBridge: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

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
        ...

    def publish(self, version: int) -> Published:
        """Make the server generate with the trainer's weights as `version`, if this bridge updates at this version.

        After a skipped step the version is the same as before, and there is nothing to do.

        Returns:
            The version that the server generates with: `version` or an older one.
        """
        ...


def build_bridge(
    config: TrainConfig, policy: Policy, checkpoints: Checkpoints, progress: Progress, stop: StopSignal
) -> WeightBridge:
    """Return the bridge that `--weight-bridge-mode` names.

    Args:
        progress: where the run starts.
        stop: ends the bridge's waits. If the bridge owns the server and the server exits, all other waits end too.

    Raises:
        PortBusyError: the trainer starts the server itself, and the server's port is taken.
    """
    from grpo_trainer.server_client import ServerClient
    from grpo_trainer.weights.checkpoint_restart import CheckpointModels, MergedModels, build_restart
    from grpo_trainer.weights.lora_swap import LoraSwap
    from grpo_trainer.weights.multi_server import SeveralServers
    from grpo_trainer.weights.shared_weights import SharedBridge

    clients = [ServerClient(vllm, stop.check) for vllm in config.vllm.each]
    last_version = progress.policy_version + config.training_steps - progress.step
    match config.bridge:
        case LoraOnly() as options:
            assert isinstance(policy.model, PeftModel)
            root = (options.lora_root or Path(config.log_dir) / "adapters").absolute()
            # A folder for each server, since each bridge prunes its own files.
            folders = [root, *(root / name for name in server_names(len(clients))[1:])]
            swaps = {
                vllm.url: LoraSwap(options, policy.model, client, folder, config.model.seq_len)
                for vllm, client, folder in zip(config.vllm.each, clients, folders, strict=True)
            }
            return SeveralServers(swaps) if len(swaps) > 1 else swaps[config.vllm.url]
        case SharedVllm() as options:
            assert isinstance(policy, SharedWeights)
            return SharedBridge(options, policy, clients[0], config.model.seq_len)
        case LoraRestart() as options:
            return build_restart(config, options, MergedModels.of(config, policy), policy, clients, last_version, stop)
        case CheckpointRestart() as options:
            models = CheckpointModels(config.model.name, checkpoints)
            return build_restart(config, options, models, policy, clients, last_version, stop)
