"""Versions in a folder: written in parts by several threads at one end, read in parts at the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_trainer.model.export import stored_tensors
from grpo_trainer.weights.buckets import Buckets
from grpo_trainer.weights.senders.disk import FolderSender
from grpo_trainer.weights.senders.sender import Way
from tests.golden.models import random_model
from tests.unit.factories import bridge_info
from vllm_server.protocol import file_parts
from vllm_server.protocol.file_parts import PartThreads
from vllm_server.worker.sources import FolderReader

CPU = torch.device("cpu")
LIMIT = 40_000
"""Bytes: a small model travels in several buckets."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a small model takes several parts, and the last one is smaller."""
    for module in ("vllm_server.protocol.file_parts", "vllm_server.worker.sources"):
        monkeypatch.setattr(f"{module}.PART_BYTES", 3000)


class Sent:
    """A model whose weights go through a folder."""

    def __init__(self, folder: Path, architecture: str, dtype: torch.dtype) -> None:
        model = random_model(architecture)
        self.folder = folder
        self.stored: Mapping[str, Tensor] = {name: each for name, (_, each) in stored_tensors(model).items()}
        self.buckets = Buckets(model, self.stored, dtype, LIMIT)
        self.sender = FolderSender(Way("", bridge_info(), folder, self.buckets, self.stored))
        self.reader = FolderReader(self.sender.source, self.buckets.headers, CPU)
        self.sender.join()

    def packed(self, number: int) -> Tensor:
        return self.buckets.pack(number, self.stored, torch.empty(self.buckets.largest, dtype=self.buckets.dtype))

    def read(self, version: int, number: int) -> Tensor:
        buffer_E = torch.empty_like(self.packed(number))
        self.reader.fill(version, number, buffer_E)
        return buffer_E


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_sent(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    made = Sent(tmp_path / "weights", architecture, dtype)
    for version in (4, 5):
        with torch.no_grad():
            for each in made.stored.values():
                each.add_(torch.randn(each.shape))
        made.sender.send(version, made.stored)
        assert len(made.buckets) > 1
        for number in range(len(made.buckets)):
            assert torch.equal(made.read(version, number), made.packed(number))
            file = tmp_path / "weights" / str(version) / f"{number}.safetensors"
            assert {each.dtype for each in load_file(file).values()} == {dtype}, "any program can read it"
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["5"], "version 4 is gone"
    made.sender.close()
    assert not (tmp_path / "weights").exists()


def test_a_version_has_its_name_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sent(tmp_path, "qwen2", torch.float32)
    made.sender.send(1, made.stored)
    written: list[int] = []
    pwrite = os.pwrite

    def full(file: int, data: memoryview, offset: int) -> int:
        if len(written) == 20:
            raise OSError(28, "No space left on device")
        written.append(offset)
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError) as failed:
        made.sender.send(2, made.stored)
    assert failed.value.filename.endswith(".safetensors")
    for version in (1, 2):
        with pytest.raises(FileNotFoundError):
            made.read(version, 0)
    monkeypatch.setattr(os, "pwrite", pwrite)
    made.sender.send(2, made.stored)
    assert torch.equal(made.read(2, 0), made.packed(0))


def test_a_file_of_the_version_before_is_not_read_as_the_next(tmp_path: Path) -> None:
    """As a network disk may show it, where a file's old content is still cached."""
    made = Sent(tmp_path, "qwen2", torch.float32)
    made.sender.send(9, made.stored)
    stale = (tmp_path / "9" / "1.safetensors").read_bytes()
    made.sender.send(10, made.stored)
    assert torch.equal(made.read(10, 1), made.packed(1))
    (tmp_path / "10" / "1.safetensors").write_bytes(stale)
    assert torch.equal(made.read(10, 0), made.packed(0))
    with pytest.raises(ValueError, match="another version"):
        made.read(10, 1)


def test_what_a_killed_trainer_left_is_no_version(tmp_path: Path) -> None:
    Sent(tmp_path, "qwen2", torch.float32).sender.send(7, Sent(tmp_path, "qwen2", torch.float32).stored)
    made = Sent(tmp_path, "qwen2", torch.float32)
    with pytest.raises(FileNotFoundError):
        made.read(7, 0)


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:700], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:900]], offset))
    made = Sent(tmp_path, "qwen2", torch.float32)
    made.sender.send(1, made.stored)
    assert torch.equal(made.read(1, 1), made.packed(1))


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    made = Sent(tmp_path, "qwen2", torch.float32)
    made.sender.send(1, made.stored)
    file = tmp_path / "1" / "0.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=str(file)):
        made.read(1, 0)


def test_all_work_is_done_before_an_error_is_raised() -> None:
    done: list[int] = []

    def work(memory: file_parts.PartMemory, item: int) -> None:
        if item == 1:
            raise ValueError(item)
        done.append(item)

    with pytest.raises(ValueError):
        PartThreads(CPU).each(work, range(6))
    assert sorted(done) == [0, 2, 3, 4, 5]
