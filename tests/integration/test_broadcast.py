"""All weights sent into a running vLLM: what the bridge promises for each transport, and what becomes of each fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from torch import Tensor

from grpo_trainer.alignment.probes import FAILED, Probe, probe_of, trainer_logprobs
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.export import stored_tensors
from grpo_trainer.policy import AllWeights, build_policy
from grpo_trainer.server_client import ServerClient, at_url
from grpo_trainer.shared.names import Facts, bind_names
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights import channels
from grpo_trainer.weights.broadcast import BroadcastBridge, PresentWeights
from grpo_trainer.weights.channels import Channel, Group
from grpo_trainer.weights.fleet import Fleet
from grpo_trainer.weights.layout import ModelLayout
from tests.bridge_contract import PROMPT
from tests.golden.models import golden, random_model
from tests.integration.serving import Serving, save_tiny_model, serve, shared_server
from tests.processes import running, tail, wait_for
from tests.runs import assert_fresh, of_mode, trained
from tests.unit.factories import batch, refusing, sample
from vllm_server.protocol import BRIDGE_CHECKSUMS_ROUTE, BRIDGE_STATE_DICT_INFO_ROUTE, Checksums, StateDictInfo
from vllm_server.worker.shared_weights import added, checksum

pytestmark = pytest.mark.timeout(600)

ROLLOUTS = batch([sample([4, 5], [6, 7], 1.0), sample([4, 5], [8], 0.0)])
TOLERANCE = 1e-4
PADDED = 128
"""Rows of the vocabulary of `tests/golden` in vLLM."""
WAYS = [("gloo", "on"), ("gloo", "off"), ("disk", "on"), ("disk", "off")]


@contextmanager
def receiving(
    folder: Path, *flags: str, model: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[Serving]:
    """A server that receives weights; by default of a tiny model."""
    model = model or save_tiny_model(folder / "model")
    with serve(model, folder, "--receive-weights", *flags, env=env) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with receiving(tmp_path_factory.mktemp("receiving")) as running_server:
        yield running_server


class Sending:
    """A trainer that sends its weights."""

    def __init__(self, server: Serving, folder: Path, **options: Any) -> None:
        port = server.url.rpartition(":")[2]
        values = {"model": str(server.model_folder), "weight_bridge_mode": "broadcast", "vllm_port": port}
        values |= {"seq_len": 128, "lr": 1e-2, "save_path": str(folder)}
        self.config = build(TrainConfig, values | options)
        policy = build_policy(self.config)
        assert isinstance(policy, AllWeights) and self.config.weight_bridge_mode == "broadcast"
        self.policy = policy
        self.trainer = Trainer(policy.model, self.config)
        self.client = ServerClient(self.config.server)
        self.folder = folder / "weights"
        self.bridge = self.bridge_to(server)

    @property
    def channel(self) -> Channel:
        assert self.bridge.channel is not None, "connect comes first"
        return self.bridge.channel

    def step(self) -> None:
        assert self.trainer.step(ROLLOUTS, 0, self.bridge.updating).updated

    def bridge_to(self, server: Serving) -> BroadcastBridge:
        """A bridge from the same weights to another server."""
        weights = PresentWeights(lambda: self.policy.tensors())  # a test may replace it
        assert self.config.weight_bridge_mode == "broadcast"
        folder = self.folder / server.url.rpartition(":")[2]
        client = ServerClient(at_url(self.config.server, server.url))
        return BroadcastBridge(self.config, self.policy, weights, client, folder, 128, "float32")

    def ask(self, client: ServerClient | None = None) -> tuple[Probe, int]:
        client = client or self.client
        answer = client.generate(PROMPT, max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True, seed=7)
        return probe_of(answer), answer.policy_version

    def assert_serves(self, version: int, server: Serving | None = None) -> Probe:
        """The server's logprobs are those of the weights that the trainer has now."""
        probe, answered = self.ask(server and ServerClient(at_url(self.config.server, server.url)))
        assert answered == version
        assert float((probe.server_logprobs - trainer_logprobs(self.policy.model, probe)).abs().mean()) < TOLERANCE
        return probe


