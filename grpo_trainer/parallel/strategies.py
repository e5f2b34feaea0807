"""The weights that each trainer process holds: all of them (a replica), or a shard.

`ShardedUpdate` (`sharded_update.py`): every process has all weights, in its server's memory, and a shard of the
optimizer states.

`Replicas`: every process has all weights. Gradients are summed, and all processes make the same update.

`Shards` (FSDP2, `torch.distributed.fsdp.fully_shard`): parameters, gradients and optimizer states are sharded over the
processes. A layer's weights are gathered while it computes, and its gradients are summed and sharded again
(reduce-scatter). So every pass needs all processes. The order of a step announces the step's passes. For other passes
of rank 0 (the bridge's proof, logged samples, a checkpoint's weights), rank 0 sends separate orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from grpo_trainer.batch.microbatches import MicroBatch
from grpo_trainer.config.distributed import shards_update
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.forward import Forward, build_forward
from grpo_trainer.engine.logprobs import TokenScores
from grpo_trainer.engine.memory import fit
from grpo_trainer.errors import ConfigError
from grpo_trainer.model.export import architecture, stored_tensors
from grpo_trainer.parallel.shard_states import Part, Place, save_states
from grpo_trainer.parallel.sharded_update import ShardedUpdate
from grpo_trainer.parallel.shards import with_rest
from grpo_trainer.parallel.world import Collect, Command, ModelPass, Score, World

METHOD = "grpo_scores"
"""A sharded model's method for `Forward.scores`, registered with FSDP2 so that weights are gathered for it too."""


class ParallelStrategy(Protocol):
    """The weights that a process holds.

    Attributes:
        parameters: the parameters that its optimizer updates.
        names: their names in the model.
        loss_factor: factor of the loss before the backward pass.
        forward: computes scores of tokens.
        whole: whether this process can compute without the others.
        written: the parameters that a step changes in this process.
        in_two_parts: whether the optimizer must prepare an update before it writes it.
    """

    parameters: list[Parameter]
    names: list[str]
    loss_factor: float
    forward: Forward
    whole: bool
    written: list[Parameter]
    in_two_parts: bool

    def in_step(self) -> AbstractContextManager[None]:
        """Return the context within which all processes are in the same step."""
        ...

    def passes(self, own: int) -> int:
        """Return the number of passes that each process must make; `own` is this process's. All processes call it."""
        ...

    def finish_gradients(self) -> None:
        """Turn the parameters' gradients into those of the whole batch."""
        ...

    def clip(self, limit: float) -> float:
        """Clip the norm of all gradients to `limit`, and return the norm before."""
        ...

    def share_update(self) -> None:
        """Exchange what the optimizer has prepared. All processes call it."""
        ...

    def finish_update(self) -> None:
        """Write what the optimizer of this process does not write."""
        ...

    def check(self, samples: Sequence[Tensor]) -> None:
        """Raise a TrainingError if replicas differ."""
        ...

    def mean(self, value: float, weight: float) -> float:
        """Return the weighted mean over the processes. All processes call it."""
        ...


class Replicas:
    """All weights in each process."""

    loss_factor = 1.0
    whole = True
    in_two_parts = False

    def __init__(self, world: World, forward: Forward, parameters: Sequence[Parameter]) -> None:
        self.parameters = self.written = list(parameters)
        known = {id(parameter): name for name, parameter in forward.model.named_parameters()}
        self.names = [known[id(parameter)] for parameter in self.parameters]
        self.forward = forward
        self._world = world

    @contextmanager
    def in_step(self) -> Iterator[None]:
        yield

    def passes(self, own: int) -> int:
        return own

    def finish_gradients(self) -> None:
        self._world.sum_gradients(self.parameters)

    def clip(self, limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.parameters, limit))

    def share_update(self) -> None:
        """Do nothing: each process has prepared the whole update."""

    def finish_update(self) -> None:
        """Do nothing: the optimizer writes all weights."""

    def check(self, samples: Sequence[Tensor]) -> None:
        self._world.check_agreement(samples)

    def mean(self, value: float, weight: float) -> float:
        return value


