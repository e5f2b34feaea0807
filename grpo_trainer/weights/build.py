"""The only place that chooses a weight bridge."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
from peft import PeftModel

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.server import Server, server_names
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.parallel.world import Vary, World
from grpo_trainer.policy import AllWeights, Policy, SharedWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from grpo_trainer.weights.bridge import WeightBridge
from grpo_trainer.weights.broadcast import BroadcastBridge, PresentWeights
from grpo_trainer.weights.checkpoint_restart import CheckpointModels, MergedModels, build_restart
from grpo_trainer.weights.common import CommonBridge
from grpo_trainer.weights.fleet import Fleet, OpenBridge
from grpo_trainer.weights.lora_swap import LoraSwap
from grpo_trainer.weights.paired import PairedBridge
from grpo_trainer.weights.sharded_weights import CommonClient, ShardedBridge
from grpo_trainer.weights.shared_weights import SharedBridge

FIRST = server_names(1)[0]


def build_bridge(
    config: TrainConfig,
    policy: Policy,
    checkpoints: Checkpoints,
    progress: Progress,
    stop: StopSignal,
    world: World | None = None,
) -> WeightBridge:
    """Return the bridge that `--weight-bridge-mode` names.

    Args:
        progress: where the run starts.
        world: the processes that train together.
        stop: ends the bridge's waits. If the bridge owns the server and the server exits, all other waits end too.

    Raises:
        PortBusyError: the trainer starts the server itself, and the server's port is taken.
    """
    last_version = progress.policy_version + config.training_steps - progress.step
    mode = config.weight_bridge_mode
    if mode == "lora_only":
        assert isinstance(policy.model, PeftModel)
        model, root = policy.model, (config.lora_root or Path(config.log_dir) / "adapters").absolute()

        def swap(name: str, server: Server) -> WeightBridge:
            # A folder for each server, since each bridge prunes its own files.
            folder = root if name == FIRST else root / name
            return LoraSwap(config, model, ServerClient(server, stop.check), folder, config.seq_len)

        return _to_servers(config.server, swap)
    if mode == "shared_vllm":
        assert isinstance(policy, SharedWeights)
        if world is None or world.alone:
            return SharedBridge(config, policy, ServerClient(config.server, stop.check), config.seq_len)
        return _common(config, policy, world, stop.check)
    if mode == "broadcast":
        assert isinstance(policy, AllWeights)
        weights = PresentWeights(policy.tensors, checkpoints.weights_now if checkpoints.gathers else None)
        dtype = config.trainer_dtype(on_gpu=torch.cuda.is_available())
        sent, length = weights_folder(config, Path(config.log_dir).absolute()), config.seq_len

        def tell(size: float | None) -> None:
            if world is not None and checkpoints.gathers:  # the others have shards of the weights
                world.give_all(Vary(size))

        def sender(name: str, server: Server) -> WeightBridge:
            client, gpus = ServerClient(server, stop.check), [] if world is None else world.gpus
            folder = sent / name
            return BroadcastBridge(config, policy, weights, client, folder, length, dtype, tell, gpus)

        return _to_servers(config.server, sender)
    merged = config.trains_adapter
    models = MergedModels.of(config, policy) if merged else CheckpointModels(config.model_name, checkpoints)
    return build_restart(config, models, policy, last_version, stop)


def weights_folder(options: BridgeConfig, log_dir: Path) -> Path:
    """Return the folder for the transport `disk`; this run's own, because it is deleted."""
    if options.broadcast_root is None:
        return log_dir / "weights"
    return options.broadcast_root.absolute() / f"grpo-weights-{sha256(bytes(log_dir)).hexdigest()[:12]}"


def build_followers_bridge(config: TrainConfig, policy: Policy, world: World) -> CommonBridge | None:
    """Return the bridge of a process other than rank 0 to its own server; None: only rank 0 updates servers."""
    if config.weight_bridge_mode != "shared_vllm":
        return None
    assert isinstance(policy, SharedWeights)
    return _common(config, policy, world)


def _common(
    config: TrainConfig,
    policy: SharedWeights,
    world: World,
    check_stop: Callable[[], None] = lambda: None,
) -> CommonBridge:
    """Return a process's bridge to its own server, or to its worker of the only server."""
    if config.shards_weights:
        client, seq_len = CommonClient(config.server, world, check_stop), config.seq_len
        own = SharedBridge(config, policy, client, seq_len, all_written=lambda: world.gather(None))
        return ShardedBridge(own, policy, world)
    own = SharedBridge(config, policy, ServerClient(config.server.each[world.rank], check_stop), config.seq_len)
    return PairedBridge(own, policy, world, [vllm.url for vllm in config.server.each])


def _to_servers(config: Server, open_bridge: OpenBridge) -> WeightBridge:
    """Return one bridge to all servers; if a run lists them, they may change."""
    alone = config.roster is None and len(config.each) == 1
    return open_bridge(FIRST, config.each[0]) if alone else Fleet(config, open_bridge)
