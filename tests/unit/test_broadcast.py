"""All weights as they are sent: which way they take, what is packed, gathered, and read at the other end."""

from __future__ import annotations

import errno
import gc
import math
import os
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load, load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.locked_memory import LockedMemory
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.export import stored_tensors
from grpo_trainer.weights.broadcast import BroadcastBridge, PresentWeights
from grpo_trainer.weights.build import weights_folder
from grpo_trainer.weights.channels import Channel, MainMemory, ModelFiles, TrainerPlace, Way
from grpo_trainer.weights.layout import ModelLayout
from tests.golden.models import CONFIGS, random_model
from tests.unit.factories import bridge_info, refusing, worker
from tests.unit.tiny_lora import tiny
from vllm_server.protocol import file_parts
from vllm_server.protocol.channels import ChannelRequest, FolderSpec, MainMemorySpec, MappedTensor, Spec, Staging
from vllm_server.protocol.file_parts import PartThreads
from vllm_server.protocol.flat import encode_header, lay_out, with_version
from vllm_server.worker import channels as worker_channels
from vllm_server.worker.extension import SharingWorker
from vllm_server.worker.packed import Layout, NotFiniteError, layout_of
from vllm_server.worker.weights import WeightChannel

CPU = torch.device("cpu")
LIMIT = 40_000
"""Bytes: small models travel in several buckets."""


def tensors_of(model: PreTrainedModel) -> Mapping[str, Tensor]:
    return {name: tensor for name, (_, tensor) in stored_tensors(model).items()}