class Shards:
    """A shard of every weight in each process.

    Args:
        forward: the forward pass of a sharded model.

    Attributes:
        place: this process's rank, and the number of processes.
        parts: this process's parts of the trained parameters, without empty ones, in the optimizer's order.
    """

    whole = False
    in_two_parts = False

    def __init__(self, world: World, forward: Forward) -> None:
        self._world = world
        self._model = forward.model
        self._in_step = False
        self.loss_factor = float(world.size)  # FSDP2 averages gradients, and gloo can't scale while it reduces
        setattr(self._model, METHOD, forward.scores)
        register_fsdp_forward_method(self._model, METHOD)
        self.forward: Forward = _Together(forward, self)
        if world.leads:
            self._model.register_forward_pre_hook(self._announce_pass, prepend=True, with_kwargs=True)
            self._model.register_forward_hook(self._end_pass)
        self.place = Place(world.rank, world.size)
        trained = [(name, whole) for name, whole in self._model.named_parameters() if whole.requires_grad]
        parts = [Part(name, number, _local(whole), whole) for number, (name, whole) in enumerate(trained)]
        self.parts = [part for part in parts if part.own.numel()]
        self.parameters = self.written = [part.own for part in self.parts]
        self.names = [part.name for part in self.parts]

    # ------------------------------------------------------------------------------------------ steps

    @contextmanager
    def in_step(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

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

    def share_update(self) -> None:
        """Do nothing: each process writes its own shard."""

    def finish_update(self) -> None:
        """Do nothing: the optimizer writes the whole shard."""

    def check(self, samples: Sequence[Tensor]) -> None:
        """Do nothing: each process holds a different part."""

    def mean(self, value: float, weight: float) -> float:
        said = self._world.gather((value, weight))
        return sum(each * share for each, share in said) / sum(share for _, share in said)

    # ------------------------------------------------------------------------- outside steps: announced by an order

    @contextmanager
    def _together(self, order: Callable[[], Command]) -> Iterator[None]:
        """Enter the context of a computation of all processes. Outside steps, rank 0 sends the others its order."""
        if self._in_step:
            yield
            return
        if self._world.leads:
            self._world.give_all(order())
        with self._world.working():
            yield

    def _announce_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_step:
            assert not args and kwargs.keys() == {"input_ids", "use_cache"} and not kwargs["use_cache"]
            self._world.give_all(ModelPass(kwargs["input_ids"].cpu()))
            self._world.begin()

    def _end_pass(self, *_: Any) -> None:
        """End a pass that `_announce_pass` began; torch does not call this after a failed pass."""
        if not self._in_step:
            self._world.end()

    def scores(self, microbatch: MicroBatch, *, entropy_gradient: bool) -> TokenScores:
        """Compute `Forward.scores` with all processes."""
        with self._together(lambda: Score(microbatch.to(torch.device("cpu")))):
            return getattr(self._model, METHOD)(microbatch, entropy_gradient=entropy_gradient)

    def tensors(self) -> dict[str, Tensor]:
        """Return a checkpoint's whole tensors in rank 0's main memory, gathered one at a time."""
        found: dict[str, Tensor] = {}
        with self._together(Collect):
            for name, (_, tensor) in stored_tensors(self._model).items():  # type: ignore[arg-type]
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self._world.leads:
                    found[name] = whole.detach().cpu()
        return found

    def save_states(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write the optimizer's states, each process its part; all are on the disk when this returns.

        Raises:
            OSError: a process could not write; all processes raise it.
        """
        save_states(self._world, folder, self.parts, optimizer, self.place)

    def follow(self, order: ModelPass | Score) -> None:
        """Take part in a pass that rank 0 has announced."""
        device = next(self._model.parameters()).device
        training = self._model.training
        with torch.no_grad():
            match order:
                case ModelPass(tokens_BT):
                    self._model.eval()
                    try:
                        self._model(input_ids=tokens_BT.to(device), use_cache=False)
                    finally:
                        self._model.train(training)
                case Score(microbatch):
                    getattr(self._model, METHOD)(microbatch.to(device))


ShardedStates = Shards | ShardedUpdate
"""Strategies with a shard of the optimizer states in each process."""


class _Together(Forward):
    """A forward pass that gathers the shards."""

    def __init__(self, forward: Forward, shards: Shards) -> None:
        vars(self).update(vars(forward))
        self._shards = shards

    def scores(self, microbatch: MicroBatch, *, entropy_gradient: bool = False) -> TokenScores:
        return self._shards.scores(microbatch, entropy_gradient=entropy_gradient)


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
        shares = not world.alone and shards_update(config)
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
