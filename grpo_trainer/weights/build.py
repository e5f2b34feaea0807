"""The only place that chooses a weight bridge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from peft import PeftModel

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.server import Server, server_names
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.load import read_tokenizer
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import AllWeights, Policy, SharedWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from grpo_trainer.weights.bridge import FirstsBridge, WeightBridge
from grpo_trainer.weights.broadcast import BroadcastBridge, PresentWeights
from grpo_trainer.weights.checkpoint_restart import CheckpointModels, MergedModels, build_restart
from grpo_trainer.weights.fleet import Fleet, OpenBridge
from grpo_trainer.weights.lora_swap import LoraSwap
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

    `stop` ends the bridge's waits. If the bridge owns the server and the server exits, all other waits end too.

    Raises:
        PortBusyError: the trainer starts the server itself, and the server's port is taken.
    """
    world = world or World()
    if config.weight_bridge_mode == "shared_vllm":
        assert isinstance(policy, SharedWeights)
        servers = {each.url: ServerClient(each, stop.check) for each in config.server.each}
        return SharedBridge(config, policy, servers, config.seq_len, world)
    make = partial(_bridge, config, policy, checkpoints, progress, stop, world.gpus)
    if world.alone or checkpoints.gathers:
        return make(world)
    return FirstsBridge(world, world.only_first(lambda: make(World())))  # rank 0 has all that servers need


def _bridge(
    config: TrainConfig,
    policy: Policy,
    checkpoints: Checkpoints,
    progress: Progress,
    stop: StopSignal,
    gpus: Sequence[str],
    world: World,
) -> WeightBridge:
    """Return a bridge that sends weights, or restarts servers on them.

    The processes of `world` have a part of the weights each; one process has them all. `gpus` are those of all trainer
    processes.
    """
    last_version = progress.policy_version + config.training_steps - progress.step
    if config.weight_bridge_mode == "lora_only":
        assert isinstance(policy.model, PeftModel)
        model, root = policy.model, weights_folder(config, Path(config.log_dir).absolute())

        def swap(name: str, server: Server) -> WeightBridge:
            # A folder for each server, since each bridge prunes its own files.
            folder = root if name == FIRST else root / name
            return LoraSwap(config, model, ServerClient(server, stop.check), folder, config.seq_len)

        return _to_servers(config.server, swap)
    if config.weight_bridge_mode == "broadcast":
        assert isinstance(policy, AllWeights)
        gather = checkpoints.weights_now if checkpoints.gathers else None
        weights = PresentWeights(policy.tensors, gather, world)
        dtype = config.trainer_dtype(on_gpu=torch.cuda.is_available())
        sent, length = weights_folder(config, Path(config.log_dir).absolute()), config.seq_len

        def sender(name: str, server: Server) -> WeightBridge:
            client, folder = ServerClient(server, stop.check), sent / name
            return BroadcastBridge(config, policy, weights, client, folder, length, dtype, gpus, world)

        return _to_servers(config.server, sender, weights)
    models: CheckpointModels | MergedModels = CheckpointModels(config.model_name, checkpoints)
    if config.trains_adapter:
        assert isinstance(policy.model, PeftModel)
        tokenizer, root, keep = read_tokenizer(config.model_name), config.save_path, config.keep_checkpoints
        served = getattr(torch, config.served_dtype(on_gpu=torch.cuda.is_available()))
        models = MergedModels(config.model_name, policy.model, tokenizer, served, root, keep)
    return build_restart(config, models, policy, last_version, stop, world)


def weights_folder(options: BridgeConfig, log_dir: Path) -> Path:
    """Return the folder for the transport `disk`; this run's own, because what is in it is deleted."""
    adapters = options.weight_bridge_mode == "lora_only"
    name, root = ("adapters", options.lora_root) if adapters else ("weights", options.broadcast_root)
    if root is None:
        return log_dir / name
    return root.absolute() / f"grpo-{name}-{sha256(bytes(log_dir)).hexdigest()[:12]}"


def _to_servers(config: Server, open_bridge: OpenBridge, weights: PresentWeights | None = None) -> WeightBridge:
    """Return one bridge to all servers; if a run lists them, they may change."""
    alone = config.roster is None and len(config.each) == 1
    return open_bridge(FIRST, config.each[0]) if alone else Fleet(config, open_bridge, weights)
