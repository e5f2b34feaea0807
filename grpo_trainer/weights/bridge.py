"""What every weight bridge is to the loop, and the one place that chooses one."""

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
    """The policy version that the server generates with from now on: it has said so."""

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

    def prove(self) -> float | None:
        """Show that the server generates with what is published and with nothing else.

        Returns:
            Mean |server - trainer| on the present weights, in nats a token; None: not measured.

        Raises:
            BridgeError: it does not.
        """
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Held while the trainer's weights change; a bridge that shares memory fences the server here.

        What is published next is one version more than what was before.
        """
        ...

    def publish(self, version: int) -> Published:
        """Make the server generate with the trainer's weights, as `version`, if this bridge does so at this one.

        The same version again, after a step that was skipped: nothing is to be done.

        Returns:
            What the server generates with: `version`, or an older one.
        """
        ...


def build_bridge(
    config: TrainConfig, policy: Policy, checkpoints: Checkpoints, progress: Progress, stop: StopSignal
) -> WeightBridge:
    """The bridge that `--weight-bridge-mode` names.

    Args:
        progress: where the run starts.
        stop: ends the bridge's waits; where the bridge owns the server, the server's end ends everybody else's.

    Raises:
        PortBusyError: the trainer is to start the server, and its port is taken.
    """
    from grpo_trainer.server_client import ServerClient
    from grpo_trainer.weights.checkpoint_restart import CheckpointModels, MergedModels, build_restart
    from grpo_trainer.weights.lora_swap import LoraSwap
    from grpo_trainer.weights.several import SeveralServers
    from grpo_trainer.weights.shared_weights import SharedBridge

    clients = [ServerClient(vllm, stop.check) for vllm in config.vllm.each]
    last_version = progress.policy_version + config.training_steps - progress.step
    match config.bridge:
        case LoraOnly() as options:
            assert isinstance(policy.model, PeftModel)
            root = (options.lora_root or Path(config.log_dir) / "adapters").absolute()
            folders = [root, *(root / name for name in server_names(len(clients))[1:])]  # each prunes its own files
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
