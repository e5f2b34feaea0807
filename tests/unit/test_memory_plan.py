"""Memory plans against arithmetic by hand, and against what a model keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_trainer.bench.models import SHAPES
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.options import build
from grpo_trainer.config.train import BUCKET_BYTES, TrainConfig
from grpo_trainer.engine.recompute import measure
from grpo_trainer.errors import ModelError
from grpo_trainer.machine import MainMemory, main_memory
from grpo_trainer.memory import (
    NOTHING_HELPS,
    SERVER_CONTEXT,
    SERVER_WORKSPACE,
    Devices,
    Setup,
    advice,
    held,
    layer_bytes_per_token,
)
from grpo_trainer.model.lora import use_few_kernels
from grpo_trainer.model.shape import ModelShape, shape_of
from tests.unit.factories import refusing
from vllm_server.protocol import CPU_CACHE_BYTES

H200 = Devices("cuda", 141_000_000_000)
SMALL = ModelShape(
    hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=32, tied=False, positions=64
)


def trainer(mode: str = "none", **flags: Any) -> TrainConfig:
    return build(TrainConfig, {"model_name": "m", "weight_bridge_mode": mode, "seq_len": 10, "batch_size": 2, **flags})


def setup(
    config: TrainConfig,
    shape: ModelShape = SMALL,
    share: float = 0.5,
    devices: Devices = H200,
    trainers: int = 1,
    **server: int | str,
) -> Setup:
    """A run whose server has a share of its GPUs."""
    changed = config.server.model_copy(update={"gpu_memory_utilization": share, **server})
    return Setup(config.model_copy(update={"server": changed}), shape, devices, trainers)


def parts(config: TrainConfig, devices: Devices = H200) -> dict[tuple[str, str], int]:
    plan = setup(config, devices=devices).plan()
    return {(row.owner, row.what): row.nbytes for row in plan.rows}


def test_shape_parameters() -> None:
    assert SHAPES["0.5b"].parameters == 494_032_768  # Qwen2.5-0.5B, and 7B, by their own count
    assert SHAPES["7b"].parameters == 7_615_616_512
    # Layer: q, o 8*8 each, k, v 8*4 each: 192; mlp 3*8*16 = 384; norms 16. Twice, and 2 * 32*8 = 512, and 8.
    assert SMALL.parameters == 2 * (192 + 384 + 16) + 512 + 8
    assert SMALL.adapter_parameters(4, ("q_proj", "down_proj")) == 2 * 4 * (16 + 24)
    # Of q, k, v, o and each of 5 experts' three: half of the side that is not as wide as the model.
    assert replace(SMALL, experts=5).slot_parameters(4, 2) == 4 * (12 + 10 + 10 + 12 + 5 * 3 * 16)

    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    shape = ModelShape.from_config(
        config | {"intermediate_size": 99, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    )
    assert shape.layer_parameters == 4 * 64 + 3 * 8 * 16 * 4 + 8 * 4 + 16  # heads of 4, keys of their own
    assert shape.active_intermediate == 32
    with refusing(ModelError, "config.json", words=["vocab_size"]):
        ModelShape.from_config({"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2})


def test_sizes_that_a_config_omits_are_those_of_transformers_class(tmp_path: Path) -> None:
    """Gemma 3 is published with a part of its text model's sizes; Llama's own default is a vocabulary of 32,000."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    given = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = shape_of(str(tmp_path))
    assert found == replace(SMALL, hidden=2560, intermediate=10_240, layers=34, heads=8, kv_heads=4, head_dim=256,
                            vocab=262_208, tied=True, positions=131_072)  # fmt: skip
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    assert (found := shape_of(str(tmp_path))) is not None and (found.vocab, found.kv_heads) == (32_000, 2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-nobody", **sizes}))
    assert shape_of(str(tmp_path)) is None


ALL, LAYERS = SMALL.parameters, 2 * SMALL.layer_parameters
ADAPTER = SMALL.adapter_parameters(8, ("q_proj", "v_proj"))
SOME = {"lora_r": 8, "lora_target_modules": "q_proj,v_proj"}
HEAD = 20 * 32 * (4 + 25)
"""Logits of 20 tokens, 4 bytes each, and 25 of what is computed from them."""


@pytest.mark.parametrize(
    ("mode", "flags", "trainers", "wanted"),
    [
        # fp32, computed with in bfloat16; of the head's 32 x 8 weights a copy, and their gradient
        ("none", {}, 1, {"weights": 4 * ALL, "weights, cast": 2 * LAYERS, "gradients": 4 * ALL}),
        ("none", {}, 1, {"optimizer states": 8 * ALL, "reference": 0, "head": HEAD + 256 * (2 + 4)}),
        ("none", {"kl_beta": 0.1}, 1, {"reference": 2 * ALL}),
        ("none", {"kl_beta": 0.1, "ref_offload": True}, 1, {"reference": 0}),
        ("none", {"optimizer": "adamw_8bit"}, 1, {"optimizer states": (2 + 8 / 256) * ALL}),
        ("none", {"sharding": "none"}, 4, {"weights": 4 * ALL, "gradients": 4 * ALL, "gradient bucket": 256 << 20}),
        # a quarter each, and what comes together to compute: two layers, one's gradient, and what is in no layer
        ("none", {}, 4, {"weights": ALL, "gradients": ALL, "optimizer states": 2 * ALL, "gradient bucket": 0}),
        ("none", {}, 4, {"weights, cast": 0, "gathered weights": 10 * LAYERS / 2 + 2 * (2 * 32 * 8 + 8)}),
        ("shared_vllm", {}, 1, {"weights": 0, "gradients": 2 * ALL, "head": HEAD + 256 * 2, "master weights": 0}),
        ("shared_vllm", {"master_weights": True}, 1, {"master weights": 4 * ALL}),
        ("shared_vllm", {"grad_dtype": "float32"}, 1, {"gradients": 4 * ALL, "head": HEAD + 256 * 4}),
        ("shared_vllm", {"dtype": "float16"}, 1, {"gradients": 4 * ALL, "head": HEAD + 256 * 4}),
        ("shared_vllm", {"train_layer_indices": "1"}, 1, {"optimizer states": 8 * LAYERS / 2, "head": HEAD}),
        # pairs of trainer and server share the states only; a trainer of each shard holds its part of everything
        ("shared_vllm", {"master_weights": True}, 2, {"gradients": 2 * ALL, "master weights": 2 * ALL}),
        ("shared_vllm", {}, 2, {"optimizer states": 4 * ALL, "gradient bucket": 256 << 20}),
        ("shared_vllm", {"tensor_parallel_size": 2}, 2, {"weights": 0, "gradients": ALL, "optimizer states": 4 * ALL}),
        ("shared_vllm", {"tensor_parallel_size": 2}, 2, {"head": (HEAD + 256 * 2) / 2, "gradient bucket": 0}),
        ("lora_only", SOME, 1, {"weights": 2 * ALL, "adapter": 4 * ADAPTER, "gradients": 4 * ADAPTER, "head": HEAD}),
        ("lora_only", {**SOME, "share_base": True}, 1, {"weights": 0, "optimizer states": 8 * ADAPTER}),
        ("lora_only", {"load_in_4bit": True}, 1, {"weights": 0.52 * LAYERS + 2 * (ALL - LAYERS)}),
    ],
)
def test_what_a_trainer_holds(mode: str, flags: dict[str, Any], trainers: int, wanted: dict[str, float]) -> None:
    found = held(trainer(mode, **flags), SMALL, trainers, on_gpu=True)
    assert {what: found[what] for what in wanted} == wanted


def test_servers_hold_weights_and_slots_for_adapters() -> None:
    found = parts(trainer("lora_only", **SOME, lora_keep_versions=3))
    every = 2 * 8 * (16 + 12 + 12 + 16 + 3 * 24)  # r x (in + out) of all linear modules of two layers
    assert found["server", "adapter slots"] == 2 * every * (3 + 4) and found["server", "weights"] == 2 * ALL
    assert ("server", "adapter slots") not in parts(trainer("lora_restart"))
    rows = setup(trainer("shared_vllm"), devices=Devices("cuda", 10**12, 2), trainers=2, replicas=2).plan().rows
    for owner in ("trainer", "server"):  # in pairs, with each GPU's memory for one of them
        assert {row.device for row in rows if row.owner == owner} == {0, 1}


@pytest.mark.parametrize(
    ("gpus", "visible", "servers"),
    [
        ("0;1", None, {0: 1, 1: 1}),
        ("1;1", None, {1: 2}),
        ("1 ; 1", None, {1: 2}),
        ("0,1;1,2", None, {0: 1, 1: 2, 2: 1}),
        ("7;6", ("6", "7"), {6: 1, 7: 1}),  # the trainer is on the first that it sees, which is 6
        ("6;6", ("6", "7"), {6: 2}),
        ("GPU-b;GPU-b", ("GPU-a", "GPU-b"), {1: 2}),
        ("0;0", ("7",), {0: 2}),  # one that only the servers see
        ("1;1", ("0",), {1: 2}),
    ],
)
def test_memory_of_servers_adds_up_on_each_gpu(
    gpus: str, visible: tuple[str, ...] | None, servers: dict[int, int]
) -> None:
    devices = Devices("cuda", 141_000_000_000, 4, visible)
    plan = setup(trainer("lora_only"), share=0.25, devices=devices, replicas=2, gpus=gpus).plan()
    alone = setup(trainer("lora_only"), share=0.25).plan()
    one = sum(row.nbytes for row in alone.rows if row.owner == "server")
    found = {
        device: sum(row.nbytes for row in plan.rows if (row.owner, row.device) == ("server", device))
        for device in {row.device for row in plan.rows if row.owner == "server"}
    }
    assert found == {device: count * one for device, count in servers.items()}
    assert plan.kv_tokens == 2 * alone.kv_tokens
    first = int(visible[0]) if visible and visible[0].isdecimal() else 0
    assert {row.device for row in plan.rows if row.owner == "trainer"} == {first}
    for unknown in ("0,GPU-c", "0,,1", "²"):
        assert devices.of_servers(trainer().server.model_copy(update={"gpus": unknown})) is None
    two_halves = setup(trainer("lora_only"), share=0.5, devices=devices, replicas=2, gpus=gpus).plan()
    assert bool(two_halves.problems) == (max(servers.values()) == 2)


def test_memory_of_gpus_that_cuda_visible_devices_names() -> None:
    def seen(*visible: str) -> Devices:
        return Devices("cuda", 141_000_000_000, len(visible), visible)

    config = trainer("lora_only")
    for gpus, devices in (("0", seen("GPU-a", "GPU-b")), ("1", seen("0", "GPU-b")), ("GPU-c", seen("GPU-a"))):
        assert devices.of_servers(config.server.model_copy(update={"gpus": gpus})) is None, "may be one of the seen"
    plan = setup(config, devices=seen("6", "7"), tensor_parallel_size=2).plan()
    assert {row.device for row in plan.rows if row.owner == "server"} == {6, 7}
    plan = setup(trainer("lora_only", device="cuda:1"), devices=seen("6", "7")).plan()
    assert {row.owner: row.device for row in plan.rows} == {"server": 6, "trainer": 7}
    assert seen("3", "1").first(3) == [3, 1, 4] and seen("GPU-a").first(2) == [0, 1]  # the last is not there


def test_activations_and_head() -> None:
    # Per token and layer, bfloat16: norms 2*4*8 = 64; q, k, v, out 2*(16 + 8) = 48; MLP 2*3*16 = 96;
    # inputs 2*(8 + 8 + 8 + 16) = 80, what norms scaled 2*2*8 = 32.
    assert layer_bytes_per_token(trainer(), SMALL, 2) == 64 + 48 + 96 + 80 + 32
    # An adapter on q, k and down keeps their inputs: 2*(8 + 16) = 48.
    lora = trainer("lora_only", lora_target_modules="q_proj,k_proj,down_proj")
    assert layer_bytes_per_token(lora, SMALL, 2) == 64 + 48 + 96 + 48
    one, two = (layer_bytes_per_token(trainer("shared_vllm", tensor_parallel_size=ranks), SMALL, 2) for ranks in (1, 2))
    assert one == 320 and two == 64 + (48 + 96) / 2 + 2 * (2 * 8 + (8 + 16) / 2 + 2 * 8)  # half of all but the hidden
    layer = 20 * 320  # 2 sequences of 10
    found = parts(trainer())
    assert found["trainer", "activations"] == 3 * layer  # 2 layers, and the gradients of one's
    kept = parts(trainer(gradient_checkpointing=True))["trainer", "activations"]
    assert kept == 2 * 20 * 8 * 2 + 2 * layer  # each layer's input; one layer whole, and its gradients
    assert parts(trainer(max_tokens_per_microbatch=10))["trainer", "activations"] == 3 * layer // 2


def test_left_to_itself_as_few_layers_are_recomputed_as_fit() -> None:
    config = trainer("lora_only", batch_size=8, seq_len=4096)

    def recomputed(gigabytes: int) -> int:
        plan = setup(config, SHAPES["7b"], 0.3, Devices("cuda", gigabytes * 1_000_000_000)).plan()
        assert bool(plan.problems) == (gigabytes < 60)
        return plan.recomputed[0]

    counts = [recomputed(size) for size in (50, 80, 141, 1000)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 28 and counts[-1] == 0
    assert 0 < counts[2] < counts[1] <= 28


@pytest.mark.parametrize("adapter", [False, True])
def test_estimates_agree_with_what_a_model_keeps(adapter: bool) -> None:
    """Measured as the trainer does before its first step, on a real model of two layers."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "vocab_size": 128}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).train()
    if adapter:
        model.requires_grad_(False)
        modules = list(BridgeConfig().lora_target_modules)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=modules), autocast_adapter_dtype=True)
        use_few_kernels(model)
    decoder = model.get_base_model().model if adapter else model.model

    def run(tokens: int) -> torch.Tensor:
        return decoder(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False).last_hidden_state

    measured = measure(model, run)[0] / 2
    shape = ModelShape.from_config(config.to_dict())
    estimate = layer_bytes_per_token(trainer("lora_only" if adapter else "none"), shape, 2)
    assert estimate == pytest.approx(measured, rel=0.05)


def test_the_servers_share() -> None:
    plan = setup(trainer()).plan()
    token = 2 * 2 * 1 * 4 * 2  # keys and values of 2 layers, one head of 4, 2 bytes
    cache = 70_500_000_000 - 2 * SMALL.parameters - SERVER_WORKSPACE
    assert plan.kv_tokens == cache // token
    server = sum(row.nbytes for row in plan.rows if row.owner == "server")
    assert server == 70_500_000_000 + SERVER_CONTEXT  # its share, and what CUDA takes beyond it
    assert not plan.problems
    shards = setup(trainer(), SHAPES["0.5b"], devices=replace(H200, count=2), tensor_parallel_size=2).plan()
    assert {row.device for row in shards.rows if row.owner == "server"} == {0, 1}
    (weights,) = {row.nbytes for row in shards.rows if (row.owner, row.what) == ("server", "weights")}
    assert weights == SHAPES["0.5b"].parameters
    own = setup(trainer(device="cuda:1"), SHAPES["0.5b"], 0.9, replace(H200, count=2)).plan()
    assert {row.device for row in own.rows if row.owner == "trainer"} == {1}


def test_a_trainer_that_uses_spare_memory_is_not_tight_whatever_the_other_one_recomputes() -> None:
    """The first of two trainers shares its GPU with the server and recomputes most layers, the other one few."""
    config = trainer("broadcast", batch_size=64, seq_len=4096, max_tokens_per_microbatch=180_224)
    plan = setup(config, SHAPES["1.5b"], 0.45, Devices("cuda", 150_750_000_000, 2), 2).plan()
    assert plan.tightest == 0 and plan.used(1) > 0.93 * plan.devices.total and not plan.is_tight


def test_plan_of_main_memory() -> None:
    found = parts(trainer("lora_only"), devices=Devices("cpu", 24 << 30))
    assert found["server", "weights"] == found["trainer", "weights"] == 4 * SMALL.parameters
    assert found["server", "key-value cache"] == CPU_CACHE_BYTES and ("trainer", "weights, cast") not in found

    one, two = (
        setup(trainer("lora_only"), devices=Devices("cpu", 24 << 30), trainers=count).plan() for count in (1, 2)
    )
    all_held = [sum(row.nbytes for row in plan.rows if row.owner == "trainer") for plan in (one, two)]
    assert all_held[1] == 2 * (all_held[0] + BUCKET_BYTES) and {row.device for row in two.rows} == {0}


def planned(config: TrainConfig, share: float = 0.45, devices: Devices = H200) -> Setup:
    return setup(config, SHAPES["7b"], share, devices, max_model_len=4096)


@pytest.mark.parametrize(
    ("visible", "device", "name"),
    [(None, 0, "0"), (("5", "6"), 1, "6"), (("GPU-5", "GPU-6"), 1, "GPU-6"), (("5", "GPU-6"), 0, "5")],
)
def test_problems_name_a_gpu_as_cuda_visible_devices_does(
    visible: tuple[str, ...] | None, device: int, name: str
) -> None:
    config = trainer(seq_len=4096, device=f"cuda:{device}")
    plan = planned(config, devices=Devices("cuda", 20_000_000_000, 2, visible)).plan()
    assert plan.problems[0].field == f"GPU {name}"


def test_what_does_not_fit_is_said_with_the_largest_rows() -> None:
    plan = planned(trainer(seq_len=4096)).plan()
    assert plan.problems[0].field == "GPU 0" and "141.0 GB" in plan.problems[0].wanted
    # 8 bytes of AdamW's states for each of 7,615,616,512 parameters; 4 of their fp32 weights, 4 of the gradients. The
    # cache: 0.45 * 141 GB, less 15.23 GB of weights in bfloat16 and 2.5 GB of workspace.
    assert [(row.owner, row.what, row.nbytes) for row in plan.largest_rows(plan.fullest)] == [
        ("trainer", "optimizer states", 8 * 7_615_616_512),
        ("server", "key-value cache", 63_450_000_000 - 2 * 7_615_616_512 - 2_500_000_000),
        ("trainer", "weights", 4 * 7_615_616_512),
    ]
    (problem,) = planned(trainer("lora_only", seq_len=10), share=0.13).plan().problems
    assert problem.field == "key-value cache" and "4,096 tokens" in problem.wanted
    assert not planned(trainer("lora_only", seq_len=4096, batch_size=4)).plan().problems


@pytest.mark.parametrize(
    ("tried", "ways"),
    [
        (
            planned(trainer("lora_only", seq_len=4096, batch_size=16, gradient_checkpointing=False)),
            ["--max-tokens-per-microbatch 4096", "--gradient-checkpointing"],
        ),
        (planned(trainer("lora_only", seq_len=10), share=0.13), ["--server.gpu-memory-utilization 0.15"]),
        (
            planned(trainer(seq_len=4096)),
            [
                "--optimizer adamw_8bit with --server.gpu-memory-utilization 0.2",
                "--weight-bridge-mode lora_only --share-base",
            ],
        ),
        # 15.2 GB of weights are more than an eighth of 80 GB: the trainer's own GPU leaves the server half of one.
        (planned(trainer("lora_only"), 0.95, Devices("cuda", 80_000_000_000, 2)), ["--device cuda:1"]),
        (planned(trainer(seq_len=4096), devices=Devices("cuda", 12_000_000_000)), [NOTHING_HELPS]),  # weights: 15.2 GB
        (planned(trainer(seq_len=4096), devices=Devices("cpu", 12_000_000_000)), [NOTHING_HELPS]),
    ],
)
def test_only_what_helps_is_advised(tried: Setup, ways: list[str]) -> None:
    assert not tried.plan().fits
    assert advice(tried).split("; or ")[: len(ways)] == ways


@pytest.mark.parametrize(
    ("mode", "flags", "share", "trainers", "both"),
    [
        ("lora_only", {"share_base": True}, 0.35, 3.1, 58.5),
        ("lora_only", {}, 0.35, 18.3, 73.7),
        ("shared_vllm", {}, 0.35, 79.3, 135.1),
        ("none", {"optimizer": "adamw_8bit"}, 0.25, 92.1, 142.7),
    ],
)
def test_plan_is_near_measurements(
    mode: str, flags: dict[str, Any], share: float, trainers: float, both: float
) -> None:
    """7B on an H200 in docs/benchmarks.md: the trainer's allocations at their peak, and all memory in use, in GB."""
    config = trainer(mode, seq_len=1536, max_tokens_per_microbatch=4608, gradient_checkpointing=True, **flags)
    plan = setup(config, SHAPES["7b"], share, Devices("cuda", 150_750_000_000)).plan()
    allocated = sum(row.nbytes for row in plan.rows if row.owner == "trainer" and row.what != "process")
    assert allocated / 1e9 == pytest.approx(trainers, rel=0.06, abs=1.1)  # activations are measured by the trainer
    assert plan.used(0) / 1e9 == pytest.approx(both, rel=0.06)


# main memory ---------------------------------------------------------------------------------------------------------


GIB = 1 << 30


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        (None, {}, MainMemory(64 * GIB, 48 * GIB)),  # the machine's
        (
            "0::/",
            {
                "memory.max": 8 * GIB,
                "memory.current": 5 * GIB,
                "memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}",
            },
            MainMemory(8 * GIB, 5 * GIB),  # 8 - (5 - 2): what is inactive is reclaimed first
        ),
        (
            "0::/box/job",  # the narrowest of groups in each other
            {"box/job/memory.max": "max", "box/memory.max": 16 * GIB, "box/memory.current": 15 * GIB},
            MainMemory(16 * GIB, GIB),
        ),
        (
            "9:cpu,cpuacct:/box\n4:memory:/box",  # version 1: other names, and no limit is a large number
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/box/memory.limit_in_bytes": 4 * GIB,
                "memory/box/memory.usage_in_bytes": 3 * GIB,
                "memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
            },
            MainMemory(4 * GIB, 2 * GIB),
        ),
        (
            "0::/system.slice/docker-1.scope",  # a path of the machine that the container does not see
            {"memory.max": 2 * GIB, "memory.current": 3 * GIB},
            MainMemory(2 * GIB, 0),
        ),
    ],
)
def test_main_memory_is_that_of_the_control_groups(
    groups: str | None, files: dict[str, object], memory: MainMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = type("Memory", (), {"total": 64 * GIB, "available": 48 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    files = {f"sys/fs/cgroup/{path}": content for path, content in files.items()}
    for path, content in ({"proc/self/cgroup": groups} | files if groups else {}).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{content}\n")
    assert main_memory(tmp_path) == memory
