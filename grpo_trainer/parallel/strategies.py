"""The weights that each trainer process holds: all of them (a replica), or a shard.

`Replicas`: every process has all weights. Gradients are summed, and all processes make the same update.

`ShardedUpdate`: every process has all weights, in its server's memory, but the update of each weight is computed by one
of them. Each process owns some rows of every trained parameter (`Place.rows`, as FSDP2 shards them) and the optimizer
states of these rows. A step:

    gradients ─ reduce: each rank gets the sums of its rows ─▶ optimizer: new rows, in the gradients' memory
              ─ broadcast: each rank sends its new rows into the gradients' memory of the others ─▶ written in the fence

So the weights are rounded stochastically once, by their owner, and every rank writes the same bits. Beyond gradients
and states this takes a buffer of at most `BUCKET_BYTES`. Source: ZeRO stages 1 and 2 (arXiv 1910.02054).

`Shards` (FSDP2, `torch.distributed.fsdp.fully_shard`): parameters, gradients and optimizer states are sharded over the
processes. A layer's weights are gathered while it computes, and its gradients are summed and sharded again
(reduce-scatter). So every pass needs all processes (`Divided`).

`TensorShards`: every process has a shard of every matrix, in the memory of its worker of a server with tensor parallel,
and computes with it (`engine/tensor_shards.py`). All processes train on the same batch, so losses and logprobs are the
same in all, the gradient of a shard is complete where it is, and each process has the optimizer states of its shards.
Parameters that all processes have whole (norms) get the same gradient in all of them. Rank 0 alone rounds their new
values, and sends them to the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.collectives import peers
from grpo_trainer.engine.fitting import fit
from grpo_trainer.engine.forward import Forward, build_forward
from grpo_trainer.engine.tensor_shards import ModelShard, shard_of
from grpo_trainer.errors import ConfigError
from grpo_trainer.model.export import architecture, stored_tensors
from grpo_trainer.optim.adamw import hand_out, joined
from grpo_trainer.optim.eight_bits import SCALE, SIGNED, decoded, encoded, levels_of
from grpo_trainer.optim.steps import sampled
from grpo_trainer.parallel.shard_states import Part, Place, States, save_states
from grpo_trainer.parallel.shards import with_rest
from grpo_trainer.parallel.world import World, buckets, in_buckets

METHOD = "grpo_scores"
"""A sharded model's method for `Forward.scores`, registered with FSDP2 so that weights are gathered for it too."""


