"""Several trainer processes as one: each has a GPU and a share of each batch. `strategies.py` has the weights of each.

Rank 0 leads. It runs the loop as if it were alone, and only rank 0 uses the rollout API, the server and the disk.
Work of all ranks begins with an *order* that rank 0 sends to the others, which only wait for orders (`follower.py`):

    rank 0   lease ─▶ give(Step) ─▶ own share ─┐                      ┌─▶ update ─▶ publish, save
                          │                    ├─ gradients are summed ┤
    rank 1…            receive  ─▶ own share ──┘                      └─▶ update ─▶ receive

Every token's weight in the loss is that of the whole batch, so gradients are summed, not averaged. After that all ranks
do the same arithmetic on the same numbers. Each step checks that replicas still agree.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_trainer.batch.batching import ReadyBatch
from grpo_trainer.batch.microbatches import MicroBatch
from grpo_trainer.config.train import BUCKET_BYTES, DistributedConfig
from grpo_trainer.engine.collectives import peers
from grpo_trainer.errors import (
    CommonDriftError,
    CommonError,
    CommonWeightsError,
    ConfigError,
    DriftError,
    PeerGoneError,
    TrainingError,
)
from grpo_trainer.optim.adamw import hand_out, joined

log = logging.getLogger(__name__)

PEER_SECONDS = 600.0
"""Time limit for other ranks to arrive, at the start and in each collective operation on tensors."""

PATIENCE = timedelta(days=30)
"""Time limit of followers for an order: practically none, because rank 0's wait for rollouts has its own limit."""

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """Train on a share of a batch."""

    share: ReadyBatch
    step: int


@dataclass(frozen=True)
class Restore:
    """Load a checkpoint."""

    path: Path


@dataclass(frozen=True)
class ModelPass:
    """Sharded weights only: a forward pass of the model itself, without gradient; the tokens are in main memory."""

    tokens_BT: Tensor


@dataclass(frozen=True)
class Score:
    """Sharded weights only: compute scores of a microbatch, without gradient."""

    microbatch: MicroBatch


@dataclass(frozen=True)
class Collect:
    """Sharded weights only: gather the tensors one after the other, for rank 0 to save."""


@dataclass(frozen=True)
class CollectStates:
    """Tensor parallel only: gather the optimizer's states one after the other, for rank 0 to save."""


@dataclass(frozen=True)
class SaveStates:
    """Sharded weights only: write this process's part of the optimizer's states into a folder."""

    folder: Path


@dataclass(frozen=True)
class Tend:
    """Shared weights only: do for the own server what rank 0's bridge does for its own (`PairedBridge.tend`).

    Attributes:
        version: the version of the trainer's weights, by rank 0's count.
    """

    what: Literal["connect", "prove"]
    version: int = 0


@dataclass(frozen=True)
class Vary:
    """Sharded weights only: make the synthetic change of a bridge's proof, of this size; None: undo it."""

    size: float | None


@dataclass(frozen=True)
class End:
    """The last order."""


Command = Step | Restore | ModelPass | Score | Collect | CollectStates | SaveStates | Tend | Vary | End


