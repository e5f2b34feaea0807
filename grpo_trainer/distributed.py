"""Several trainer processes as one: a GPU each, each with its share of a batch; what they hold, `sharding.py` says.

Rank 0 leads. It runs the loop as if it were alone, and it alone speaks with the rollout API, the server and the disk.
What takes all ranks begins with an *order* that it gives to the others, who wait for nothing else (`follower.py`):

    rank 0   lease ─▶ give(Step) ─▶ own share ─┐                      ┌─▶ update ─▶ publish, save
                          │                    ├─ gradients added up ─┤
    rank 1…            receive  ─▶ own share ──┘                      └─▶ update ─▶ receive

Every token's weight in the loss is that of the whole batch, so gradients are summed, not averaged. After that all ranks
do the same arithmetic on the same numbers; whether those that hold all weights still agree is looked at in each step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_trainer.batch.batching import ReadyBatch
from grpo_trainer.batch.microbatches import MicroBatch
from grpo_trainer.config.distributed import DistributedConfig
from grpo_trainer.errors import ConfigError, DriftError, GrpoError, TrainingError

log = logging.getLogger(__name__)

PEER_SECONDS = 600.0
"""Until the others have come, at the start and wherever tensors are added up."""

PATIENCE = timedelta(days=30)
"""A follower may wait as long as the leader waits for rollouts; that has a limit of its own."""

BUCKET_BYTES = 256 << 20
"""Gradients are added up in buffers of this size."""

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
    """Of weights that are cut: a forward pass of the model itself, without gradient; the tokens in main memory."""

    tokens_BT: Tensor


@dataclass(frozen=True)
class Score:
    """Of weights that are cut: scores of a microbatch, without gradient."""

    microbatch: MicroBatch


@dataclass(frozen=True)
class Collect:
    """Of weights that are cut: bring them together, one after the other, for rank 0 to save."""


@dataclass(frozen=True)
class SaveStates:
    """Of weights that are cut: write this process's part of the optimizer's states into a folder."""

    folder: Path


@dataclass(frozen=True)
class End:
    """Nothing more will come."""


Order = Step | Restore | ModelPass | Score | Collect | SaveStates | End


class World:
    """The processes of one trainer. A context manager: when rank 0 leaves it, the others are let go.

    Attributes:
        rank: of this process, from 0.
        size: how many there are; 1: this one is alone, and nothing here does anything.
        control: the group in which what lies in main memory is said; None: there is nobody.
    """

    def __init__(self, rank: int = 0, size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.control = control
        self._is_working = False

    @property
    def leads(self) -> bool:
        """Whether this is the process that all others follow."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def is_working(self) -> bool:
        """Whether the others are within what takes all processes, where they hear no order."""
        return self._is_working and not self.alone

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.alone or self._is_working or (error is not None and not self.leads):
            return  # the others wait for other things than orders or an end: ours is theirs
        try:
            if self.leads:
                self.give_all(End())
            self.gather(None)  # nothing is under way any more when the groups are taken down
        except PeerGoneError as gone:  # that ended the run before this
            log.warning("the other trainer processes could not be told of the end: %s", gone)
        dist.destroy_process_group()
        # The last reference: the group's threads are waited for. One that lets go of a tensor of Python's while the
        # interpreter ends would end the process by SIGABRT.
        self.control = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the block all processes do the same, and end it the same way: well, or by a `CommonError`.

        Any other is of one of them, which leaves at once: its end is the others'.
        """
        self.begin()
        try:
            yield
        except CommonError:
            self.end()
            raise
        self.end()

    def begin(self) -> None:
        """From here on all processes do the same, as in `working`."""
        self._is_working = True

    def end(self) -> None:
        """All have done it, or met the same error."""
        self._is_working = False

    # ------------------------------------------------------------------------------------------- orders

    def give(self, orders: Sequence[Order]) -> None:
        """On rank 0: tell each of the others what to do, by rank."""
        if not self.alone:
            assert self.leads and len(orders) == self.size - 1
            with peers():
                dist.scatter_object_list([None], [None, *orders], src=0, group=self.control)

    def give_all(self, order: Order) -> None:
        """On rank 0: the same for all others."""
        self.give([order] * (self.size - 1))

    def receive(self) -> Order:
        """On the others: wait for what to do.

        Raises:
            TrainingError: rank 0 has ended without a word.
        """
        said: list[Any] = [None]
        with peers():
            dist.scatter_object_list(said, None, src=0, group=self.control)
        return said[0]

    # ----------------------------------------------------------------------------------------- together

    def gather(self, value: T) -> list[T]:
        """What all ranks say, on all of them, by rank; small things in main memory."""
        if self.alone:
            return [value]
        said: list[Any] = [None] * self.size
        with peers():
            dist.all_gather_object(said, value, group=self.control)
        return said

    def raise_together(self, look: Callable[[], None]) -> None:
        """Do something on rank 0; if that says that samples have drifted, all do.

        Raises:
            CommonDriftError: on all ranks.
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
        """Add up what all ranks have; one that has none has zeros."""
        if self.alone:
            return
        given = self.gather([parameter.grad is not None for parameter in parameters])
        for index, parameter in enumerate(parameters):
            if parameter.grad is None and any(each[index] for each in given):
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        for bucket in buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            with peers():
                dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
            )

    def check_agreement(self, samples: Sequence[Tensor]) -> None:
        """Show that all ranks hold the same weights, by entries of theirs.

        Raises:
            CommonWeightsError: on all ranks, naming those that differ.
        """
        if self.alone:
            return
        own_sums = torch.stack([sample.double().sum() for sample in samples])
        sums = self.gather([str(value) for value in own_sums.tolist()])  # as text: one nan is another
        if different := [rank for rank, own in enumerate(sums) if own != sums[0]]:
            raise CommonWeightsError(
                "other weights than rank 0 after the same step",
                field="trainer processes",
                got=f"rank {', '.join(map(str, different))}",
                fix="go on from the last checkpoint with --resume auto",
            )


