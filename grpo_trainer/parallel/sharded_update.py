"""All weights in each process, but the update of each weight is computed by one of them.

Each process owns some rows of every trained parameter (`Place.rows`, as FSDP2 shards them) and the optimizer states of
these rows. A step:

    gradients ─ reduce: each rank gets the sums of its rows ─▶ optimizer: new rows, in the gradients' memory
              ─ broadcast: each rank sends its new rows into the gradients' memory of the others ─▶ written in the fence

So the weights are rounded stochastically once, by their owner, and every rank writes the same bits. Beyond gradients
and states this takes a buffer of at most `BUCKET_BYTES`. Source: ZeRO stages 1 and 2 (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from grpo_trainer.engine.collectives import peers
from grpo_trainer.engine.forward import Forward
from grpo_trainer.optim.adamw import hand_out, joined
from grpo_trainer.parallel.shard_states import Part, Place, save_states
from grpo_trainer.parallel.strategy import ParallelStrategy, names_in
from grpo_trainer.parallel.world import World, buckets


class ShardedUpdate(ParallelStrategy):
    """A replica whose optimizer updates only its own rows.

    Args:
        forward: the forward pass of a whole model.
        trained: the model's trained parameters, in the model's order; their memory may be another process's.

    Attributes:
        place: this process's rank, and the number of processes.
        parts: this process's rows of the trained parameters, without empty ones, in the optimizer's order.
        written: the whole trained parameters.
    """

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
        """Return a view of the rows that a rank owns."""
        rows = Place(rank, self.place.count).rows(len(tensor))
        return tensor[rows.start : rows.stop]

    # ------------------------------------------------------------------------------------------ steps

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
        """Send the gradients' rows of each rank, a bucket at a time.

        Args:
            send: the collective operation on the rows of the given rank, joined.
            into: whether this process takes over the result for a rank's rows.
        """
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

    def clip(self, limit: float) -> float:
        """Clip the gradients of the own rows by the norm of all rows of all ranks."""
        return self._world.clip(self.parameters, limit)

    def check(self, samples: Sequence[Tensor]) -> None:
        self._world.check_agreement(samples)

    # ------------------------------------------------------------------------------------------ checkpoints

    def save_states(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write the optimizer's states, each process its part: see `shard_states.save_states`."""
        save_states(self._world, folder, self.parts, optimizer, self.place)