@pytest.mark.parametrize(
    ("gpu", "gpus", "asked", "wanted"),
    [
        ("own", (), "auto", "off"),
        ("second", ("own", "second"), "auto", "off"),
        ("third", ("own", "second"), "auto", "auto"),
        ("own", (), "on", "on"),
    ],
)
def test_memory_that_a_trainer_process_plans_to_use_is_not_taken_for_staging(
    gpu: str, gpus: tuple[str, ...], asked: Staging, wanted: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own GPU is `own`; its processes are on `gpus`."""
    staged: list[Staging] = []

    def opened(name: str, way: Way, server: object, staging: Staging) -> Channel:
        staged.append(staging)
        return Channel()

    monkeypatch.setattr("grpo_trainer.weights.broadcast.open_channel", opened)
    monkeypatch.setattr(TrainerPlace, "of", lambda tensor: TrainerPlace("own", "here"))
    config: Any = SimpleNamespace(broadcast_transport="gloo", broadcast_staging=asked, in_flight="keep")
    policy: Any = SimpleNamespace(model=random_model("qwen2"))
    server: Any = SimpleNamespace(url="http://host:1")
    weights = PresentWeights(lambda: tensors_of(policy.model))
    bridge = BroadcastBridge(config, policy, weights, server, Path("/none"), 8, "float32", gpus=gpus)
    bridge._open(bridge_info(worker(uuid=gpu)))  # pyright: ignore[reportPrivateUsage]
    assert staged == [wanted]


@pytest.mark.parametrize(
    ("mode", "of", "name"), [("broadcast", "broadcast", "weights"), ("lora_only", "lora", "adapters")]
)
def test_the_folder_for_disk_is_the_runs_own(mode: str, of: str, name: str, tmp_path: Path) -> None:
    """Files in it are deleted, so it is never the folder that the user names, nor another run's."""
    root, one, other = tmp_path / "root", tmp_path / "one", tmp_path / "other"
    disk = {"weight_bridge_mode": mode, f"{of}_transport": "disk"}
    asked = BridgeConfig.model_validate(disk | {f"{of}_root": root})
    first = weights_folder(asked, one)
    assert first.parent == root and first == weights_folder(asked, one) != weights_folder(asked, other)
    assert weights_folder(BridgeConfig.model_validate(disk), one) == one / name


NOTHING: Any = SimpleNamespace(in_flight="keep", close=lambda: None)


class Shards:
    """Weights that are gathered; counts how often."""

    def __init__(self) -> None:
        self.weights = {"w": torch.tensor([1.0, 1.0 + 2**-10]), "none": torch.zeros(0, 4), "v": torch.full((3, 2), 5.0)}
        self.count = 0
        self.looks = 0

    def own(self) -> Mapping[str, Tensor]:
        self.looks += 1
        return self.weights

    def gather(self, keep: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        self.count += 1
        return {name: keep(tensor) for name, tensor in self.weights.items()}

    def present(self) -> PresentWeights:
        return PresentWeights(self.own, self.gather)


def test_present_weights_are_gathered_again_once_they_change() -> None:
    """Even for the same version: a server may have been sent the old ones as a version that does not count."""
    shards = Shards()
    weights = shards.present()
    for version in (1, 1):
        weights.of(version, torch.float32)
    assert shards.count == 1
    weights.of(2, torch.float32)
    bridge = BroadcastBridge(NOTHING, NOTHING, weights, NOTHING, Path("/x"), 8, "float32")
    with bridge.updating():
        shards.weights["w"] *= 2
    assert weights.of(2, torch.float32)["w"][0] == 2.0 and shards.count == 3
    bridge.close()
    weights.of(2, torch.float32)
    assert shards.count == 4
    assert PresentWeights(shards.own).of(1, torch.bfloat16) is shards.weights, "of one process, they are never copied"


def test_gathering_is_part_of_the_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was done for several servers, before their bridges were asked. Gathering takes 2 s, sending 0.25."""
    now, shards = [100.0], Shards()

    def after(seconds: float) -> None:
        now[0] += seconds

    def gather(keep: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        after(2.0)
        return shards.gather(keep)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    weights = PresentWeights(shards.own, gather)
    server: Any = SimpleNamespace(apply_weights=lambda request: None)
    bridge: Any = BroadcastBridge(NOTHING, NOTHING, weights, server, Path("/x"), 8, "float32")
    bridge.channel = SimpleNamespace(
        id="one", name="main_memory", is_ahead=True, staging_bytes=0, send=lambda *_: after(0.25)
    )
    bridge.layout, bridge._info = (
        SimpleNamespace(dtype=torch.float32),
        SimpleNamespace(boot_id="b", served_model_name=""),
    )
    bridge._fence = SimpleNamespace(metrics={}, hold=lambda *_: nullcontext("token"))
    weights.of(0, torch.float32)
    for version, before in (1, True), (2, False):
        with bridge.updating():
            pass
        if before:
            weights.gather(version)
        assert reduce(bridge.publish(version).metrics)["train/sync_time"] == 2.25


def test_present_weights_are_rounded_in_memory_that_is_used_again() -> None:
    shards = Shards()
    weights = shards.present()
    exact, rounded = weights.of(1, torch.float32), weights.of(1, torch.bfloat16)
    assert exact.keys() == rounded.keys() == shards.weights.keys()
    for name, tensor in shards.weights.items():
        assert torch.equal(exact[name], tensor) and torch.equal(rounded[name], tensor.to(torch.bfloat16))
    assert rounded["w"][1] == 1.0 and rounded["none"].shape == (0, 4)
    again = weights.of(2, torch.bfloat16)
    assert again["v"].data_ptr() == rounded["v"].data_ptr() != exact["v"].data_ptr()
    assert weights.of(1, torch.float32) is exact
    assert weights.own() is shards.weights and shards.looks == 1


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_together_are_the_checkpoint_of_now(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(architecture)
    stored = tensors_of(model)
    buckets = ModelLayout(model, stored, dtype, LIMIT)
    assert len(buckets) > 1
    with torch.no_grad():
        next(iter(stored.values())).add_(1.0)
    sent: dict[str, torch.Tensor] = {}
    buffer_E = torch.empty(buckets.largest, dtype=dtype)
    for number, header in enumerate(buckets.headers):
        data = buckets.pack(number, stored, buffer_E).view(torch.uint8).numpy().tobytes()
        found = load(header + data)
        assert not set(found) & set(sent)
        sent |= found
    assert buckets.nbytes == sum(tensor.nbytes for tensor in sent.values())
    model.to(dtype).save_pretrained(tmp_path)  # pyright: ignore[reportArgumentType, reportCallIssue]
    wanted = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert sorted(sent) == sorted(wanted)
    assert all(sent[name].dtype == dtype and torch.equal(sent[name], wanted[name]) for name in wanted)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("qwen2", hidden_size=16, num_hidden_layers=1)


def gathering(model: PreTrainedModel) -> PresentWeights:
    def gather(keep: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        return {name: keep(tensor.detach()) for name, tensor in tensors_of(model).items()}

    return PresentWeights(lambda: tensors_of(model), gather)


def way_of(model: PreTrainedModel, weights: PresentWeights) -> Way:
    layout, gathered = ModelLayout(model, weights.own(), torch.bfloat16, limit=2048), weights.gathered(torch.bfloat16)
    return Way(layout, bridge_info(), "", Path("/none"), stored=weights.own(), gathered=gathered)


def layouts_of(way: Way) -> list[Layout]:
    return [layout_of(header, "") for header in way.layout.headers]


def test_main_memory_brings_each_version_as_it_would_be_packed(model: PreTrainedModel) -> None:
    weights = gathering(model)
    way = way_of(model, weights)
    sender, layouts = MainMemory(way), layouts_of(way)
    assert len(layouts) > 2 and sender.is_ahead
    spec: Any = sender.spec
    mapped = worker_channels.MainMemory(spec, layouts, CPU)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        sender.send(version, weights.of(version, torch.bfloat16))
        for number, layout in enumerate(layouts):
            got_E = torch.zeros(layout.numel, dtype=torch.bfloat16)
            assert isinstance(way.layout, ModelLayout)
            wanted_E = way.layout.pack(number, tensors_of(model), torch.zeros_like(got_E))
            mapped.fill(version, number, got_E)
            assert torch.equal(got_E, wanted_E) and got_E.any()


def test_main_memory_of_something_else_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    way = way_of(model, gathering(model))
    source: Any = MainMemory(way).spec
    layouts = layouts_of(way)
    file = tmp_path / "memory"
    file.write_bytes(bytes(source.nbytes))
    link = tmp_path / "link"
    link.symlink_to(file)
    first, *rest = source.tensors
    short = replace(source.tensors[first], shape=[1], stride=[1])
    for wrong, named in (
        (replace(source, path="/proc/0/fd/9"), "/proc/0/fd/9"),
        (replace(source, path=str(link)), str(link)),
        (replace(source, name="grpo-0"), source.path),
        (replace(source, nbytes=source.nbytes + 4096), source.path),
        (replace(source, tensors={name: source.tensors[name] for name in rest}), first),
        (replace(source, tensors={**source.tensors, first: short}), first),
    ):
        with pytest.raises(ValueError, match=named):
            worker_channels.MainMemory(wrong, layouts, CPU)
    worker_channels.MainMemory(source, layouts, CPU)


def test_main_memory_without_shared_memory(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights take another way then."""
    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    weights = gathering(model)
    with pytest.raises(BridgeError):
        MainMemory(way_of(model, weights))
    found = weights.of(1, torch.float32)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(model).items())


def test_main_memory_of_what_is_converted_for_a_checkpoint() -> None:
    """transformers fuses a mixture's experts, which a checkpoint has apart."""
    mixture = tiny("qwen3_moe", num_experts=4, moe_intermediate_size=8)
    with pytest.raises(BridgeError, match="experts"):
        MainMemory(way_of(mixture, gathering(mixture)))


def test_memory_stays_open_as_long_as_a_tensor_of_it(model: PreTrainedModel) -> None:
    memory = LockedMemory(4096, shared=True)
    path, tensor = memory.path, memory.take([8], torch.float32)
    del memory
    gc.collect()
    assert Path(path).exists()
    del tensor
    gc.collect()
    assert not Path(path).exists()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a small model takes several parts, and the last one is smaller."""
    for module in ("vllm_server.protocol.file_parts", "vllm_server.worker.channels"):
        monkeypatch.setattr(f"{module}.PART_BYTES", 3000)


class Sent:
    """A model whose weights go through a folder."""

    def __init__(self, folder: Path, architecture: str, dtype: torch.dtype) -> None:
        model = random_model(architecture)
        self.folder = folder
        self.stored = tensors_of(model)
        self.buckets = ModelLayout(model, self.stored, dtype, LIMIT)
        self.sender = ModelFiles(Way(self.buckets, bridge_info(), "", folder, stored=self.stored))
        spec: Any = self.sender.spec
        self.reader = worker_channels.Folder(spec, self.buckets.headers, CPU)
        self.sender.join(lambda: None)

    def packed(self, number: int) -> Tensor:
        return self.buckets.pack(number, self.stored, torch.empty(self.buckets.largest, dtype=self.buckets.dtype))

    def read(self, version: int, number: int) -> Tensor:
        buffer_E = torch.empty_like(self.packed(number))
        self.reader.fill(version, number, buffer_E)
        return buffer_E


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_reads_what_was_sent(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
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


def test_disk_names_a_version_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_disk_does_not_read_a_file_of_the_version_before_or_one_that_ends_early(tmp_path: Path) -> None:
    """As a network disk may show it, where a file's old content is still cached."""
    made = Sent(tmp_path, "qwen2", torch.float32)
    made.sender.send(9, made.stored)
    stale = (tmp_path / "9" / "1.safetensors").read_bytes()
    made.sender.send(10, made.stored)
    for number in (0, 1):
        assert torch.equal(made.read(10, number), made.packed(number))
    first, second = (tmp_path / "10" / f"{number}.safetensors" for number in (0, 1))
    second.write_bytes(stale)
    with pytest.raises(ValueError, match="another version"):
        made.read(10, 1)
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(ValueError, match=str(first)):
        made.read(10, 0)


def test_disk_takes_nothing_that_a_killed_trainer_left(tmp_path: Path) -> None:
    killed = Sent(tmp_path, "qwen2", torch.float32)
    killed.sender.send(7, killed.stored)
    with pytest.raises(FileNotFoundError):
        Sent(tmp_path, "qwen2", torch.float32).read(7, 0)


def test_disk_continues_short_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:700], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:900]], offset))
    made = Sent(tmp_path, "qwen2", torch.float32)
    made.sender.send(1, made.stored)
    assert torch.equal(made.read(1, 1), made.packed(1))


