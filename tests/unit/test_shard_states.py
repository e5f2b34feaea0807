"""The optimizer's states, cut over processes: what one process has of them is written, read, and refused."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.errors import ConfigError, DiskFullError, from_os_error
from grpo_trainer.optim import TwoPartOptimizer, build_optimizer
from grpo_trainer.parallel.shard_states import STATES_FOLDER, Place, read_states, whole_parts, write_states


def trained(name: str, width: int = 6) -> tuple[nn.Module, TwoPartOptimizer]:
    """Three layers, of which the second has no gradient, two steps on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width + 1) for _ in range(3)))
    optimizer = build_optimizer(list(model.parameters()), OptimizerConfig(optimizer=name))  # type: ignore[arg-type]
    for _ in range(2):
        for layer in (model[0], model[2]):
            for parameter in layer.parameters():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_states_come_back_under_the_names_of_parameters(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(name)
    parts = whole_parts(model)
    write_states(tmp_path, parts, optimizer, Place(0, 1), group=None)
    other = [parts[5], parts[0], parts[2]]  # in another order, and not all; the third has no states
    found = read_states(tmp_path, other, Place(0, 1))
    assert sorted(found) == [0, 1]
    for number, part in ((0, parts[5]), (1, parts[0])):
        states = optimizer.state[part.own]
        assert found[number].keys() == states.keys()
        for key, value in states.items():
            got = found[number][key]
            assert type(got) is type(value)
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(value)), key


@pytest.mark.parametrize(("rows", "processes"), [(5, 2), (4, 2), (1, 2), (7, 3), (3, 4), (0, 2)])
def test_rows_are_cut_as_torch_cuts_them(rows: int, processes: int) -> None:
    cut = [list(Place(rank, processes).rows(rows)) for rank in range(processes)]
    chunks = torch.arange(rows).chunk(processes) if rows else ()
    assert [one for one in cut if one] == [chunk.tolist() for chunk in chunks]
    assert Place.parsed(str(Place(1, processes))) == Place(1, processes)


def test_states_that_can_not_be_written_are_an_error_that_names_the_place(tmp_path: Path) -> None:
    model, optimizer = trained("adamw")
    (tmp_path / STATES_FOLDER).write_text("a file, where a folder is to be")
    with pytest.raises(FileExistsError, match=r"\b0: ") as raised:
        write_states(tmp_path, whole_parts(model), optimizer, Place(), group=None)
    assert raised.value.filename == str(tmp_path / STATES_FOLDER)


def test_a_full_disk_is_said_as_of_any_other_file(tmp_path: Path) -> None:
    model, optimizer = trained("adamw", width=128)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # torch's own word on it: unexpected pos
    try:
        with pytest.raises(OSError, match=rf"\b0: {os.strerror(errno.EFBIG)}") as raised:
            write_states(tmp_path, whole_parts(model), optimizer, Place(), group=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    said = from_os_error(raised.value, "write")
    assert isinstance(said, DiskFullError)
    assert said.field == str(tmp_path / STATES_FOLDER) and os.strerror(errno.EFBIG) in said.got


def test_states_that_can_not_be_read_are_an_error_of_the_house(tmp_path: Path) -> None:
    model, optimizer = trained("adamw")
    write_states(tmp_path, whole_parts(model), optimizer, Place(), group=None)
    (file,) = (tmp_path / STATES_FOLDER).glob("*.distcp")
    file.unlink()
    with pytest.raises(ConfigError) as refused:
        read_states(tmp_path, whole_parts(model), Place())
    assert refused.value.field == f"--resume {tmp_path}" and refused.value.got.startswith("FileNotFoundError: ")
