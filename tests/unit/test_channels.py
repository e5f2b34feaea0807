"""Which channel adapters and weights take for every place of trainer and server, and what an adapter's publish does."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import load

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError, LostError, ServerError
from grpo_trainer.weights import channels, lora_swap
from grpo_trainer.weights.channels import (
    AUTOMATIC,
    CHANNELS,
    AdapterFiles,
    Body,
    Channel,
    Group,
    Name,
    TrainerPlace,
    Way,
    open_channel,
    why_not,
)
from grpo_trainer.weights.layout import AdapterLayout, ModelLayout
from grpo_trainer.weights.lora_swap import LoraSwap, Sent, publish_by
from tests.golden.models import random_model
from tests.unit.factories import OURS, refusing, worker
from tests.unit.factories import bridge_info as info
from tests.unit.tiny_lora import fill_b, tiny_lora
from vllm_server.protocol import BridgeInfo, LoraLoadRequest, LoraLoadResponse, group, machine_id
from vllm_server.protocol.channels import ChannelRequest, ChannelResponse, GroupSpec, Transport, WeightTransport
from vllm_server.protocol.group import NcclError
from vllm_server.worker.channels import AdapterChannel

OTHER = "GPU-other"
SEES_BOTH = worker(uuid=OTHER, visible=[OTHER, OURS])
CPU = torch.device("cpu")
EVERYWHERE = {"memory", "gloo", "disk"}
A_CPU = {side: dict.fromkeys(("cuda_ipc", "nccl"), (side, "a CPU")) for side in ("trainer", "server")}
THERE = {"cuda_ipc": ("server", "machine there")}
UNSEEN = {"cuda_ipc": ("CUDA_VISIBLE_DEVICES of the server's worker 0", OTHER)}
ONE_GPU = {"nccl": ("server", f"GPU {OURS}")}


@pytest.mark.parametrize(
    ("trainer", "described", "works", "reasons"),
    [
        # one machine, one GPU: its memory can be mapped, NCCL takes one rank a GPU
        (TrainerPlace(OURS, "here"), info(), {"cuda_ipc"}, ONE_GPU),
        # one machine, the server on another GPU, which it sees alone
        (TrainerPlace(OURS, "here"), info(worker(uuid=OTHER)), {"nccl"}, UNSEEN),
        # the same, and the server sees the trainer's as well
        (TrainerPlace(OURS, "here"), info(SEES_BOTH), {"cuda_ipc", "nccl"}, {}),
        # two workers, one of them on the trainer's GPU
        (
            TrainerPlace(OURS, "here"),
            info(worker(visible=[OURS, OTHER]), worker(1, OTHER, [OURS, OTHER])),
            {"cuda_ipc"},
            ONE_GPU,
        ),
        # two workers, one of which does not see the trainer's GPU
        (TrainerPlace(OURS, "here"), info(SEES_BOTH, worker(1, OTHER)), {"nccl"}, {}),
        # two workers: one does not see the trainer's GPU, and one is on it
        (TrainerPlace(OURS, "here"), info(worker(), worker(1, OTHER)), set(), ONE_GPU),
        # another machine, even though a GPU is said to be the same
        (TrainerPlace(OURS, "here"), info(worker(uuid=OTHER, visible=[OURS, OTHER]), machine="there"), {"nccl"}, THERE),
        (TrainerPlace(OURS, "here"), info(machine="there"), set(), THERE | ONE_GPU),
        # weights that are sharded over processes, and gathered in main memory
        (TrainerPlace(OURS, "here", sharded=True), info(SEES_BOTH), {"nccl", "main_memory"}, {}),
        (TrainerPlace(OURS, "here", sharded=True), info(), {"main_memory"}, ONE_GPU),
        (TrainerPlace(OURS, "here", sharded=True), info(worker(uuid=OTHER), machine="there"), {"nccl"}, {}),
        (TrainerPlace("", "here", sharded=True), info(worker(uuid="")), {"main_memory"}, A_CPU["trainer"]),
        # a CPU on either side
        (TrainerPlace("", "here"), info(), set(), A_CPU["trainer"]),
        (TrainerPlace(OURS, "here"), info(worker(uuid="", visible=[])), set(), A_CPU["server"]),
        (TrainerPlace("", "here"), info(worker(uuid="", visible=[])), set(), A_CPU["trainer"]),
        (TrainerPlace(OURS, "here"), info(worker(), worker(1, "", [])), set(), A_CPU["server"]),
    ],
)
def test_channels_work_where(
    trainer: TrainerPlace, described: BridgeInfo, works: set[str], reasons: dict[str, tuple[str, str]]
) -> None:
    found = {name: why_not(name, trainer, described) for name in CHANNELS}
    assert {name for name, problem in found.items() if problem is None} == works | EVERYWHERE
    assert all(problem is None or problem.wanted for problem in found.values())
    problems = {name: problem and (problem.field, problem.got) for name, problem in found.items()}
    assert problems == problems | reasons


def test_channels_of_both_options_are_all_and_a_trainer_on_a_cpu_is_there() -> None:
    assert {*get_args(Transport), *get_args(WeightTransport)} == set(CHANNELS) == {*AUTOMATIC, "disk"}
    assert TrainerPlace.of(adapter_way().first) == TrainerPlace("", machine_id())


# ----------------------------------------------------------------------------------------------------------------------
# Opening one.


def adapter_way(root: Path = Path(), keep: int = 2, described: BridgeInfo | None = None) -> Way:
    layout = AdapterLayout(tiny_lora(), torch.float32)
    return Way(layout, described or info(SEES_BOTH), "", root, keep)


def model_way() -> Way:
    model = random_model("qwen2")
    stored = dict(model.named_parameters())
    return Way(ModelLayout(model, stored, torch.float32), info(SEES_BOTH), "", Path(), stored=stored)


class Stub(Channel):
    """A channel that joins unless it is set to fail."""

    def __init__(self, name: Name, failures: dict[str, Exception]) -> None:
        self.name, self._failures, self.closed = name, failures, False
        self.spec = GroupSpec(backend="gloo", meet=name, world_size=2)

    def join(self, refused: Callable[[], None]) -> None:
        if self.name in self._failures:
            raise self._failures[self.name]

    def close(self) -> None:
        self.closed = True


class Server:
    """One that opens every channel, or refuses."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.said: list[str] = []
        self.asked: list[ChannelRequest] = []

    def open_channel(self, asked: ChannelRequest) -> ChannelResponse:
        assert isinstance(asked.spec, GroupSpec)
        self.said.append(f"open {asked.spec.meet}")
        self.asked.append(asked)
        if self.refusal is not None:
            raise self.refusal
        return ChannelResponse(channel="c", staging_bytes=8)

    def close_channel(self, name: str) -> None:
        self.said.append(f"close {name}")


