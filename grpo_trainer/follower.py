"""What several trainer processes do at the start, and the work of all but rank 0: it carries out rank 0's orders."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import nullcontext

import torch

from grpo_trainer.alignment.proof import SyntheticRows
from grpo_trainer.config.rules import Hardware, checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import CommonError
from grpo_trainer.parallel.common_passes import CommonPasses
from grpo_trainer.parallel.tensor_parallel import TensorShards
from grpo_trainer.parallel.world import (
    Collect,
    CollectStates,
    Command,
    End,
    ModelPass,
    Restore,
    SaveStates,
    Score,
    Step,
    Tend,
    Vary,
    World,
    join,
)
from grpo_trainer.policy import build_policy
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.server_client import wait_for_servers
from grpo_trainer.signals import StopSignal, ending_signals
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights.build import build_followers_bridge
from grpo_trainer.weights.common import CommonBridge

log = logging.getLogger(__name__)


def join_others(config: TrainConfig) -> World:
    """Wait for all processes of this trainer, and return them.

    Raises:
        ConfigError: the options do not go together on this machine; see also `distributed.join`.
        TrainingError: the other processes did not connect.
    """
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    checked(config, Hardware(on_gpu, torch.cuda.device_count()))
    return join(config, on_gpu=on_gpu)


def servers_there(
    config: TrainConfig, world: World, check_stop: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Return a function that waits until servers that start at the same time have allocated their memory.

    All trainer processes call it before they measure the free memory of their GPUs; rank 0 asks the servers. There is
    nothing to wait for if the trainer starts the server itself later, or if it shares the weights of a running server.
    """
    if config.owns_server or config.shares_weights:
        return lambda: None

    def wait() -> None:
        if world.leads:
            wait_for_servers(config.server, check_stop)
        world.gather(None)

    return wait


def follow(config: TrainConfig, world: World) -> None:
    """Carry out rank 0's orders until the last.

    Once this process has its model, it ignores SIGINT, SIGTERM and SIGHUP. If a signal reaches all processes, rank 0
    handles it, and needs the others to finish the step.

    Raises:
        StoppedError: a signal arrived while this process waited for its server.
        TrainingError: rank 0 has exited without a last order.
    """
    with StopSignal() as stop:
        policy = build_policy(config, stop.check, world)
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    trainer = Trainer(policy.model, config, world=world, before_measuring=servers_there(config, world))
    checkpoints = Checkpoints(config, policy, trainer.optimizer, trainer.norms, trainer.shards)
    with build_followers_bridge(config, policy, world) or nullcontext() as bridge:
        run_worker(world, trainer, checkpoints, bridge)


def run_worker(
    world: World, trainer: Trainer, checkpoints: Checkpoints | None = None, bridge: CommonBridge | None = None
) -> None:
    """Carry out rank 0's orders until the last.

    Args:
        checkpoints: saves and restores states; None: rank 0 will not order that.
        bridge: keeps the server whose memory this process's weights are in; None: there is no such server.

    Raises:
        TrainingError: rank 0 has exited without a last order.
        GrpoError: an error of this process alone.
    """
    rows = SyntheticRows(trainer.model)
    with world:
        while not isinstance(order := world.receive(), End):
            try:
                _carry_out(order, trainer, checkpoints, bridge, rows)
            except CommonError as error:  # rank 0 has raised it too, and decides what follows
                log.error("%s: %s", type(order).__name__, error)


def _carry_out(
    order: Command,
    trainer: Trainer,
    checkpoints: Checkpoints | None,
    bridge: CommonBridge | None,
    rows: SyntheticRows,
) -> None:
    shards = trainer.shards
    match order:
        case Step(share, step):
            trainer.step(share, step, nullcontext if bridge is None else bridge.updating)
        case Restore(path):
            assert checkpoints is not None
            checkpoints.load(path)
        case ModelPass() | Score():
            assert isinstance(shards, CommonPasses)
            shards.follow(order)
        case Collect():
            assert isinstance(shards, CommonPasses)
            shards.tensors()
        case CollectStates():
            assert isinstance(shards, TensorShards)
            shards.states(trainer.optimizer)
        case SaveStates(folder):
            assert checkpoints is not None
            try:
                checkpoints.save_states(folder)
            except OSError as error:  # rank 0 has raised it too
                log.error("%s", error)
        case Tend():
            assert bridge is not None
            bridge.tend(order)
        case Vary(size):
            if size is None:
                rows.restore()
            else:
                rows.make(size)