class ParallelStrategy(ABC):
    """The weights that a process holds."""

    parameters: list[Parameter]  # that its optimizer updates
    names: list[str]  # of these in the model
    written: list[Parameter]  # that a step changes in this process
    forward: Forward
    loss_factor: float = 1.0  # of the loss before the backward pass
    whole: bool = True  # this process can compute without the others
    in_two_parts: bool = False  # the optimizer must prepare an update before it writes it
    same_batch: bool = False  # all processes train on the whole batch, and not each on its share
    # With states in parts:
    place: Place  # of this process
    parts: list[Part]  # this process's parts of the trained parameters, without empty ones, in the optimizer's order
    _world: World

    def in_step(self) -> AbstractContextManager[None]:
        """Return the context within which all processes are in the same step."""
        return nullcontext()

    def passes(self, own: int) -> int:
        """Return the number of passes that each process must make; `own` is this process's. All processes call it."""
        return own

    @abstractmethod
    def finish_gradients(self) -> None:
        """Turn the parameters' gradients into those of the whole batch."""

    def clip(self, limit: float) -> float:
        """Clip the norm of all gradients, of which each process has a part, to `limit`; return the norm before."""
        return self._world.clip(self.parameters, limit)

    def share_update(self) -> None:  # noqa: B027  # nothing to exchange is the usual case
        """Exchange what the optimizer has prepared. All processes call it."""

    def finish_update(self) -> None:  # noqa: B027  # likewise
        """Write what the optimizer of this process does not write."""

    def check(self, samples: Sequence[Tensor]) -> None:
        """Raise a TrainingError if replicas differ."""
        self._world.check_agreement(samples)

    def mean(self, value: float, weight: float) -> float:
        """Return the weighted mean over the processes. All processes call it."""
        return value

    def save_states(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write the optimizer's states, each process its part: see `shard_states.save_states`."""
        save_states(self._world, folder, self.parts, optimizer, self.place)


class Divided(ParallelStrategy):
    """Weights of which each process has a part, so that every pass of the model takes all processes."""

    whole = False

    def __init__(self, world: World, forward: Forward) -> None:
        self._world = world
        self._model = forward.model
        self.forward = forward

    @abstractmethod
    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the model. All processes call it."""

    def check(self, samples: Sequence[Tensor]) -> None:
        """Do nothing: parts differ."""

    def mean(self, value: float, weight: float) -> float:
        said = self._world.gather((value, weight))
        return sum(each * share for each, share in said) / sum(share for _, share in said)

    def tensors(self, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor]:
        """Gather a checkpoint's whole tensors, one at a time; return what rank 0 keeps of each. All processes call it.

        `keep` copies a gathered tensor, whose memory the next one needs.
        """
        found: dict[str, Tensor] = {}
        for name, (_, tensor) in stored_tensors(self._model).items():  # type: ignore[arg-type]
            whole = self._gathered(name, tensor)
            if self._world.leads:
                found[name] = keep(whole.detach())
        return found


def names_in(model: nn.Module, parameters: Sequence[Parameter]) -> list[str]:
    """Return the names of a model's parameters, each under its first name."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in parameters]


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


class ShardedUpdate(ParallelStrategy):
    """A replica whose optimizer updates only its own rows. The memory of `trained` may be another process's."""

    in_two_parts = True

    def __init__(self, world: World, forward: Forward, trained: Sequence[Parameter]) -> None:
        self._world = world
        self.forward = forward
        self.written = list(trained)
        self.place = Place(world.rank, world.size)
        mesh = init_device_mesh(self.written[0].device.type, (world.size,))
        self.parts: list[Part] = []
        self._whole_of: list[Parameter] = []
        for number, (name, whole) in enumerate(zip(names_in(forward.model, trained), trained, strict=True)):
            own = Parameter(self._rows(whole.detach(), world.rank))
            own.grad_dtype = whole.grad_dtype
            shape = torch.empty(whole.shape, device="meta")
            sharded = DTensor.from_local(
                own.detach(), mesh, [Shard(0)], run_check=False, shape=shape.shape, stride=shape.stride()
            )
            if own.numel():
                self.parts.append(Part(name, number, own, sharded))
                self._whole_of.append(whole)
        self.parameters = [part.own for part in self.parts]
        self.names = [part.name for part in self.parts]

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        rows = Place(rank, self.place.count).rows(len(tensor))
        return tensor[rows.start : rows.stop]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        self._forget_gradients()  # of an update that was skipped
        yield

    def _forget_gradients(self) -> None:
        for parameter in self.written:
            parameter.grad = None

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sum the gradients of all ranks, on each rank those of its rows; the others' rows are then undefined."""
        self._world.fill_gradients(self.written)
        self._exchange(lambda flat, rank: dist.reduce(flat, rank), into=lambda rank: rank == self.place.rank)
        for part, whole in zip(self.parts, self._whole_of, strict=True):
            part.own.grad = None if whole.grad is None else self._rows(whole.grad, self.place.rank)

    @torch.no_grad()
    def share_update(self) -> None:
        """Gather the new weights of all ranks in the gradients' memory."""
        self._exchange(lambda flat, rank: dist.broadcast(flat, rank), into=lambda rank: rank != self.place.rank)

    def _exchange(self, send: Callable[[Tensor, int], object], into: Callable[[int], bool]) -> None:
        """Send the gradients' rows of each rank, joined, by buckets; take over the results that `into` accepts."""
        for bucket in buckets([parameter.grad for parameter in self.written if parameter.grad is not None]):
            for rank in range(self.place.count):
                rows = [own for gradient in bucket if (own := self._rows(gradient, rank)).numel()]
                if not rows:
                    continue
                flat = joined(rows)
                with peers():
                    send(flat, rank)
                if into(rank):
                    hand_out(flat, rows)

    @torch.no_grad()
    def finish_update(self) -> None:
        """Write the rows of the other ranks, after the optimizer has written this rank's; drop the gradients."""
        targets, values = [], []
        for parameter in self.written:
            if parameter.grad is None:
                continue
            own = self.place.rows(len(parameter))
            for others in (slice(0, own.start), slice(own.stop, len(parameter))):
                targets.append(parameter.detach()[others])
                values.append(parameter.grad[others])
        if targets:
            torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]
        self._forget_gradients()