class CommonError(GrpoError):
    """Met by all processes, at the same place and for the same reason: they are as one after it as before."""


class CommonTrainingError(CommonError, TrainingError):
    """Training can't go on, as all processes have found."""


class CommonWeightsError(CommonTrainingError):
    """The weights themselves are not what they should be, as all processes have found."""

    spoils_weights = True


class CommonDriftError(CommonError, DriftError):
    """Samples have drifted, as all processes know."""


class PeerGoneError(TrainingError):
    """Another process of this trainer has ended."""


@contextmanager
def peers() -> Iterator[None]:
    """Around what takes the other processes: if one is gone, that is said in words."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as gone:
        raise PeerGoneError(
            "another one has ended, its log says why",
            field="trainer processes",
            got=_first_line(gone),
            fix="go on with --resume auto",
        ) from None


def buckets(tensors: Iterable[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Tensors of one dtype together, up to `limit` bytes unless a single one is larger."""
    by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        made = by_dtype.setdefault(tensor.dtype, [[]])
        if made[-1] and sum(each.nbytes for each in made[-1]) + tensor.nbytes > limit:
            made.append([])
        made[-1].append(tensor)
    return [bucket for made in by_dtype.values() for bucket in made]


def join(config: DistributedConfig, *, on_gpu: bool) -> World:
    """Meet the other processes, if there are to be any: by the options, else by torchrun's environment variables.

    Raises:
        ConfigError: there is no GPU for this rank.
        TrainingError: the others did not come.
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
        raise TrainingError(
            f"the trainer's processes did not meet at {method}", field=f"rank {rank} of {size}", got=_first_line(error)
        ) from None
    log.info("rank %d of %d trainer processes", rank, size)
    return World(rank, size, control)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