def expected_sums(
    model: Any, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, served_ties: Mapping[str, str]
) -> dict[str, int]:
    """The checksums that the server's parameters have if they are the model's, in the server's dtype."""
    own = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    every = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    ties = {
        name: first[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }
    parts: dict[str, list[int]] = {}
    for binding in bind_names(every, shapes, Facts(ties, served_ties)):
        row = torch.Size(shapes[binding.vllm_name][1:]).numel()
        parts.setdefault(binding.vllm_name, []).append(checksum(own[binding.hf_name], binding.start * row))
    return {name: added(sums) for name, sums in parts.items()}


def assert_equal_bits(
    server: Serving, model: Any, dtype: torch.dtype = torch.float32, served_ties: Mapping[str, str] | None = None
) -> None:
    described = msgspec.json.decode(server.get(BRIDGE_STATE_DICT_INFO_ROUTE).content, type=StateDictInfo)
    (sums,) = msgspec.json.decode(server.get(BRIDGE_CHECKSUMS_ROUTE).content, type=Checksums).workers
    shapes = {name: tuple(info.shape) for name, info in described.params.items()}
    wanted = expected_sums(model, shapes, dtype, served_ties or {})
    assert wanted and {name: sums[name] for name in wanted} == wanted


# ------------------------------------------------------------------------------------------------ what it promises


@pytest.mark.parametrize(("transport", "staging"), WAYS)
def test_each_version_is_served_bit_for_bit(server: Serving, tmp_path: Path, transport: str, staging: str) -> None:
    made = Sending(server, tmp_path, broadcast_transport=transport, broadcast_staging=staging)
    with made.bridge:
        first = made.bridge.connect(0)
        noise = made.bridge.prove()
        assert noise is not None and noise < TOLERANCE
        made.bridge.publish(first)
        probe = made.assert_serves(first)
        for version in range(first + 1, first + 4):
            made.step()
            published = made.bridge.publish(version)
            metrics = reduce(published.metrics)
            assert published.version == version == metrics["publish/version"]
            assert metrics["publish/stall_time"] <= metrics["train/sync_time"]
            assert made.assert_serves(version).server_logprobs.tolist() != probe.server_logprobs.tolist()
            assert_equal_bits(server, made.policy.model)
        assert reduce(made.bridge.publish(first + 3).metrics)["train/sync_time"] == 0.0, "nothing is sent twice"
    assert not list((tmp_path / "weights").glob("*")), "the server keeps its own copy"


def test_broadcast_auto_takes_the_next(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NCCL between containers that can't reach each other."""

    class Unreached(Group):
        def join(self, refused: Callable[[], None]) -> None:
            super().join(refused)
            raise BridgeError("the workers did not join", field="--broadcast-transport", got="nccl")

    monkeypatch.setitem(channels.CHANNELS, "nccl", lambda way: Unreached(way, "gloo"))
    monkeypatch.setattr(channels, "why_not", lambda *_: None)
    monkeypatch.setattr(channels, "AUTOMATIC", ("nccl", "gloo"))
    made = Sending(server, tmp_path)
    version = made.bridge.connect(0)
    assert made.channel.name == "gloo"
    made.assert_serves(version)
    with pytest.raises(BridgeError) as refused:
        Sending(server, tmp_path, broadcast_transport="nccl").bridge.connect(0)
    assert refused.value.got == "nccl"


@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
def test_requests_in_flight_are_treated_as_asked(server: Serving, tmp_path: Path, in_flight: str) -> None:
    made = Sending(server, tmp_path, in_flight=in_flight, train_layer_indices="1")
    version = made.bridge.connect(0)
    made.step()
    made.bridge.publish(version + 1)
    made.assert_serves(version + 1)


# ---------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("staging", ["on", "off"])
def test_a_second_trainer_replaces_the_first_one(server: Serving, tmp_path: Path, staging: str) -> None:
    first = Sending(server, tmp_path / "first", broadcast_staging=staging)
    version = first.bridge.connect(0)
    second = Sending(server, tmp_path / "second", broadcast_staging=staging)
    second.step()
    newest = second.bridge.connect(0)
    first.step()
    with refusing(ServerError, "channel"):
        first.bridge.publish(version + 1)
    second.assert_serves(newest)


@pytest.mark.parametrize("part", ["layers.1.mlp", "layers.0.self_attn.k_proj.weight"])
def test_broadcast_weights_not_sent(
    server: Serving, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a layer, and a matrix that vLLM merges with others."""
    made = Sending(server, tmp_path)
    whole = made.policy.tensors()
    monkeypatch.setattr(
        made.policy, "tensors", lambda: {name: each for name, each in whole.items() if part not in name}
    )
    with pytest.raises(ServerError) as refused:
        made.bridge.connect(0)
    assert ("qkv_proj" if "k_proj" in part else part) in refused.value.got
    assert server.get("/health").status_code == 503
    assert server.post("/generate", {"prompt": {"prompt_token_ids": [4]}}).status_code == 503
    healed = Sending(server, tmp_path)
    healed.assert_serves(healed.bridge.connect(0))


@pytest.mark.parametrize("fault", ["swapped", "stale"])
def test_broadcast_wrong_weights(server: Serving, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in each other's place; and a sender that keeps sending its first version."""
    made = Sending(server, tmp_path)
    kept: dict[str, Tensor] = {}

    def swap(self: ModelLayout, name: str, tensor: Tensor) -> dict[str, Tensor]:
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        part = name.split(".")[-2]
        return {name.replace(part, other.get(part, part)): tensor}

    def repeat(self: ModelLayout, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor if tensor.is_meta else kept.setdefault(name, tensor.clone())}

    monkeypatch.setattr(ModelLayout, "plain", swap if fault == "swapped" else repeat)
    made.bridge.connect(0)
    with pytest.raises(BridgeError) as refused:
        made.bridge.prove()
    assert refused.value.field.startswith(FAILED)


@pytest.mark.parametrize(("staging", "torn"), [("on", False), ("off", True)])
def test_broadcast_trainer_killed_half_way(server: Serving, tmp_path: Path, staging: str, torn: bool) -> None:
    """Staged weights are written only when all have come. Otherwise the server refuses until the next trainer."""
    log = tmp_path / "log"
    words = ["-m", "tests.integration.killed_sender", server.url, str(server.model_folder), str(tmp_path), staging]
    with running(*words, log=log) as process:
        wait_for("the trainer is dead", lambda: process.poll() is not None, log, 120)
        assert process.wait() == -signal.SIGKILL, tail(log)
    wait_for("the server's verdict", lambda: server.get("/health").status_code == (503 if torn else 200), log, 90)
    if not torn:
        assert_equal_bits(server, Sending(server, tmp_path).policy.model)  # what the killed trainer began with
        (version,) = (line for line in log.read_text().splitlines() if line.isdigit())
        assert server.generate([4]).policy_version == int(version)
    healed = Sending(server, tmp_path)
    healed.assert_serves(healed.bridge.connect(0))


def test_a_server_that_was_not_started_for_it_is_refused(tmp_path: Path) -> None:
    server = shared_server()
    with pytest.raises(BridgeError) as refused:
        Sending(server, tmp_path).bridge.connect(0)
    assert "--receive-weights" in refused.value.fix
    body = {"boot_id": "x", "spec": {"kind": "disk", "folder": "/"}, "buckets": []}
    assert server.post("/channels", body).status_code == 409


# ------------------------------------------------------------------------------- models, shards, and whole runs


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_every_kind_of_model_arrives_bit_for_bit(tmp_path: Path, architecture: str) -> None:
    """A tied head and a mixture of experts; the server has the weights in bfloat16."""
    folder = save_tiny_model(tmp_path / "model")  # its tokenizer
    random_model(architecture).save_pretrained(folder)
    with receiving(tmp_path, "--dtype", "bfloat16", model=folder) as server:
        made = Sending(server, tmp_path, broadcast_transport="gloo")
        version = made.bridge.connect(0)
        for _ in range(2):  # by vLLM's own code, then by its copies
            with torch.no_grad():
                for _, tensor in stored_tensors(made.policy.model).values():
                    tensor.add_(0.05 * torch.randn(tensor.shape))
            version += 1
            made.bridge.publish(version)
            assert_equal_bits(server, made.policy.model, torch.bfloat16, golden(architecture).ties)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of two workers, each with half of each matrix."""
    with receiving(tmp_path_factory.mktemp("sharded"), "--tensor-parallel-size", "2") as running_server:
        yield running_server


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_one_trainer_sends_to_two_servers(server: Serving, sharded: Serving, tmp_path: Path, transport: str) -> None:
    """One of them has two workers."""
    made = Sending(server, tmp_path, broadcast_transport=transport)
    also = (sharded.url.removeprefix("http://"),)
    both = at_url(made.config.server, server.url).model_copy(update={"also": also})
    of_url = {each.url: each for each in (server, sharded)}
    with Fleet(both, lambda name, settings: made.bridge_to(of_url[settings.url])) as servers:
        version = servers.connect(0)
        servers.publish(version)
        assert servers.prove() is not None
        for number in (version + 1, version + 2):
            made.step()
            assert servers.publish(number).version == number
            for each in (server, sharded):
                made.assert_serves(number, each)


@pytest.mark.parametrize("transport", ["disk", "gloo"])
def test_broadcast_server_killed_half_way(
    server: Serving, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gloo it is the last test of the module's server."""
    monkeypatch.setattr("grpo_trainer.weights.layout.BUCKET_BYTES", 4096)
    with receiving(tmp_path) if transport == "disk" else nullcontext(server) as target:
        made = Sending(target, tmp_path, broadcast_transport=transport)
        version = made.bridge.connect(0)
        parts = ModelLayout.parts

        def kill_and_give(self: ModelLayout, number: int, stored: Any) -> Iterator[Any]:
            if number == 2 and target.process.poll() is None:
                os.killpg(target.process.pid, signal.SIGKILL)
                target.process.wait()
            return parts(self, number, stored)

        monkeypatch.setattr(ModelLayout, "parts", kill_and_give)
        made.step()
        with pytest.raises((BridgeError, ServerError)):
            made.bridge.publish(version + 1)


@pytest.mark.parametrize(("part", "dim"), [("q_proj", 0), ("down_proj", 1)])
def test_the_wrong_ranks_shard_does_not_pass_the_proof(
    sharded: Serving, tmp_path: Path, part: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker gets the other one's half of a matrix: of its outputs, or of its inputs."""

    def exchange(self: ModelLayout, name: str, tensor: Tensor) -> dict[str, Tensor]:
        is_it = f"{part}.weight" in name
        return {name: torch.cat(tensor.chunk(2, dim)[::-1], dim) if is_it else tensor}

    made = Sending(sharded, tmp_path)
    monkeypatch.setattr(ModelLayout, "plain", exchange)
    made.bridge.connect(0)
    with pytest.raises(BridgeError) as refused:
        made.bridge.prove()
    assert refused.value.field.startswith(FAILED)


def shard(name: str, pieces: Mapping[int, Tensor], rank: int, ranks: int) -> Tensor:
    """A rank's shard of a parameter, which the pieces make up in the order of their first rows."""
    parts = [pieces[start] for start in sorted(pieces)]
    if "w13" in name:  # of each expert gate and up
        parts, dim = list(parts[0].chunk(2, 1)), 1
    elif any(each in name for each in ("qkv_proj", "gate_up_proj")):
        dim = 0
    elif any(each in name for each in ("o_proj", "down_proj", "w2")):
        dim = parts[0].ndim - 1
    elif any(each in name for each in ("embed_tokens", "lm_head")):
        return torch.nn.functional.pad(parts[0], (0, 0, 0, PADDED - len(parts[0]))).chunk(ranks)[rank]
    else:  # norms and a mixture's router: every rank has all of it
        return parts[0]
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)


def shards_of(model: Any, architecture: str, dtype: torch.dtype, rank: int, ranks: int) -> dict[str, int]:
    """The checksums of a worker's parameters if they are its shards of the model's weights."""
    own = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    pieces: dict[str, dict[int, Tensor]] = {}
    for hf_name, places in golden(architecture).found.items():
        for vllm_name, start in places:
            pieces.setdefault(vllm_name, {})[start] = own[hf_name]
    return {name: checksum(shard(name, of, rank, ranks)) for name, of in pieces.items()}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_every_kind_of_model_arrives_in_shards_bit_for_bit(tmp_path: Path, architecture: str) -> None:
    """A tied model and a mixture of experts, each over two workers."""
    folder = save_tiny_model(tmp_path / "model")  # its tokenizer
    random_model(architecture).save_pretrained(folder)
    with receiving(tmp_path, "--dtype", "bfloat16", "--tensor-parallel-size", "2", model=folder) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        maps = [line for one in family for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
        shared = [line for line in maps if "cpushm" in line]
        assert shared and all(line.endswith("(deleted)") for line in shared)
        made = Sending(server, tmp_path)
        version = made.bridge.connect(0)
        for number in (version + 1, version + 2):
            with torch.no_grad():
                for _, tensor in stored_tensors(made.policy.model).values():
                    tensor.add_(0.05 * torch.randn(tensor.shape))
            made.bridge.publish(number)
            workers = msgspec.json.decode(server.get(BRIDGE_CHECKSUMS_ROUTE).content, type=Checksums).workers
            wanted = [shards_of(made.policy.model, architecture, torch.bfloat16, rank, 2) for rank in range(2)]
            assert wanted[0] != wanted[1]
            assert workers == wanted


@pytest.mark.parametrize(
    "servers",
    [
        {"server.replicas": 2},
        {"server.replicas": 2, "broadcast-transport": "gloo"},
        {"server.replicas": 2, "broadcast-transport": "disk"},
        {"server.tensor-parallel-size": 2, "broadcast-staging": "off"},
    ],
    ids=["two", "two-gloo", "two-disk", "sharded-not-staged"],
)
def test_two_trainer_processes_send(demo_model: Path, tmp_path: Path, servers: dict[str, object]) -> None:
    """To two servers, and to one of two workers. Each proof changes the shards of both processes."""
    run_dir = tmp_path / "run"
    options = {"trainer-gpus": 2, "training-steps": 2, "broadcast-root": tmp_path / "root", **servers}
    done = trained(demo_model, run_dir, **of_mode("broadcast", **options))
    assert [row["step"] for row in done] == [1, 2]
    assert_fresh(done)
    said = (run_dir / "logs" / "trainer.log").read_text()
    assert said.count("synthetic change") == servers.get("server.replicas", 1)
    transport = servers.get("broadcast-transport", "main_memory")
    assert said.count(f" by {transport}:") == servers.get("server.replicas", 1)
