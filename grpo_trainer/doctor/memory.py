"""Would it fit? What trainer and server hold on each device, from configuration and sizes alone. Pure.

Weights, gradients, states and the key-value cache are exact up to allocators' rounding; activations are estimates of
what the backward pass keeps, for layers as Llama's and Qwen's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_common.errors import Problem
from grpo_trainer.config.bridge import LoraOnly, LoraOptions, RestartOptions
from grpo_trainer.config.compute import SPARE
from grpo_trainer.config.distributed import wants_parts, why_whole
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.model_shape import ModelShape

GB = 1e9
CONTEXT = int(0.6 * GB)
"""Of a GPU's memory, what each process takes before it allocates anything: context, kernels, libraries' workspaces."""
SERVER_WORKSPACE = int(2.5 * GB)
"""Of its share, what vLLM needs besides weights and cache: activations of the largest batch, CUDA graphs."""
CPU_CACHE, CPU_PROCESS = 512 << 20, int(1.2 * GB)
CPU_STANDBY = int(0.9 * GB)
"""Of a server that has made its imports and waits to be told what to serve: measured, with its forkserver."""
SPARE_ADAPTERS = 4
"""Slots of the server besides the versions that it keeps."""
HEAD_CHUNK = 64 << 20
"""Bytes of the logits that exist at one time (`model.head.HeadPlan`); their fp32 copies are a few times that."""
BUCKET = 256 << 20
"""Bytes of the buffer in which several trainers add up gradients (`distributed.BUCKET_BYTES`)."""
CACHE = "key-value cache"
NEARLY_FULL = 0.93
"""Of a device's memory."""
NF4_BYTES = 0.52
STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256, "adafactor": 0.01}


@dataclass(frozen=True)
class Devices:
    """Where a run is to live: `count` GPUs of `total` bytes each, or main memory."""

    kind: str  # cuda or cpu
    total: int
    count: int = 1


@dataclass(frozen=True)
class Server:
    """How the inference server is spread.

    Attributes:
        replicas: of the model, in one server or in several.
        placed: the devices that are its own; None: the first `workers`.
    """

    gpu_share: float
    max_model_len: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    placed: tuple[int, ...] | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        return self.placed or tuple(range(self.workers))

    @property
    def parts(self) -> int:
        """GPUs of one replica, each with such a part of the weights and of the cache."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def workers(self) -> int:
        return self.parts * self.replicas

    @property
    def wanted_by(self) -> str:
        """The options that ask for more than one GPU."""
        names = {
            "--server.tensor-parallel-size": self.tensor_parallel,
            "--server.pipeline-parallel-size": self.pipeline_parallel,
            "--server.data-parallel-size or --server.replicas": self.replicas,
        }
        return " and ".join(name for name, degree in names.items() if degree > 1)


@dataclass(frozen=True)
class MemoryRow:
    """One thing that lies in a device's memory."""

    device: int
    owner: str  # trainer or server
    what: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What lies where.

    Attributes:
        kv_tokens: tokens of the server's key-value cache, in all replicas.
        recomputed: layers whose activations are recomputed in the backward pass, of how many.
        adapts: the trainer chooses how many, and so leaves little room whatever there is.
    """

    rows: tuple[MemoryRow, ...]
    devices: Devices
    kv_tokens: int
    max_model_len: int
    recomputed: tuple[int, int]
    adapts: bool

    def used(self, device: int) -> int:
        return sum(row.nbytes for row in self.rows if row.device == device)

    @property
    def fullest(self) -> int:
        """The device with the least room left."""
        return max({row.device for row in self.rows}, key=self.used)

    @property
    def is_tight(self) -> bool:
        """Whether a wrong estimate of the activations could be too much."""
        count, layers = self.recomputed
        return self.used(self.fullest) > NEARLY_FULL * self.devices.total and not (self.adapts and count < layers)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why it would not work; empty where it would."""
        found = []
        if self.used(self.fullest) > self.devices.total:
            got, wanted = (f"{size / GB:.1f} GB" for size in (self.used(self.fullest), self.devices.total))
            found.append(Problem(device_name(self.devices, self.fullest), got, f"at most {wanted}"))
        if self.kv_tokens < self.max_model_len:
            got, wanted = (f"{tokens:,} tokens" for tokens in (max(self.kv_tokens, 0), self.max_model_len))
            found.append(Problem(CACHE, got, f"at least one sequence of {wanted}"))
        return tuple(found)


def device_name(devices: Devices, index: int) -> str:
    return f"GPU {index}" if devices.kind == "cuda" else "this machine"


