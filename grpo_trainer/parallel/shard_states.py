"""Optimizer states of weights that are sharded over several processes, by `torch.distributed.checkpoint`.

Each process writes its part into one folder, and any number of processes can read their parts from it. A state of its
parameter's shape is sharded as the parameter is: `NAME/exp_avg`, or `NAME/exp_avg/flat` if the optimizer holds it flat.
A single number is the same on all ranks: `NAME/step`. The scales of 8-bit blocks have another shape and belong to one
rank: `NAME/exp_avg_scale/0of2`. If the number of processes changes, blocks begin at other elements, so each process
recomputes its scales from those of all writers.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from grpo_trainer.engine.collectives import peers
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import honest_file
from grpo_trainer.model.export import own_rows
from grpo_trainer.optim.eight_bits import SCALE, SIGNED, Scaled, recoded
from grpo_trainer.parallel.world import World

STATES_FOLDER = "optimizer_states"
FLAT = "flat"

States = dict[int, dict[str, Any]]
"""Index of a parameter in the optimizer -> its states, as in the optimizer's `state_dict`."""


@dataclass(frozen=True)
class Part:
    """This process's part of a trained parameter."""

    name: str
    number: int  # among the model's trained parameters
    own: Parameter  # that the optimizer updates
    whole: Tensor  # the model's sharded parameter; `own` itself if the model is not sharded

    def shard_alike(self, own: Tensor) -> Tensor:
        """Return a tensor of `own`'s shape as this process's shard of a tensor that is sharded like the parameter."""
        if not isinstance(self.whole, DTensor):
            return own
        mesh, placements = self.whole.device_mesh, self.whole.placements
        return DTensor.from_local(
            own, mesh, placements, run_check=False, shape=self.whole.shape, stride=self.whole.stride()
        )


