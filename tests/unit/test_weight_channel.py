"""Weights that arrive in a worker: first by the model's own loading, then by its recorded copies."""

from __future__ import annotations

import math
import os
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from tests.unit.factories import refusing
from vllm_server.protocol.channels import ChannelRequest, FolderSpec, MainMemorySpec, MappedTensor, Spec, Staging
from vllm_server.protocol.flat import encode_header, lay_out, with_version
from vllm_server.worker.extension import SharingWorker
from vllm_server.worker.packed import NotFiniteError
from vllm_server.worker.weights import WeightChannel

SHAPES = [("q", (4, 8)), ("k", (2, 8)), ("v", (2, 8)), ("embed", (6, 8)), ("gate", (4,))]
BUCKETS = [SHAPES[:2], SHAPES[2:]]


class Merged(nn.Module):
    """As vLLM's models do: q, k and v are one parameter, and the vocabulary is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.embed, self.gate = (nn.Parameter(torch.zeros(*shape)) for shape in ((8, 8), (8, 8), (4,)))
        self.loads = 0

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        self.loads += 1
        rows = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}
        loaded = set()
        for name, tensor in weights:
            target = self.qkv.data[rows[name]] if name in rows else self.get_parameter(name).data[: len(tensor)]
            if target.shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)}")
            target.copy_(tensor)
            loaded.add("qkv" if name in rows else name)
        return loaded

    def values(self) -> list[float]:
        return [float(each) for each in (*self.qkv.data[[0, 4, 6], 0], self.embed.data[5, 7], self.gate.data[3])]


class Computing(Merged):
    """One whose loading makes a new tensor of what came."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, tensor * 2) for name, tensor in weights)


class Composed(Merged):
    """One whose loading computes in place what it has copied, as vLLM does for the decay of Mamba 2."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        if "gate" in loaded:
            self.gate.data.copy_(-self.gate.exp())
        return loaded


class Latent(Merged):
    """As latent attention: it computes with a copy of a weight, in memory that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 1, bias=False)
        self.W_UV = nn.Parameter(torch.zeros(2, 2))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        given = dict(weights)
        if "gate" in given:
            self.kv_b_proj.weight.data.copy_(given["gate"][None])
        return super().load_weights(iter(given.items())) | {"kv_b_proj.weight"}

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.W_UV.data.copy_(self.kv_b_proj.weight.view(2, 2).to(dtype))


def header(shapes: list[tuple[str, tuple[int, ...]]]) -> bytes:
    return encode_header(lay_out(shapes, "F32"), {})


def write(folder: Path, value: float, buckets: list[list[tuple[str, tuple[int, ...]]]] = BUCKETS) -> None:
    """Write a version: the folder's name is its number."""
    folder.mkdir(exist_ok=True)
    for number, shapes in enumerate(buckets):
        data = b"".join(torch.full(shape, value + index).numpy().tobytes() for index, (_, shape) in enumerate(shapes))
        (folder / f"{number}.safetensors").write_bytes(with_version(header(shapes), int(folder.name)) + data)


def opened(
    folder: Path, model: nn.Module, staging: Staging, buckets: list[list[tuple[str, tuple[int, ...]]]] = BUCKETS
) -> WeightChannel:
    headers = [b64encode(header(shapes)).decode() for shapes in buckets]
    spec = FolderSpec(folder=str(folder))
    request = ChannelRequest(boot_id="b", spec=spec, buckets=headers, staging=staging)
    return WeightChannel(request, model, torch.device("cpu"), 0, 1)


def staged(channel: WeightChannel, version: int = 0) -> None:
    channel.begin_staging(version)
    deadline = time.monotonic() + 30
    while not channel.has_staged():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("staging", ["on", "off"])
def test_the_second_version_repeats_the_copies_of_the_first(tmp_path: Path, staging: Staging) -> None:
    model = Merged()
    channel = opened(tmp_path, model, staging)
    assert channel.staged == (staging == "on") and (channel.staging_bytes == 4 * 116) == (staging == "on")
    for version, value in enumerate((10.0, 20.0, 30.0)):
        write(tmp_path / str(version), value)
        if staging == "on":
            staged(channel, version)
            assert model.values() != [value, value + 1, value, 0.0, value + 2], "nothing is written before"
        assert channel.apply(version).replayed == (version > 0)
        assert model.values() == [value, value + 1, value, value + 1, value + 2]
        assert float(model.embed[6:].abs().sum()) == 0.0, "the padding is not touched"
    assert model.loads == len(BUCKETS)
    channel.close()


def test_what_a_models_loading_computes_is_loaded_each_time(tmp_path: Path) -> None:
    model = Computing()
    channel = opened(tmp_path, model, "on")
    for value in (1.0, 2.0):
        write(tmp_path / "0", value)
        staged(channel)
        assert not channel.apply(0).replayed
        assert model.values()[0] == 2 * value
    assert model.loads == 2 * len(BUCKETS)