def test_disk_threads_finish_all_work_before_an_error_is_raised() -> None:
    done: list[int] = []

    def work(memory: file_parts.PartMemory, item: int) -> None:
        if item == 1:
            raise ValueError(item)
        done.append(item)

    with pytest.raises(ValueError):
        PartThreads(CPU).each(work, range(6))
    assert sorted(done) == [0, 2, 3, 4, 5]


# weights that arrive in a worker -----------------------------------------------------------------------------------

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


def write(folder: Path, value: float) -> None:
    """Write a version: the folder's name is its number."""
    folder.mkdir(exist_ok=True)
    for number, shapes in enumerate(BUCKETS):
        data = b"".join(torch.full(shape, value + index).numpy().tobytes() for index, (_, shape) in enumerate(shapes))
        (folder / f"{number}.safetensors").write_bytes(with_version(header(shapes), int(folder.name)) + data)


def opened(folder: Path, model: nn.Module, staging: Staging) -> WeightChannel:
    headers = [b64encode(header(shapes)).decode() for shapes in BUCKETS]
    spec = FolderSpec(folder=str(folder))
    request = ChannelRequest(boot_id="b", spec=spec, buckets=headers, staging=staging)
    return WeightChannel(request, model, torch.device("cpu"), 0, 1)


def staged(channel: WeightChannel, version: int = 0) -> None:
    if not channel.staged:
        return
    channel.begin_staging(version)
    deadline = time.monotonic() + 30
    while not channel.has_staged():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("staging", ["on", "off"])
