"""Several trainer processes as one: each has a GPU and a share of each batch. `strategies.py` has the weights of each.

All ranks run the same program (`loop.py`), so they make the same calls in the same order. What only one may do, because
it concerns the rollout API, a server or the disk, is done within `lead`: rank 0 does it, and all get its value or raise
its error.

    rank 0   lease ─▶ scatter ─▶ own share ─┐                      ┌─▶ update ─▶ lead: publish, log, save
                         │                  ├─ gradients are summed ┤                │
    rank 1…           scatter ─▶ own share ─┘                      └─▶ update ─▶ lead: wait for rank 0

Every token's weight in the loss is that of the whole batch, so gradients are summed, not averaged. After that all ranks
do the same arithmetic on the same numbers. Each step checks that replicas still agree.

An error that all ranks raise (`common`) leaves them in step: they can still save together. Any other error is one
rank's alone. The exit of its process then ends the others, which say what it said. On its way out that rank must not
take part in any operation: the others are in another one, and the two would wait for each other.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_trainer.config.train import BUCKET_BYTES, DistributedConfig
from grpo_trainer.engine.collectives import last_words, leave_words, peer_gone, peers
from grpo_trainer.errors import ConfigError, GrpoError, PeerGoneError, TrainingError, WeightsError
from grpo_trainer.optim.adamw import hand_out, joined

log = logging.getLogger(__name__)

PEER_SECONDS = 600.0
"""Time limit for other ranks to arrive, at the start and in each collective operation on tensors."""

PATIENCE = timedelta(days=30)
"""Time limit for what rank 0 leads: practically none, because its waits, as for rollouts, have their own limits."""

T = TypeVar("T")
Failed = TypeVar("Failed", bound=Exception)


class World:
    """The processes of one trainer. A context manager, which all ranks leave together.

    With a single process, all methods do nothing.
    """

    def __init__(self, rank: int = 0, size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.control = control  # for objects in main memory; None: there is only one process
        self.gpus: list[str] = []  # UUIDs of the GPUs of several processes, by rank; empty on CPUs
        self._is_leading = False
        self._common: BaseException | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Leave with the other ranks. An error that all have raised is rank 0's to report."""
        if self.alone:
            return False
        if error is not None and not self.is_common(error):
            if isinstance(error, RuntimeError) and not isinstance(error, GrpoError) and (why := last_words()):
                raise peer_gone(why) from error  # an operation of FSDP's own with a process that is gone
            if not isinstance(error, PeerGoneError):
                leave_words(f"rank {self.rank}: {error or type(error).__name__}")
            return False  # the exit of this process ends the others
        try:
            self.barrier()  # no operation may be running when the groups are destroyed
        except PeerGoneError as gone:
            log.warning("could not end in order with the other trainer processes: %s", gone)
        dist.destroy_process_group()
        # Dropping the last reference waits for the group's threads. A thread that frees a Python tensor while the
        # interpreter shuts down would end the process by SIGABRT.
        self.control = None
        if error is not None and not self.leads:
            log.info("all trainer processes end, as rank 0 reports: %s", error)
            return True
        return False

    # ------------------------------------------------------------------------------------------- what one does

    def lead(self, do: Callable[[], T]) -> T:
        """Return on all ranks what `do` returns on rank 0, or raise what it raises there.

        Within `do`, `lead` is a plain call; `do` must not call what takes the other ranks.

        Raises:
            PeerGoneError: another rank has ended.
        """
        if self.alone or self._is_leading:
            return do()
        own = self._outcome(do) if self.leads else None
        said: list[Any] = [own and _portable(own)]
        with peers():
            dist.broadcast_object_list(said, src=0, group=self.control)
        return self._result(own or said[0])  # rank 0 keeps its own objects

    def scatter(self, do: Callable[[], Sequence[T] | None]) -> T | None:
        """Return on each rank its own of the values that `do` returns on rank 0, by rank, or raise what it raises.

        None on all ranks if `do` returns None.
        """
        if self.alone:
            values = do()
            return None if values is None else values[0]
        outcomes: list[Any] | None = None
        if self.leads:
            values, error = self._outcome(do)
            outcomes = [(None, error)] * self.size if values is None else [(value, None) for value in values]
        said: list[Any] = [None]
        with peers():
            rest = None if outcomes is None else [(None, None), *map(_portable, outcomes[1:])]
            dist.scatter_object_list(said, rest, src=0, group=self.control)
        return self._result(said[0] if outcomes is None else outcomes[0])

    def only_first(self, make: Callable[[], T]) -> T:
        """On rank 0, return what only it has, for use within `lead`; on the others None, which nothing uses."""
        return make() if self.leads else cast(T, None)

    def _outcome(self, do: Callable[[], T]) -> tuple[T | None, Exception | None]:
        self._is_leading = True
        try:
            return do(), None
        except Exception as error:
            return None, error
        finally:
            self._is_leading = False

    def _result(self, outcome: tuple[Any, Exception | None]) -> Any:
        value, error = outcome
        if error is not None:
            raise self.common(error)
        return value

    # ------------------------------------------------------------------------------------------- errors of all

    def common(self, error: Failed) -> Failed:
        """Note that all ranks raise this error at the same place, so that they remain in step; return it."""
        self._common = error
        return error

    def is_common(self, error: BaseException) -> bool:
        """Return whether all ranks have raised an error, so that they can still do something together."""
        return self.alone or error is self._common

    def failed_after(self, error: BaseException, later: BaseException) -> None:
        """Note that `later` was met, and not raised, while all handled an error that all had raised.

        They are still in step only if all have met `later`.
        """
        self._common = error if self.is_common(later) else None

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Enter a block in which all ranks do the same with the same values, and so raise the same errors."""
        try:
            yield
        except PeerGoneError:
            raise
        except GrpoError as error:
            self.common(error)
            raise

    # ------------------------------------------------------------------------------------------- together

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank; for small objects in main memory."""
        if self.alone:
            return [value]
        said: list[Any] = [None] * self.size
        with peers():
            dist.all_gather_object(said, value, group=self.control)
        return said

    def barrier(self) -> None:
        self.gather(None)

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

        This rank counts only `counted`, if others count the rest of its parameters.
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

        Raises:
            WeightsError: weights differ; on all ranks, and the message names those that differ from rank 0.
        """
        if self.alone:
            return
        own_sums = []
        for sample in samples:  # each entry counts by its place, so that exchanged rows change the sum
            places = torch.linspace(1.0, 2.0, len(sample), dtype=torch.float64, device=sample.device)
            own_sums.append((sample.double() * places).sum())
        sums = self.gather([str(value) for value in torch.stack(own_sums).tolist()])  # as text, so that NaN equals NaN
        if different := [rank for rank, own in enumerate(sums) if own != sums[0]]:
            raise self.common(
                WeightsError(
                    f"other weights than rank 0 {when}",
                    field="trainer processes",
                    got=f"rank {', '.join(map(str, different))}",
                    fix="resume from the last checkpoint with --resume auto",
                )
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


def _portable(outcome: tuple[Any, Exception | None]) -> tuple[Any, Exception | None]:
    """Return an outcome whose error other processes can read; an error that can't be pickled becomes its text."""
    value, error = outcome
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return value, TrainingError(f"rank 0: {type(error).__name__}: {error}")
    return outcome