class Opening:
    """A machine where every channel works, unless `failures` has an error for it."""

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.made: list[Stub] = []
        self.server = Server()

    def make(self, name: Name) -> Callable[[Way], Channel]:
        def made(way: Way) -> Channel:
            self.made.append(Stub(name, self.failures))
            return self.made[-1]

        return made

    def open(self, wanted: Any, way: Way) -> Channel:
        server: Any = self.server
        return open_channel(wanted, way, server, "on")


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    opening = Opening()
    monkeypatch.setattr(channels, "CHANNELS", {name: opening.make(name) for name in CHANNELS})
    monkeypatch.setattr(TrainerPlace, "of", lambda tensor: TrainerPlace(OURS, "here"))
    return opening


@pytest.mark.parametrize(
    ("way", "order"),
    [(adapter_way, ["nccl", "cuda_ipc", "memory", "gloo"]), (model_way, ["nccl", "cuda_ipc", "gloo"])],
)
def test_auto_takes_the_first_that_opens(
    way: Callable[[], Way], order: list[str], opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    """`main_memory` comes first, and works for sharded weights only."""
    unreached = LostError("the workers did not join", field="x", got="y")
    failures = [NcclError("absent"), RuntimeError("CUDA error: invalid device context"), unreached]
    for number, name in enumerate(order):
        opening.made.clear()
        assert opening.open("auto", way()).name == name
        assert [each.closed for each in opening.made] == [True] * number + [False]
        assert opening.server.said[-1] == f"open {name}"
        if number:
            assert opening.server.said.count("close ") == number * (number + 1) / 2, "the workers wait no longer"
        opening.failures[name] = failures[min(number, 2)]
    with pytest.raises(LostError) as none:
        opening.open("auto", way())
    assert none.value.got == "auto"
    reasons = [(reason.field, reason.summary) for reason in none.value.problems[1:]]
    assert [field for field, _ in reasons if field != "not main_memory"] == [f"not {name}" for name in order]
    assert reasons[-1][1] == str(unreached)


@pytest.mark.parametrize(("way", "flag"), [(adapter_way, "--lora-transport"), (model_way, "--broadcast-transport")])
def test_channels_asked_for(way: Callable[[], Way], flag: str, opening: Opening) -> None:
    for name in ("cuda_ipc", "nccl", "gloo", "disk"):
        assert opening.open(name, way()).name == name
        opening.failures[name] = NcclError("absent")
        with refusing(BridgeError, flag, got=name) as refused:
            opening.open(name, way())
        (reason,) = refused.value.problems[1:]
        assert (reason.field, reason.summary) == (f"not {name}", "absent")
        assert f"{flag} auto" in refused.value.fix


def test_open_channel_refused_by_the_server(opening: Opening) -> None:
    opening.server.refusal = ServerError("refused", field="weights")
    for wanted in ("auto", "gloo"):
        with refusing(ServerError, "weights"):
            opening.open(wanted, model_way())
    assert all(each.closed for each in opening.made)


def test_gloo_to_a_server_that_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with refusing(ServerError, url):
        Group(replace(model_way(), url=url), "gloo")


def test_gloo_where_names_are_not_found_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: with a name server that is silent, torch looked for 10 s for the name of this machine's own address."""
    late = dist.DistNetworkError("timed out after 30000ms\nframe #0")
    monkeypatch.setattr(group, "TCPStore", mock.Mock(side_effect=late))
    spec = GroupSpec(backend="gloo", meet="127.0.0.1:1", world_size=2)
    monkeypatch.setattr(group, "address_towards", lambda host, port: host)
    words = ["30000ms (after", "getent hosts 127.0.0.1"]
    for joining in (lambda: group.meeting("gloo", 2, "127.0.0.1"), lambda: group.Group(spec, 1, CPU)):
        with refusing(group.GroupError, "Gloo store at 127.0.0.1", words=words) as error:
            joining()
        assert "frame" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Publishing an adapter.

LOADED = LoraLoadResponse(
    adapter_path="", adapter_name="policy-v3", adapter_id=1, load_count=1, adapter_config={}, policy_version=3,
    transport="disk", slot=0, replayed=False, load_seconds=0.0, stall_seconds=0.0, unloaded=[],
)  # fmt: skip


class Answering:
    """A server that takes what is published, and does with it what a test says."""

    def __init__(self, take: Callable[[LoraLoadRequest, memoryview | None], object] = lambda request, body: None):
        self.take = take

    def load_adapter(self, request: LoraLoadRequest, body: memoryview | None = None) -> LoraLoadResponse:
        self.take(request, body)
        return LOADED


def refuses(request: LoraLoadRequest, body: memoryview | None) -> None:
    raise ServerError("refused", field="rank")


def publish(channel: Channel, server: Any, version: int) -> Sent:
    return publish_by(channel, server, f"policy-v{version}", version)


def test_disk_begins_with_the_folders_of_a_trainer_before_it_and_leaves_strangers_alone(tmp_path: Path) -> None:
    ours = ["policy-v7", "policy-proof-present-0a1b2c3d", "policy-v8"]
    others = ["policy-vision-v1", "other-v3", "policy-v9-backup", "policy-v5"]
    for number, name in enumerate([*ours, *others, ".policy-v9.0a1b2c3d.tmp", ".other-v9.0a1b2c3d.tmp"]):
        folder = tmp_path / name
        folder.mkdir()
        if name != "policy-v5":  # no adapter in it
            (folder / "adapter_model.safetensors").touch()
        os.utime(folder, (number, number))
    publish(AdapterFiles(adapter_way(tmp_path)), Answering(), 9)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "policy-v8", "policy-v9", ".other-v9.0a1b2c3d.tmp"}