@pytest.mark.parametrize(("kind", "loads"), [(Merged, 2), (Computing, 4), (Composed, 3), (Latent, 2)])
def test_worker_repeats_copies_and_loads_again_what_a_models_loading_computes(
    tmp_path: Path, kind: type[Merged], loads: int, staging: Staging
) -> None:
    """In a new tensor all is loaded each time, in place its bucket; a copy in other memory is made again."""
    model = kind()
    channel = opened(tmp_path, model, staging)
    assert channel.staged == (staging == "on") and (channel.staging_bytes == 4 * 116) == (staging == "on")
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for version, value in enumerate((1.0, 2.0)):
        write(tmp_path / str(version), value)
        before = model.values()
        staged(channel, version)
        assert model.values() == before
        assert channel.apply(version).replayed == (version > 0 and kind in (Merged, Latent))
        q, k, v, embed, gate = model.values()
        factor = 2 if kind is Computing else 1
        assert (q, k, v, embed) == (factor * value, factor * (value + 1), factor * value, factor * (value + 1))
        assert gate == pytest.approx({Computing: 2 * (value + 2), Composed: -math.exp(value + 2)}.get(kind, value + 2))
        assert not model.embed[6:].any(), "the padding is not touched"
        if isinstance(model, Latent):
            assert model.W_UV.tolist() == [[value + 2, value + 2]] * 2
    assert model.loads == loads and places == [parameter.data_ptr() for parameter in model.parameters()]
    channel.close()


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: data.replace(b'"gate"', b'"date"'), None])
def test_a_damaged_file_is_found_before_anything_is_written(
    tmp_path: Path, damage: Callable[[bytes], bytes] | None
) -> None:
    model = Merged()
    channel = opened(tmp_path, model, "on")
    write(tmp_path / "0", 5.0)
    file = tmp_path / "0" / "1.safetensors"
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
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
        staged(channel)
        channel.apply(0)
    assert model.values() == ([0.0] * 5 if staging == "on" else [5.0, 6.0, 0.0, 0.0, 0.0])


def test_a_version_is_applied_once_and_no_other_than_the_staged_one(tmp_path: Path) -> None:
    model = Merged()
    channel = opened(tmp_path, model, "on")
    write(tmp_path / "3", 5.0)
    staged(channel, 3)
    with pytest.raises(RuntimeError):
        channel.apply(4)
    assert model.values() == [0.0] * 5
    channel.apply(3)
    with pytest.raises(RuntimeError):
        channel.apply(3)
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