def whole_parts(model: nn.Module) -> list[Part]:
    """Return the parts of a model that is not sharded: each is a whole parameter."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [Part(name, number, own, own) for number, (name, own) in enumerate(trained)]


@dataclass(frozen=True)
class Place:
    """The rank of a process, and the number of processes that the states are sharded over."""

    rank: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.rank}of{self.count}"

    @classmethod
    def parsed(cls, text: str) -> Place:
        """Return the place that `str` wrote as `text`."""
        rank, _, count = text.partition("of")
        return cls(int(rank), int(count))

    def rows(self, count: int) -> range:
        """Return this rank's rows of `count` rows, as FSDP2 shards them."""
        each = -(-count // self.count)
        return range(min(self.rank * each, count), min((self.rank + 1) * each, count))


# ---------------------------------------------------------------- writing


def save_states(
    world: World, folder: Path, parts: Sequence[Part], optimizer: torch.optim.Optimizer, place: Place
) -> None:
    """Write this process's part. All processes call this together, and all parts are on the disk on return.

    Raises:
        OSError: a process could not write; all processes raise it, with `filename`.
    """
    tensors = {key: value for part in parts for key, value in _named(part, optimizer.state[part.own], place)}
    writer = FileSystemWriter(folder / STATES_FOLDER)
    writer.fs = _HonestFiles()
    try:
        with peers():
            save(tensors, storage_writer=writer, process_group=world.control)
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        number, why = errno.EIO, f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno is not None:
            number, why = error.errno, error.strerror
        raise world.common(OSError(number, f"trainer process {rank}: {why}", str(folder / STATES_FOLDER))) from None


def _named(part: Part, state: Mapping[str, Any], place: Place) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        name = f"{part.name}/{key}"
        if not isinstance(value, Tensor):
            yield name, torch.tensor(value, dtype=torch.int64)
        elif key.endswith(SCALE):  # first: a part of a single value has a single scale, which is of its shape
            yield f"{name}/{place}", value
        elif value.shape == part.own.shape:
            yield name, part.shard_alike(value)
        elif not value.ndim:
            yield name, value
        else:
            yield f"{name}/{FLAT}", part.shard_alike(value.view(part.own.shape))


class _HonestFiles(FileSystem):
    """Files that raise their first error itself; torch turns the error of a full disk into others."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        assert mode == "wb"
        with honest_file(Path(path)) as stream:
            yield stream


# ---------------------------------------------------------------- reading


def read_states(path: Path, parts: Sequence[Part], place: Place) -> States:
    """Return this process's part of states that any number of processes wrote, without communication.

    A parameter without written states gets none. The caller has checked that the same parameters are trained.

    Raises:
        ConfigError: the states can't be read.
    """
    reader = FileSystemReader(path / STATES_FOLDER)
    by_name = {part.name: (number, part) for number, part in enumerate(parts)}
    targets: dict[str, Tensor] = {}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        name, _, *more = key.split("/")
        assert isinstance(saved, TensorStorageMetadata)
        if name not in by_name:
            continue
        writer = place if more in ([], [FLAT]) else Place.parsed(more[0])
        if writer == place or writer.count != place.count:  # all scales, if another number of processes wrote them
            part, dtype = by_name[name][1], saved.properties.dtype
            if len(saved.size) and saved.size == part.whole.shape:
                targets[key] = part.shard_alike(torch.empty(part.own.shape, dtype=dtype, device=part.own.device))
            else:
                targets[key] = torch.empty(saved.size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended: all read alone
        try:
            load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as failed:  # a BaseException, which `except Exception` would miss
            ((error, _),) = failed.failures.values()
            raise ConfigError(
                "the states of its optimizer can't be read",
                field=f"--resume {path}",
                got=f"{type(error).__name__}: {error}",
                fix="resume from another checkpoint",
            ) from None
    states: States = {number: {} for number in range(len(parts))}
    scales: dict[tuple[int, str], dict[Place, Tensor]] = {}
    for key, value in targets.items():
        name, state, *more = key.split("/")
        own: Any = value.to_local() if isinstance(value, DTensor) else value
        if own is value and value.ndim == 0 and value.dtype == torch.int64:
            own = int(value)  # a step count, which the optimizer holds as a Python number
        number = by_name[name][0]
        if more in ([], [FLAT]) or Place.parsed(more[0]) == place:
            states[number][state] = own.flatten() if more else own
        else:
            scales.setdefault((number, state.removesuffix(SCALE)), {})[Place.parsed(more[0])] = own
    for (number, state), written in scales.items():
        _reshard(parts[number], state, states[number], written)
    return {number: state for number, state in states.items() if state}


def _reshard(part: Part, name: str, state: dict[str, Any], written: Mapping[Place, Tensor]) -> None:
    """Re-encode an 8-bit state in the blocks of this process's part, from the scales of each writer's rows."""
    shape, own = part.whole.shape, tuple(part.own.shape)
    row = shape[1:].numel()
    known = []
    for place, scales in written.items():
        rows = place.rows(shape[0])
        known.append(Scaled(scales, (len(rows), *shape[1:]), rows.start * row))
    first = (own_rows(part.whole).start if isinstance(part.whole, DTensor) else 0) * row
    signed = SIGNED[name]
    state[name], state[name + SCALE] = recoded(state[name], known, own, first, signed=signed)


def reshard_states(states: States, parts: Sequence[Part]) -> States:
    """Return this process's part of the whole states that a single process has written."""
    found: States = {}
    for number, part in enumerate(parts):
        state = found[number] = dict(states.get(part.number, {}))
        assert isinstance(part.whole, DTensor)
        own = own_rows(part.whole)
        in_blocks = [key.removesuffix(SCALE) for key in state if key.endswith(SCALE)]
        for key, value in state.items():
            if key in in_blocks:
                state[key] = value.view(part.whole.shape)[own].flatten()
            elif isinstance(value, Tensor) and value.ndim and not key.endswith(SCALE):
                assert value.shape == part.whole.shape
                state[key] = value[own]
        for key in in_blocks:
            _reshard(part, key, state, {Place(): state[key + SCALE]})
    return found