def test_disk_makes_a_deleted_folder_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, deletions = tmp_path / "adapters", iter([4])

    def take(request: LoraLoadRequest, body: memoryview | None) -> None:
        if request.version == 4 and next(deletions, None):
            shutil.rmtree(root)
            raise ServerError("no such folder", field="adapter_path")
        assert request.adapter_path is not None and Path(request.adapter_path).is_dir()

    disk = AdapterFiles(adapter_way(root))
    for version in range(7):
        if version == 2:
            shutil.rmtree(root)
        publish(disk, Answering(take), version)
        if version == 5:
            shutil.rmtree(root / "policy-v4")
    said: list[Any] = [record.args for record in caplog.records]
    named = [{Path(path).name for path in str(args[0]).split(", ")} for args in said]
    assert named == [{"policy-v0", "policy-v1"}, {"policy-v2", "policy-v3", "policy-v4"}, {"policy-v4"}]
    assert {path.name for path in root.iterdir()} == {"policy-v5", "policy-v6"}
    with refusing(ServerError, "rank"):
        publish(AdapterFiles(adapter_way(root)), Answering(refuses), 7)
    assert len(caplog.records) == 3


def test_body_has_the_adapter_of_now(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    def keep(request: LoraLoadRequest, body: memoryview | None) -> None:
        assert body is not None and (request.adapter_path, request.channel) == (None, None)
        bodies.append(bytes(body))

    model = tiny_lora()
    body = Body(Way(AdapterLayout(model, torch.float32), info(), "", tmp_path))
    for seed in (1, 2):
        fill_b(model, seed)
        publish(body, Answering(keep), seed)
        wanted = {name: each for name, each in model.named_parameters() if ".lora_B." in name}
        found = load(bodies[-1])
        assert all(torch.equal(found[name.replace(".default.", ".")], each) for name, each in wanted.items()) and wanted
    assert bodies[0] != bodies[1]


class GroupServer:
    """A server on a CPU, whose worker joins each group of the trainer and receives adapters by it."""

    def __init__(self, url: str) -> None:
        self.url, self.refuses = url, False
        self.received, self.ends = list[torch.Tensor](), list[AdapterChannel]()
        self.holds = ["mine", "policy-proof-present-0a1b2c3d"]
        self.unload_adapter = self.holds.remove

    def wait_until_there(self) -> BridgeInfo:
        return structs.replace(info(worker(uuid="")), lora_dtype="float32")

    def lora_status(self) -> Any:
        versions = [SimpleNamespace(name=name, version=0) for name in self.holds]
        return SimpleNamespace(load_count=2, policy_version=0, versions=versions)

    def open_channel(self, asked: ChannelRequest) -> ChannelResponse:
        self.ends.append(AdapterChannel(asked, CPU, 0))
        return ChannelResponse(channel=str(len(self.ends)), staging_bytes=0)

    def load_adapter(self, asked: LoraLoadRequest, body: memoryview | None) -> LoraLoadResponse:
        assert (asked.adapter_path, asked.channel, body) == (None, str(len(self.ends)), None)
        if self.refuses:
            raise ServerError("refused", field="rank")
        self.received.append(self.ends[-1].receive().buffer_E.clone())
        return structs.replace(LOADED, adapter_name=asked.adapter_name, policy_version=asked.version)


@pytest.mark.timeout(120)
def test_gloo_brings_the_adapter_of_now_also_after_a_publish_that_no_worker_received() -> None:
    model = tiny_lora()
    config = BridgeConfig(weight_bridge_mode="lora_only", lora_transport="gloo", lora_r=8)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the trainer asks which of its addresses leads there
        server: Any = GroupServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        swap = LoraSwap(config, model, server, Path(), 64)
        assert swap.connect(1) == 1 and server.holds == ["mine"]  # nothing of a proof that was killed
        for version, groups in ((1, 1), (2, 1), (3, 3), (4, 3)):
            fill_b(model, seed=version)
            if version == 3:
                server.refuses = True
                for _ in range(2):
                    with refusing(ServerError, "rank"):
                        swap.publish(3)
                server.refuses = False
            for _ in range(2):  # a version is sent once
                assert swap.publish(version).name == f"policy-v{version}"
            assert torch.equal(server.received[-1], AdapterLayout(model, torch.float32).pack())
            assert (len(server.received), len(server.ends)) == (version, groups)


def test_lora_swap_publishes_what_the_server_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server confirms version 3, whatever was sent."""
    nothing: Any = None
    monkeypatch.setattr(lora_swap, "publish_by", lambda *_, activate: Sent(LOADED, 0.0))
    bridge = LoraSwap(BridgeConfig(weight_bridge_mode="lora_only"), nothing, nothing, Path(), 64)
    bridge.channel = Channel()
    published = bridge.publish(3)
    assert (published.version, published.name) == (3, "policy-v3")
    with refusing(BridgeError, "version", got="3 (policy-v3)", wanted="4 (policy-v4)"):
        bridge.publish(4)
    with refusing(BridgeError, "version", wanted="3 (policy-proof)"):
        bridge.send("policy-proof", 3, activate=False)
