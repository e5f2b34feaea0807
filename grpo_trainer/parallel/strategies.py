"""The weights that each trainer process holds: all of them (a replica), or a shard.

`ShardedUpdate` (`sharded_update.py`): every process has all weights, in its server's memory, and a shard of the
optimizer states.

`Replicas`: every process has all weights. Gradients are summed, and all processes make the same update.

`Shards` (FSDP2, `torch.distributed.fsdp.fully_shard`): parameters, gradients and optimizer states are sharded over the
processes. A layer's weights are gathered while it computes, and its gradients are summed and sharded again
(reduce-scatter). So every pass needs all processes (`Divided`).

`TensorShards` (`tensor_parallel.py`): every process has a shard of every matrix, in the memory of its worker of a
server, and computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.fitting import fit
from grpo_trainer.engine.forward import Forward, build_forward
from grpo_trainer.engine.tensor_shards import shard_of
from grpo_trainer.errors import ConfigError
from grpo_trainer.model.export import architecture
from grpo_trainer.parallel.shard_states import Part, Place, save_states
from grpo_trainer.parallel.sharded_update import ShardedUpdate
from grpo_trainer.parallel.shards import with_rest
from grpo_trainer.parallel.strategy import Divided, ParallelStrategy, names_in
from grpo_trainer.parallel.tensor_parallel import TensorShards
from grpo_trainer.parallel.world import World

METHOD = "grpo_scores"
"""A sharded model's method for `Forward.scores`, registered with FSDP2 so that weights are gathered for it too."""


class Replicas(ParallelStrategy):
    """All weights in each process."""

    def __init__(self, world: World, forward: Forward, parameters: Sequence[Parameter]) -> None:
        self.parameters = self.written = list(parameters)
        self.names = names_in(forward.model, self.parameters)
        self.forward = forward
        self._world = world

    def finish_gradients(self) -> None:
        self._world.sum_gradients(self.parameters)

    def clip(self, limit: float) -> float:
        return self._world.clip(self.parameters, limit, self.parameters if self._world.leads else [])

    def check(self, samples: Sequence[Tensor]) -> None:
        self._world.check_agreement(samples)


class Shards(Divided):
    """A shard of every weight in each process.

    Args:
        forward: the forward pass of a sharded model.

    Attributes:
        place: this process's rank, and the number of processes.
        parts: this process's parts of the trained parameters, without empty ones, in the optimizer's order.
    """

    def __init__(self, world: World, forward: Forward) -> None:
        self.loss_factor = float(world.size)  # FSDP2 averages gradients, and gloo can't scale while it reduces
        setattr(forward.model, METHOD, forward.scores)
        register_fsdp_forward_method(forward.model, METHOD)
        forward.scores = getattr(forward.model, METHOD)  # type: ignore[method-assign]
        super().__init__(world, forward)
        self.place = Place(world.rank, world.size)
        trained = [(name, whole) for name, whole in self._model.named_parameters() if whole.requires_grad]
        parts = [Part(name, number, _local(whole), whole) for number, (name, whole) in enumerate(trained)]
        self.parts = [part for part in parts if part.own.numel()]
        self.parameters = self.written = [part.own for part in self.parts]
        self.names = [part.name for part in self.parts]

    # ------------------------------------------------------------------------------------------ steps

    def passes(self, own: int) -> int:
        return max(self._world.gather(own))

    def finish_gradients(self) -> None:
        for part in self.parts:
            gradient = part.whole.grad
            assert gradient is None or isinstance(gradient, DTensor)
            part.own.grad = None if gradient is None else gradient.to_local()
            part.whole.grad = None

    def clip(self, limit: float) -> float:
        return self._world.clip(self.parameters, limit)

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def save_states(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write the optimizer's states, each process its part: see `shard_states.save_states`."""
        save_states(self._world, folder, self.parts, optimizer, self.place)


ShardedStates = Shards | ShardedUpdate | TensorShards
"""Strategies with a shard of the optimizer states in each process."""


def _local(parameter: Parameter) -> Parameter:
    """Return this process's shard as a parameter on the same memory."""
    data = parameter.data
    assert isinstance(data, DTensor)
    return Parameter(data.to_local())


def hold(
    world: World,
    model: nn.Module,
    config: TrainConfig,
    trained: Sequence[Parameter],
    before_measuring: Callable[[], None] = lambda: None,
) -> ParallelStrategy:
    """Return this process's holding of a model, with the forward pass ready for steps.

    Args:
        model: a whole model, or one that is sharded already (`shards.py`).
        before_measuring: see `fit`.

    Raises:
        ConfigError: the model is sharded, and its layers can't be called by themselves.
    """
    if not isinstance(model, FSDPModule):
        forward = build_forward(model, config)
        if (shard := shard_of(model)) is not None:
            fit(forward, config, trained, before_measuring)
            return TensorShards(world, forward, trained, shard)
        shares = not world.alone and config.shards_update
        fit(forward, config, trained, before_measuring, world.size if shares else 1)
        return ShardedUpdate(world, forward, trained) if shares else Replicas(world, forward, trained)
    assert isinstance(model, nn.Module)
    with with_rest(model):
        forward = build_forward(model, config)
        if forward.decoder is None:
            raise ConfigError(
                f"{architecture(model)} does more than its layers and its head",
                field="--sharding",
                got="full",
                fix="use --sharding none",
            )
        fit(forward, config, trained, before_measuring)
    return Shards(world, forward)
