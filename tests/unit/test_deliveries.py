"""How an adapter comes to the engine: bodies, the channel of the one trainer, and which adapters are servable."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig
from safetensors.torch import save

from tests.unit.factories import refusing
from tests.unit.test_fence import Workers
from vllm_server.channels import Channels
from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.protocol import SERVABLE, LoraLoadRequest, refusals
from vllm_server.protocol.channels import (
    ChannelCloseRequest,
    ChannelRequest,
    CudaIpcSpec,
    FolderSpec,
    GroupSpec,
    MainMemorySpec,
    MappedTensor,
)
from vllm_server.publisher import Bodies, Delivery, delivered

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
PLACE = MappedTensor(storage=0, offset=0, shape=[1], stride=[1], dtype="float32")
TENSORS = {f"{MODULE}.lora_A.weight": torch.ones(4, 6), f"{MODULE}.lora_B.weight": torch.ones(6, 4)}


def adapter(config: object = CONFIG, tensors: dict[str, torch.Tensor] = TENSORS) -> bytes:
    return save(tensors, metadata={"adapter_config": config if isinstance(config, str) else json.dumps(config)})


def header(data: bytes) -> str:
    return b64encode(data[: 8 + int.from_bytes(data[:8], "little")]).decode()


def channel(kind: str = "cuda_ipc", **changed: Any) -> ChannelRequest:
    spec: Any = CudaIpcSpec(gpu_uuid="GPU-1", storages=[[0]])
    if kind != "cuda_ipc":
        spec = GroupSpec(backend=kind, meet="", world_size=2)  # pyright: ignore[reportArgumentType]
    fields: dict[str, Any] = {"boot_id": "b", "spec": spec, "buckets": [header(adapter())], "adapter_config": CONFIG}
    return ChannelRequest(**fields | changed)


def channels_of(workers: Workers) -> Channels:
    nothing: Any = None
    fence = Fence("b", nothing, on_version=lambda version: None, writable=False)
    return Channels(workers.call, fence, accepts=False, max_rank=8)


async def by_channel(channels: Channels, name: str) -> Delivery:
    return await delivered(LoraLoadRequest(channel=name), None, channels, ())


async def test_channels_hold_the_newest_alone() -> None:
    channels = channels_of(workers := Workers((0, 0)))
    first = (await channels.open(channel())).channel
    assert workers.open == [first] and channels.is_open
    second = (await channels.open(channel("nccl"))).channel
    assert workers.open == [second]
    with refusing(ServeError, "channel", 404, got=first):
        await by_channel(channels, first)
    await channels.close(ChannelCloseRequest(first))  # a trainer that has been replaced says goodbye: not for the other
    assert workers.open == [second]
    for _ in range(2):
        await channels.close(ChannelCloseRequest(second))
    assert workers.open == [] and not channels.is_open
    with refusing(ServeError, "channel", 404):
        await by_channel(channels, second)


@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl", "gloo"])
async def test_channels_give_each_publish_another_origin(kind: str) -> None:
    """The server refuses two living versions from one origin, and the engine's caches may be keyed by it."""
    channels = channels_of(Workers((0, 0)))
    name = (await channels.open(channel(kind))).channel
    one, two = await by_channel(channels, name), await by_channel(channels, name)
    assert one.origin != two.origin and one.origin.startswith(f"{kind}://{name}/")
    assert (one.transport, one.channel, one.file, one.config) == (kind, name, "", CONFIG)
    assert one.said_by == "channel"
    with refusing(ServeError, "channel", 404):  # it carries adapters
        channels.request(name, adapters=False)


@pytest.mark.parametrize(
    ("changed", "field", "parts"),
    [
        ({"boot_id": "another"}, "boot_id", {"got": "another", "wanted": "b, "}),
        ({"buckets": ["?"]}, "buckets", {"wanted": "base64"}),
        ({"buckets": ["AAAA"]}, "buckets", {"got": "3 bytes", "wanted": "base64"}),
        ({"buckets": []}, "buckets", {"got": "0 buckets"}),
        ({"buckets": [header(adapter())] * 2}, "buckets", {"got": "2 buckets"}),
        ({"adapter_config": CONFIG | {"r": 2}}, f"{MODULE}.lora_A.weight", {"got": "[4, 6]", "wanted": "rank 2"}),
        ({"adapter_config": CONFIG | {"use_dora": True}}, "use_dora", {"got": "true", "fix": "use_dora=False"}),
        ({"adapter_config": None}, "weights", {"fix": "--receive-weights"}),
        ({"spec": FolderSpec(folder="/home/other")}, "spec", {"got": "disk for adapters"}),
        ({"spec": MainMemorySpec(name="m", path="/proc/1/fd/3", nbytes=8, tensors={})}, "spec", {"got": "main_memory"}),
        ({"spec": CudaIpcSpec(gpu_uuid="GPU-1", storages=[[0]], tensors={"x": PLACE})}, "spec", {"got": "cuda_ipc"}),
    ],
)
async def test_channels_leave_the_open_one_when_another_cannot_be_served(
    changed: dict[str, Any], field: str, parts: dict[str, str]
) -> None:
    channels = channels_of(workers := Workers((0, 0)))
    name = (await channels.open(channel())).channel
    with refusing(ServeError, field, 409 if field in ("boot_id", "weights") else 422) as refused:
        await channels.open(channel(**changed))
    assert all(part in getattr(refused.value, name) for name, part in parts.items())
    assert workers.open == [name] and (await by_channel(channels, name)).channel == name