@pytest.mark.parametrize("staging", ["on", "off"])
def test_copies_of_latent_attention_are_computed_again(tmp_path: Path, staging: Staging) -> None:
    model = Latent()
    place = model.W_UV.data_ptr()
    channel = opened(tmp_path, model, staging)
    for version, value in enumerate((1.0, 2.0)):
        write(tmp_path / str(version), value)
        if staging == "on":
            staged(channel, version)
        channel.apply(version)
        assert model.W_UV.tolist() == [[value + 2, value + 2]] * 2
    assert model.W_UV.data_ptr() == place
    channel.close()


def test_what_a_models_loading_computes_in_place_is_loaded_each_time(tmp_path: Path) -> None:
    model = Composed()
    channel = opened(tmp_path, model, "on")
    for version, value in enumerate((1.0, 2.0)):
        write(tmp_path / str(version), value)
        staged(channel, version)
        channel.apply(version)
        assert model.values()[:4] == [value, value + 1, value, value + 1]
        assert model.values()[4] == pytest.approx(-math.exp(value + 2))
    assert model.loads == len(BUCKETS) + 1, "the first bucket's copies are repeated"


@pytest.mark.parametrize("staging", ["on", "off"])
def test_a_parameter_that_no_bucket_has_is_an_error_by_name(tmp_path: Path, staging: Staging) -> None:
    buckets = [SHAPES[:2], SHAPES[2:4]]
    channel = opened(tmp_path, Merged(), staging, buckets)
    write(tmp_path / "0", 1.0, buckets)
    if staging == "on":
        staged(channel)
    with pytest.raises(ValueError, match="gate"):
        channel.apply(0)


def drop_the_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def rename(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"gate"', b'"date"'))


@pytest.mark.parametrize("damage", [drop_the_end, rename, Path.unlink])
def test_a_damaged_file_is_found_before_anything_is_written(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    model = Merged()
    channel = opened(tmp_path, model, "on")
    write(tmp_path / "0", 5.0)
    damage(tmp_path / "0" / "1.safetensors")
    with pytest.raises((ValueError, OSError)):
        staged(channel)
    with pytest.raises((ValueError, OSError)):
        channel.apply(0)
    assert model.values() == [0.0] * 5


@pytest.mark.parametrize("staging", ["on", "off"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, staging: Staging, value: float) -> None:
    """The bucket with the value is not written. Staged, no bucket is."""
    model = Merged()
    channel = opened(tmp_path, model, staging)
    write(tmp_path / "0", 5.0)
    file = tmp_path / "0" / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", value))  # the last element of `gate`
    with refusing(NotFiniteError, "gate"):
        if staging == "on":
            staged(channel)
        channel.apply(0)
    assert model.values() == ([0.0] * 5 if staging == "on" else [5.0, 6.0, 0.0, 0.0, 0.0])


def test_a_version_is_applied_once(tmp_path: Path) -> None:
    channel = opened(tmp_path, Merged(), "on")
    write(tmp_path / "0", 5.0)
    staged(channel)
    channel.apply(0)
    with pytest.raises(RuntimeError):
        channel.apply(0)


def test_another_version_than_the_staged_one_is_not_applied(tmp_path: Path) -> None:
    model = Merged()
    channel = opened(tmp_path, model, "on")
    write(tmp_path / "3", 5.0)
    staged(channel, 3)
    with pytest.raises(RuntimeError):
        channel.apply(4)
    assert model.values() == [0.0] * 5
    with pytest.raises(FileNotFoundError):  # the folder has version 3 only
        staged(channel, 4)


class Worker(SharingWorker):
    """One without an engine."""

    rank, device = 0, torch.device("cpu")
    parallel_config = SimpleNamespace(tensor_parallel_size=1, data_parallel_index=0, world_size=1)

    def get_model(self) -> nn.Module:
        return Merged()


def test_a_worker_refuses_numbers_that_fit_nothing() -> None:
    """An exception would be a fault of the engine."""
    memory = os.memfd_create("grpo-numbers")
    try:
        os.truncate(memory, 4096)
        name, path = "grpo-numbers", f"/proc/{os.getpid()}/fd/{memory}"
        beyond = {"q": MappedTensor(storage=1, offset=0, shape=[4, 8], stride=[8, 1], dtype="float32")}
        specs: list[tuple[str, Spec]] = [
            ("IndexError", MainMemorySpec(name=name, path=path, nbytes=4096, tensors=beyond)),
            ("OverflowError", MainMemorySpec(name=name, path=path, nbytes=1 << 70, tensors={})),
        ]
        for reason, spec in specs:
            buckets = [b64encode(header(SHAPES)).decode()]
            request = ChannelRequest(boot_id="b", spec=spec, buckets=buckets, staging="off")
            answer = Worker().grpo_open_channel("c", msgspec.json.encode(request).decode())
            assert answer["refused"].startswith(reason), answer
    finally:
        os.close(memory)