class Shards(Divided):
    """A shard of every weight in each process."""

    def __init__(self, world: World, forward: Forward) -> None:
        self.loss_factor = float(world.size)  # FSDP2 averages gradients, and gloo can't scale while it reduces
        setattr(forward.model, METHOD, forward.scores)
        register_fsdp_forward_method(forward.model, METHOD)
        forward.scores = getattr(forward.model, METHOD)  # type: ignore[method-assign]
        super().__init__(world, forward)
        self.place = Place(world.rank, world.size)
        trained = [(name, whole) for name, whole in self._model.named_parameters() if whole.requires_grad]
        self.parts = []
        for number, (name, whole) in enumerate(trained):
            assert isinstance(whole.data, DTensor)
            own = Parameter(whole.data.to_local())  # on the same memory
            if own.numel():
                self.parts.append(Part(name, number, own, whole))
        self.parameters = self.written = [part.own for part in self.parts]
        self.names = [part.name for part in self.parts]

    def passes(self, own: int) -> int:
        return max(self._world.gather(own))

    def finish_gradients(self) -> None:
        for part in self.parts:
            gradient = part.whole.grad
            assert gradient is None or isinstance(gradient, DTensor)
            part.own.grad = None if gradient is None else gradient.to_local()
            part.whole.grad = None

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TensorShards(Divided):
    """This process's shard of a model that `cut_model` has cut. The memory of `trained` may be another process's."""

    in_two_parts = True
    same_batch = True

    def __init__(self, world: World, forward: Forward, trained: Sequence[Parameter], shard: ModelShard) -> None:
        super().__init__(world, forward)
        self._prepared = False  # the gradients' memory has new weights that are not written yet
        self._shard = shard
        self.parameters = self.written = list(trained)
        self.names = names_in(self._model, self.parameters)
        pairs = list(zip(self.names, self.parameters, strict=True))
        self._everywhere = [parameter for name, parameter in pairs if name not in shard.cuts]
        self._partial = [parameter for name, parameter in pairs if name in shard.partial]
        self._counted = [parameter for name, parameter in pairs if world.leads or name in shard.cuts]

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        own = tensor if tensor.grad is None or not self._prepared else tensor.grad.to(tensor.dtype)
        return self._shard.gathered(name, own.detach())

    def finish_gradients(self) -> None:
        """Sum the gradients of norms of heads, of which each process computes a part for its heads."""
        self._world.sum_gradients(self._partial)

    def clip(self, limit: float) -> float:
        """Clip by the norm of all shards' gradients; parameters that all processes have count once."""
        return self._world.clip(self.parameters, limit, self._counted)

    @torch.no_grad()
    def share_update(self) -> None:
        """Send rank 0's new values of parameters that all processes have."""
        in_buckets([p.grad for p in self._everywhere if p.grad is not None], lambda flat: dist.broadcast(flat, 0))
        self._prepared = True

    def finish_update(self) -> None:
        self._prepared = False

    def check(self, samples: Sequence[Tensor]) -> None:
        """Check the parameters that all processes have."""
        if self._everywhere:
            self._world.check_agreement(sampled(self._everywhere))

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's `state_dict` as one process with all weights has it, in rank 0's main memory.

        All processes call it; the other ranks return no states. States in 8 bits are encoded again, in blocks of the
        whole tensors.
        """
        found: States = {}
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            state = dict(optimizer.state.get(parameter, {}))
            whole = _changed(state, parameter.shape, lambda own, name=name: self._shard.gathered(name, own))
            if self._world.leads and whole:
                found[number] = {key: v.cpu() if isinstance(v, Tensor) else v for key, v in whole.items()}
        return {**optimizer.state_dict(), "state": found}

    def own_states(self, whole: States) -> States:
        """Return this process's part of the states that one process with all weights has."""
        found: States = {}
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            shape = self._shard.whole_shape(name, parameter)
            own = _changed(whole.get(number, {}), shape, lambda value, name=name: self._shard.own(name, value).clone())
            if own:
                found[number] = own
        return found

    def whole_parts(self) -> list[Part]:
        """Return parts of whole parameters, to read states that several processes have written in other parts."""
        parts = []
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            whole = nn.Parameter(torch.empty(self._shard.whole_shape(name, parameter), dtype=parameter.dtype))
            parts.append(Part(name, number, whole, whole))
        return parts

    def save_states(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: rank 0 has gathered the states (`states`) and writes them with the rest."""


def _changed(state: dict[str, Any], shape: Sequence[int], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a parameter's states with those of its shape changed, for example cut."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key + SCALE in state:
            levels, midpoints = levels_of(SIGNED[key], value.device)
            new = change(decoded(value, state[key + SCALE], levels).view(*shape))
            found[key], found[key + SCALE] = encoded(new.reshape(-1), midpoints)
        elif not key.endswith(SCALE):
            found[key] = change(value) if isinstance(value, Tensor) and value.ndim else value
    return found


ShardedStates = Shards | ShardedUpdate | TensorShards
"""Strategies with a shard of the optimizer states in each process."""


def hold(
    world: World,
    model: nn.Module,
    config: TrainConfig,
    trained: Sequence[Parameter],
    before_measuring: Callable[[], None] = lambda: None,
) -> ParallelStrategy:
    """Return this process's holding of a model, whole or sharded already, with the forward pass ready for steps.

    `trained` are the model's trained parameters, in the model's order: optimizer states are saved by their numbers.

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