class World:
    """The processes of one trainer. A context manager: its exit on rank 0 ends the others.

    Attributes:
        rank: rank of this process, from 0.
        size: number of processes; with 1, all methods do nothing.
        control: the process group for objects in main memory; None: there is only one process.
        gpus: UUIDs of the GPUs of several processes, by rank; empty on CPUs.
    """

    def __init__(self, rank: int = 0, size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.control = control
        self.gpus: list[str] = []
        self._is_working = False

    @property
    def leads(self) -> bool:
        """Whether this process sends the orders."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def is_working(self) -> bool:
        """Whether all processes are within common work, where the others receive no order."""
        return self._is_working and not self.alone

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.alone or self._is_working or (error is not None and not self.leads):
            return  # the others don't wait for an order; the exit of this process ends them
        try:
            if self.leads:
                self.give_all(End())
            self.gather(None)  # no operation may be running when the groups are destroyed
        except PeerGoneError as gone:  # that ended the run before this
            log.warning("could not end the other trainer processes in order: %s", gone)
        dist.destroy_process_group()
        # Dropping the last reference waits for the group's threads. A thread that frees a Python tensor while the
        # interpreter shuts down would end the process by SIGABRT.
        self.control = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Enter a block of common work: all processes run it, and leave it normally or all by the same `CommonError`.

        Any other error concerns a single process, whose exit then ends the others.
        """
        self.begin()
        try:
            yield
        except CommonError:
            self.end()
            raise
        self.end()

    def begin(self) -> None:
        """Begin common work of all processes, as `working` does."""
        self._is_working = True

    def end(self) -> None:
        """End common work: all processes are done, or have raised the same error."""
        self._is_working = False

    # ------------------------------------------------------------------------------------------- orders

    def give(self, orders: Sequence[Command]) -> None:
        """On rank 0: send each of the others its order, by rank."""
        if not self.alone:
            assert self.leads and len(orders) == self.size - 1
            with peers():
                dist.scatter_object_list([None], [None, *orders], src=0, group=self.control)

    def give_all(self, order: Command) -> None:
        """On rank 0: send the same order to all others."""
        self.give([order] * (self.size - 1))

    def receive(self) -> Command:
        """On the others: wait for the next order.

        Raises:
            TrainingError: rank 0 has exited without a last order.
        """
        said: list[Any] = [None]
        with peers():
            dist.scatter_object_list(said, None, src=0, group=self.control)
        return said[0]

    # ----------------------------------------------------------------------------------------- together

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank; for small objects in main memory."""
        if self.alone:
            return [value]
        said: list[Any] = [None] * self.size
        with peers():
            dist.all_gather_object(said, value, group=self.control)
        return said

    def raise_together(self, look: Callable[[], None]) -> None:
        """Call `look` on rank 0; if it raises a `DriftError`, raise that on all ranks.

        Raises:
            CommonDriftError: the samples have drifted; on all ranks.
        """
        if self.alone:
            look()
            return
        said = None
        if self.leads:
            try:
                look()
            except DriftError as drift:
                said = drift.problems
        if (verdict := self.gather(said)[0]) is not None:
            raise CommonDriftError.of(verdict)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of all ranks; a rank without a gradient for a parameter counts as zeros."""
        if self.alone:
            return
        self.fill_gradients(parameters)
        in_buckets([parameter.grad for parameter in parameters if parameter.grad is not None], dist.all_reduce)

    def clip(
        self,
        parameters: Sequence[torch.nn.Parameter],
        limit: float,
        counted: Sequence[torch.nn.Parameter] | None = None,
    ) -> float:
        """Clip gradients of which each rank has a part, by the norm of all parts; return that norm.

        Args:
            counted: the parameters that this rank counts, if others count some of its parameters.
        """
        gradients = [own.grad for own in parameters if own.grad is not None]
        own_part = parameters if counted is None else counted
        summed = [own.grad for own in own_part if own.grad is not None]
        # In fp32, as the norm of gradients in 16 bits would be rounded to 16 bits.
        norms = torch._foreach_norm(summed, 2, torch.float32) if summed else []  # pyright: ignore[reportPrivateImportUsage]
        own_square = float(torch.stack(list(norms)).double().square().sum()) if summed else 0.0
        norm = math.sqrt(sum(self.gather(own_square)))
        if norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def fill_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Give a parameter that has a gradient on some ranks only a gradient of zeros on the others."""
        given = self.gather([parameter.grad is not None for parameter in parameters])
        for index, parameter in enumerate(parameters):
            if parameter.grad is None and any(each[index] for each in given):
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)

    def check_agreement(self, samples: Sequence[Tensor], when: str = "after the same step") -> None:
        """Check by some entries that all ranks hold the same weights.

        Args:
            when: completes the message.

        Raises:
            CommonWeightsError: weights differ; on all ranks, and the message names those that differ from rank 0.
        """
        if self.alone:
            return
        own_sums = torch.stack([_checksum(sample) for sample in samples])
        sums = self.gather([str(value) for value in own_sums.tolist()])  # as text, so that NaN equals NaN
        if different := [rank for rank, own in enumerate(sums) if own != sums[0]]:
            raise CommonWeightsError(
                f"other weights than rank 0 {when}",
                field="trainer processes",
                got=f"rank {', '.join(map(str, different))}",
                fix="resume from the last checkpoint with --resume auto",
            )


@torch.no_grad()
def in_buckets(tensors: Iterable[Tensor], operate: Callable[[Tensor], object]) -> None:
    """Apply a collective operation, which changes a flat tensor in place, to tensors; a bucket at a time."""
    for bucket in buckets(tensors):
        flat = joined(bucket)
        with peers():
            operate(flat)
        hand_out(flat, bucket)


def buckets(tensors: Iterable[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Return tensors in buckets of one dtype, each of up to `limit` bytes unless a single tensor is larger."""
    by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        made = by_dtype.setdefault(tensor.dtype, [[]])
        if made[-1] and sum(each.nbytes for each in made[-1]) + tensor.nbytes > limit:
            made.append([])
        made[-1].append(tensor)
    return [bucket for made in by_dtype.values() for bucket in made]


def join(config: DistributedConfig, *, on_gpu: bool) -> World:
    """Connect to the other processes, if any: by the options, else by torchrun's environment variables.

    Raises:
        ConfigError: there is no GPU for this rank.
        TrainingError: the other processes did not connect.
    """
    rank, size = config.rank, config.processes
    if size == 1:
        return World()
    gpus = torch.cuda.device_count() if on_gpu else 0
    local = int(os.environ.get("LOCAL_RANK", rank % gpus if gpus else rank))
    if on_gpu:
        if local >= gpus:
            raise ConfigError(
                field=f"rank {rank} of {size}",
                got=f"{gpus} visible GPUs",
                wanted=f"GPU number {local}, for this process alone",
                fix="start fewer processes",
            )
        torch.cuda.set_device(local)
    method = config.init_method or "env://"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PEER_SECONDS),
            device_id=torch.device("cuda", local) if on_gpu else None,
        )
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(control, dist.ProcessGroup)
    except (RuntimeError, ValueError) as error:
        why, first_line = f"the trainer's processes did not meet at {method}", str(error).strip().partition("\n")[0]
        raise TrainingError(why, field=f"rank {rank} of {size}", got=first_line) from None
    log.info("rank %d of %d trainer processes", rank, size)
    world = World(rank, size, control)
    if on_gpu:
        world.gpus = world.gather(str(torch.cuda.get_device_properties(local).uuid))
    return world


def _checksum(sample: Tensor) -> Tensor:
    """Return a sum in which each entry counts by its place, so that exchanged rows change it."""
    places = torch.linspace(1.0, 2.0, len(sample), dtype=torch.float64, device=sample.device)
    return (sample.double() * places).sum()