def plan_memory(
    config: TrainConfig, model: ModelShape, server: Server, devices: Devices, trainers: int = 1
) -> MemoryPlan:
    """Lay out a run's memory.

    Args:
        config: the trainer's options; its `--device cuda:N` says which GPU is the trainer's.
        server: the inference server, which `--weight-bridge-mode` may make share its weights.
        trainers: processes, on the first devices; each with all weights, or a part where they are cut.
    """
    rows, kv_tokens = _server_rows(config, model, server, devices)
    recomputed = 0
    for device in range(trainers) if trainers > 1 else [_own_device(config, devices)]:
        taken = sum(row.nbytes for row in rows if row.device == device)
        count, parts = _trainer_parts(config, model, devices, devices.total - taken, trainers)
        recomputed = max(recomputed, count)
        rows = [*rows, *(MemoryRow(device, "trainer", what, int(size)) for what, size in parts.items() if size >= 1)]
    return MemoryPlan(
        rows=tuple(rows),
        devices=devices,
        kv_tokens=kv_tokens,
        max_model_len=server.max_model_len,
        recomputed=(recomputed, model.layers),
        adapts=_chooses(config, on_gpu=devices.kind == "cuda"),
    )


def _own_device(config: TrainConfig, devices: Devices) -> int:
    """The one of a trainer that is alone."""
    _, _, number = config.model.device.partition(":")
    return int(number) if devices.kind == "cuda" and number else 0


# the server ------------------------------------------------------------------------------------------------