async def test_channels_that_a_worker_cannot_open_are_not_open() -> None:
    channels = channels_of(workers := Workers((0, 0)))
    workers.refusals["open"] = "no"
    with refusing(ServeError, "channel", 422):
        await channels.open(channel())
    assert workers.open == []
    workers.refusals.clear()
    name = (await channels.open(channel())).channel
    assert workers.open == [name]


async def chunks(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def receive(*pieces: bytes) -> Delivery:
    """What a body is taken for."""
    async with Bodies().holding(chunks(*pieces)) as file:
        assert Path(file).read_bytes() == b"".join(pieces)
        return await delivered(LoraLoadRequest(), file, channels_of(Workers((0, 0))), ())


async def test_bodies_use_a_file_again_that_holds_nothing_of_the_last_one() -> None:
    bodies = Bodies()
    large = bytes(range(256)) * 20_000  # more than a file begins with
    files = set()
    for body in (b"long" * 1000, b"short", large, b"short"):
        async with bodies.holding(chunks(body)) as file:
            assert Path(file).read_bytes() == body
            files.add(file)
    assert len(files) == 1


async def test_bodies_at_the_same_time_have_a_file_each() -> None:
    bodies = Bodies()
    async with bodies.holding(chunks(b"a")) as one, bodies.holding(chunks(b"b")) as two:
        assert (Path(one).read_bytes(), Path(two).read_bytes()) == (b"a", b"b")
    assert sorted(Path(file).exists() for file in (one, two)) == [False, True]  # one is kept for the next


async def test_delivered_by_a_body_of_pieces() -> None:
    whole = adapter()
    delivery = await receive(whole[:5], whole[5:300], whole[300:])
    assert (delivery.transport, delivery.config, delivery.said_by) == ("memory", CONFIG, "body")
    assert delivery.origin.startswith("memory://") and delivery.origin != (await receive(whole)).origin


@pytest.mark.parametrize(
    ("body", "field", "got"),
    [
        (adapter()[:-1], "adapter_model.safetensors", f"{len(adapter()) - 1} of {len(adapter())} bytes"),
        (b"\x80\x02}q\x00" + bytes(100), "adapter_model.safetensors", f"{0x717D0280} bytes"),  # torch.save
        (b"\x00" * 5 + b"\x01" + bytes(2), "adapter_model.safetensors", "1099511627776 bytes"),
        (save(TENSORS), "adapter_config", "KeyError"),
        (adapter("no JSON"), "adapter_config", "JSONDecodeError"),
        (adapter([1]), "adapter_config", "list"),
        (adapter({**CONFIG, "r": "4"}), "r", "4"),
        (adapter({k: v for k, v in CONFIG.items() if k != "lora_alpha"}), "lora_alpha", "None"),
        (adapter({k: v for k, v in CONFIG.items() if k != "target_modules"}), "target_modules", "None"),
        (adapter({**CONFIG, "lora_alpha": float("nan")}), "lora_alpha", "nan"),
        (adapter({**CONFIG, "r": 2}), f"{MODULE}.lora_A.weight", "[4, 6]"),
        (adapter(tensors={"x": torch.ones(1)}), "adapter_model.safetensors", "1 tensors"),
        (adapter(tensors=dict(list(TENSORS.items())[:1])), "adapter_model.safetensors", MODULE),
    ],
)
async def test_delivered_by_a_body_of_no_servable_adapter_is_refused_by_field(
    body: bytes, field: str, got: str
) -> None:
    with refusing(ServeError, field, 422) as refused:
        await receive(body)
    assert got in refused.value.got
    assert refused.value.fix


def written(config: Any) -> dict[str, Any]:
    """What PEFT writes into adapter_config.json for a configuration."""
    return json.loads(json.dumps(config.to_dict(), default=lambda value: sorted(value) or None))


PLAIN = {"r": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"lora_alpha": 7.5, "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian"},
        {"task_type": None},
    ],
)
def test_adapter_config_that_is_served_has_no_refusal(options: dict[str, Any]) -> None:
    assert refusals(written(LoraConfig(**{**PLAIN, **options})), 8) == []


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LoraConfig(**PLAIN, use_dora=True), "use_dora"),
        (LoraConfig(**PLAIN, modules_to_save=["lm_head"]), "modules_to_save"),
        (LoraConfig(**PLAIN, bias="lora_only"), "bias"),
        (LoraConfig(**PLAIN, lora_bias=True), "lora_bias"),
        (LoraConfig(**PLAIN, rank_pattern={"q_proj": 4}), "rank_pattern"),
        (LoraConfig(**PLAIN, alpha_pattern={"q_proj": 4}), "alpha_pattern"),
        (LoraConfig(**PLAIN, init_lora_weights="pissa"), "init_lora_weights"),
        (LoraConfig(**PLAIN, init_lora_weights="olora"), "init_lora_weights"),
        (LoraConfig(**{**PLAIN, "task_type": "SEQ_CLS"}), "task_type"),
        (LoraConfig(**{**PLAIN, "r": 16}), "r"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "peft_type"),
        (PrefixTuningConfig(num_virtual_tokens=4), "peft_type"),
        (PromptTuningConfig(num_virtual_tokens=4), "peft_type"),
    ],
)
def test_adapter_config_that_is_not_served_is_named_first(config: Any, field: str) -> None:
    first = refusals(written(config), 8)[0]
    assert first.field == field and first.fix and first.wanted
    assert str(first).startswith(f"{field}: got ")


def test_adapter_config_fields_are_pefts() -> None:
    known = set(LoraConfig().to_dict())
    assert set(SERVABLE) <= known | {"monteclora_config", "kasa_config", "arrow_config"}  # these are newer than 0.18