def _server_rows(
    config: TrainConfig, model: ModelShape, server: Server, devices: Devices
) -> tuple[Sequence[MemoryRow], int]:
    """The server's rows on each of its devices, and the tokens of its cache."""
    item = 2 if config.served_dtype(on_gpu=devices.kind == "cuda") != "float32" else 4
    weights = model.parameters * item // server.parts
    slots = _adapter_slots(config, model) * item
    layers = -(-model.layers // server.pipeline_parallel)
    token = 2 * layers * max(model.kv_heads // server.tensor_parallel, 1) * model.head_dim * item
    if devices.kind == "cpu":  # all workers share its memory
        rows = [
            ("weights", model.parameters * item * server.replicas),
            ("adapter slots", slots * server.workers),
            (CACHE, CPU_CACHE * server.workers),
            ("process", CPU_PROCESS * server.workers),
            ("standby process", CPU_STANDBY * server.replicas if _has_standby(config) else 0),
        ]
        return [MemoryRow(0, "server", what, size) for what, size in rows if size], CPU_CACHE // token
    share = int(server.gpu_share * devices.total)
    cache = share - weights - slots - SERVER_WORKSPACE
    parts = [("weights", weights), ("adapter slots", slots), ("workspace", SERVER_WORKSPACE), ("context", CONTEXT)]
    parts.append((CACHE, max(cache, 0)))
    rows = [MemoryRow(device, "server", what, size) for device in server.devices for what, size in parts if size]
    return rows, server.replicas * (cache // token)


def _has_standby(config: TrainConfig) -> bool:
    return isinstance(config.bridge, RestartOptions) and config.bridge.vllm_standby


def _adapter_slots(config: TrainConfig, model: ModelShape) -> int:
    """Elements of the adapters that the server holds at one time."""
    bridge = config.bridge
    if not isinstance(bridge, LoraOnly):
        return 0
    return model.adapter_parameters(bridge.r, bridge.target_modules) * (config.keep_versions + SPARE_ADAPTERS)


# the trainer -----------------------------------------------------------------------------------------------


def _trainer_parts(
    config: TrainConfig, model: ModelShape, devices: Devices, free: int, trainers: int
) -> tuple[int, dict[str, float]]:
    """The layers that one trainer recomputes, and what it holds, in bytes.

    Args:
        free: of its device's memory.
    """
    on_gpu = devices.kind == "cuda"
    parts = dict(_held(config, model, on_gpu=on_gpu))
    if trainers > 1 and wants_parts(config) and why_whole(config) is None:
        parts = _cut(parts, model, item_bytes(config, on_gpu=on_gpu), trainers)
    elif trainers > 1:  # who add up their gradients in a buffer
        parts["gradient bucket"] = float(BUCKET)
    activations = Activations.of(config, model, on_gpu=on_gpu)
    count = activations.recomputed(config, (1 - SPARE) * (free - sum(parts.values())), on_gpu=on_gpu)
    return count, {**parts, "activations": activations.needed(count)}


def _held(config: TrainConfig, model: ModelShape, *, on_gpu: bool) -> list[tuple[str, float]]:
    """What the trainer's process holds besides activations, in bytes."""
    item = item_bytes(config, on_gpu=on_gpu)
    trained = trained_parameters(config, model)
    shared, adapter = config.shares_weights, isinstance(config.bridge, LoraOptions)
    if adapter:
        weights, cast, grad = 0.0 if shared else _frozen_bytes(config, model, item), 0.0, 4
    else:  # `none` holds fp32 and computes in --dtype from a cast copy; `shared_vllm` holds nothing of its own
        weights = 0.0 if shared else 4.0 * model.parameters
        cast = 0.0 if shared or item == 4 else float(item * model.parameters)
        grad = item if shared and config.compute.grad_dtype == "weights" else 4
    copy = not adapter and config.loss.needs_reference and not config.loss.ref_offload
    return [
        ("weights", weights),
        ("weights, cast", cast),
        ("adapter", 4.0 * trained if adapter else 0.0),
        ("gradients", float(grad * trained)),
        ("optimizer states", STATE_BYTES[config.optimizer.optimizer] * trained),
        ("master weights", 4.0 * trained if config.master_weights and item == 2 else 0.0),
        ("reference", float(item * model.parameters) if copy else 0.0),
        ("head", head_bytes(model, config.largest_pass, item)),
        ("process", float(CONTEXT if on_gpu else CPU_PROCESS)),
    ]


def _cut(held: dict[str, float], model: ModelShape, item: int, trainers: int) -> dict[str, float]:
    """What each of several trainers holds of weights that are cut, as `model.memory.gathered_bytes` counts it: parts,
    and whole what is in no layer, two layers, and one's gradient in fp32."""
    whole = {"weights", "gradients", "optimizer states"}
    parts = {what: size / trainers if what in whole else size for what, size in held.items() if what != "weights, cast"}
    together = model.layer_parameters * (3 * item + 4) + (model.embedding_parameters + model.hidden) * item
    return {**parts, "gathered weights": float(together)}


def item_bytes(config: TrainConfig, *, on_gpu: bool) -> int:
    """Of a number that the trainer computes with."""
    return 4 if config.trainer_dtype(on_gpu=on_gpu) == "float32" else 2


def trained_parameters(config: TrainConfig, model: ModelShape) -> int:
    """Elements that the optimizer moves."""
    bridge = config.bridge
    layers = None if bridge.layer_indices is None else len([n for n in bridge.layer_indices if n < model.layers])
    if isinstance(bridge, LoraOptions):
        return model.adapter_parameters(bridge.r, bridge.target_modules, layers)
    return model.parameters if layers is None else layers * model.layer_parameters


def _frozen_bytes(config: TrainConfig, model: ModelShape, item: int) -> float:
    """A frozen base model: whole, or its layers in 4 bits."""
    if not config.model.load_in_4bit:
        return float(item * model.parameters)
    layers = model.layers * model.layer_parameters
    return NF4_BYTES * layers + item * (model.parameters - layers)


@dataclass(frozen=True)
class Activations:
    """What a pass keeps for its backward pass, estimated: a layer keeps all, or its input.

    Compiled layers can keep something between (`model.activations.Kept`), and then less is recomputed than this says.

    Attributes:
        layer: bytes of one layer.
        input: bytes of a layer's input alone.
    """

    layers: int
    layer: float
    input: float

    @classmethod
    def of(cls, config: TrainConfig, model: ModelShape, *, on_gpu: bool) -> Activations:
        """Of the largest pass; inputs that are moved to main memory count nothing."""
        item, tokens = item_bytes(config, on_gpu=on_gpu), config.largest_pass
        kept = 0.0 if config.compute.activation_offload and on_gpu else float(tokens * model.hidden * item)
        return cls(model.layers, tokens * layer_bytes_per_token(config, model, item), kept)

    def needed(self, recomputed: int) -> float:
        """Bytes at the peak: what layers keep, and the gradients of one layer's."""
        kept = (self.layers - recomputed) * self.layer + recomputed * self.input
        return kept + (1 if recomputed < self.layers else 2) * self.layer

    def recomputed(self, config: TrainConfig, free: float, *, on_gpu: bool) -> int:
        """As many layers as are asked for; left to itself a GPU's trainer takes the fewest that fit."""
        if _chooses(config, on_gpu=on_gpu):
            return next((count for count in range(self.layers) if self.needed(count) <= free), self.layers)
        return self.layers if config.model.gradient_checkpointing or config.compute.activation_offload else 0


def _chooses(config: TrainConfig, *, on_gpu: bool) -> bool:
    """Whether it is the trainer that decides how many layers are recomputed."""
    return config.model.gradient_checkpointing is None and on_gpu and not config.compute.activation_offload


def layer_bytes_per_token(config: TrainConfig, model: ModelShape, item: int) -> float:
    """Of one decoder layer: two RMS norms (computed in fp32), attention without its scores, a gated MLP, and inputs of
    linear modules, once where several have the same."""
    hidden, q, kv, inner = model.hidden, model.q_width, model.kv_width, model.active_intermediate
    norms = 2 * 4 * hidden
    attention = item * (2 * q + 2 * kv)  # queries, keys, values, output
    mlp = item * 3 * inner  # gate, its silu, up
    inputs = [
        (hidden, ("q_proj", "k_proj", "v_proj")),
        (q, ("o_proj",)),
        (hidden, ("gate_proj", "up_proj")),
        (inner, ("down_proj",)),
    ]
    if isinstance(config.bridge, LoraOptions):
        targets = set(config.bridge.target_modules)
        kept = sum(width for width, modules in inputs if targets.intersection(modules))
    else:  # norms are trained as well: they keep what they scaled
        kept = sum(width for width, _ in inputs) + 2 * hidden
    return float(norms + attention + mlp + item * kept)


def head_bytes(model: ModelShape, tokens: int, item: int) -> float:
    """A chunk of logits, and three fp32 copies of it."""
    chunk = min(HEAD_CHUNK, tokens * model.vocab * item)
    return chunk * (1.0 + 3 * 4 / item)
