"""Would it fit? What trainer and server hold on each device, from configuration and sizes alone. Pure.

Weights, gradients, states and the key-value cache are exact up to allocators' rounding; activations are estimates of
what the backward pass keeps, for layers as Llama's and Qwen's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_common.errors import Problem
from grpo_trainer.config.bridge import LoraOnly, LoraOptions
from grpo_trainer.config.compute import SPARE
from grpo_trainer.config.distributed import BUCKET_BYTES, shards_update, shards_weights, wants_parts, why_whole
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.shape import ModelShape
from vllm_server.protocol import CPU_CACHE_BYTES, SPARE_ADAPTERS

GB = 1e9
CONTEXT = int(0.6 * GB)
"""Of a GPU's memory, what a trainer takes before it allocates anything: context, kernels, libraries' workspaces."""
SERVER_CONTEXT = int(1.4 * GB)
"""What CUDA takes for a server beyond its share: 1.4 to 2.1 GB on an H200, less on smaller GPUs. `NEARLY_FULL` leaves
room for the difference."""
SERVER_WORKSPACE = int(2.5 * GB)
"""Of its share, what vLLM needs besides weights and cache: activations of the largest batch, CUDA graphs."""
CPU_PROCESS = int(1.2 * GB)
HEAD_CHUNK = 64 << 20
"""Bytes of the logits that exist at one time (`engine.head.HeadPlan`); their fp32 copies are a few times that."""
CACHE = "key-value cache"
NEARLY_FULL = 0.93
"""Of a device's memory."""
NF4_BYTES = 0.52
STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256}


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
        saved: by device, the bytes that a trainer which chooses this number would save by recomputing all layers.
    """

    rows: tuple[MemoryRow, ...]
    devices: Devices
    kv_tokens: int
    max_model_len: int
    recomputed: tuple[int, int]
    saved: Mapping[int, int]

    def used(self, device: int) -> int:
        return sum(row.nbytes for row in self.rows if row.device == device)

    @property
    def fullest(self) -> int:
        """The device with the least room left."""
        return max({row.device for row in self.rows}, key=self.used)

    @property
    def is_tight(self) -> bool:
        """Whether a wrong estimate of the activations could be too much, even with all layers recomputed."""
        return self._least(self.tightest) > NEARLY_FULL * self.devices.total

    @property
    def tightest(self) -> int:
        """The trainer's device with the least room left if all layers are recomputed."""
        return max(self.saved, key=self._least)

    def _least(self, device: int) -> int:
        return self.used(device) - self.saved[device]

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


@dataclass(frozen=True)
class Setup:
    """What a memory plan is made of.

    Attributes:
        config: the trainer's options; its `--device cuda:N` says which GPU is the trainer's.
        server: the inference server, which `--weight-bridge-mode` may make share its weights.
        trainers: processes, on the first devices; each with all weights, or a part where they are sharded, or in a
            server's memory.
    """

    config: TrainConfig
    model: ModelShape
    server: Server
    devices: Devices
    trainers: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.devices.kind == "cuda"

    @property
    def item(self) -> int:
        """Bytes of a number that the trainer computes with."""
        return 4 if self.config.trainer_dtype(on_gpu=self.on_gpu) == "float32" else 2

    def plan(self) -> MemoryPlan:
        """Lay out a run's memory."""
        rows, kv_tokens = self._server_rows()
        recomputed, saved = 0, {}
        _, _, number = self.config.model.device.partition(":")
        alone = int(number) if self.on_gpu and number else 0
        several = range(self.trainers) if self.on_gpu else [0] * self.trainers  # on a CPU all are in main memory
        for device in several if self.trainers > 1 else [alone]:
            taken = sum(row.nbytes for row in rows if row.device == device)
            parts = self._trainer_parts()
            count = self._recomputed((1 - SPARE) * (self.devices.total - taken - sum(parts.values())))
            recomputed = max(recomputed, count)
            parts["activations"] = self._activations(count)
            spare = parts["activations"] - self._activations(self.model.layers) if self.chooses else 0.0
            saved[device] = max(0, int(spare))
            rows += [MemoryRow(device, "trainer", what, int(size)) for what, size in parts.items() if size >= 1]
        return MemoryPlan(
            rows=tuple(rows),
            devices=self.devices,
            kv_tokens=kv_tokens,
            max_model_len=self.server.max_model_len,
            recomputed=(recomputed, self.model.layers),
            saved=saved,
        )

    def _server_rows(self) -> tuple[list[MemoryRow], int]:
        """The server's rows on each of its devices, and the tokens of its cache."""
        config, model, server = self.config, self.model, self.server
        item = 2 if config.served_dtype(on_gpu=self.on_gpu) != "float32" else 4
        slots = 0  # the adapters that the server holds at one time
        if isinstance(config.bridge, LoraOnly):
            adapter = model.adapter_parameters(config.bridge.r, config.bridge.target_modules)
            slots = item * adapter * (config.keep_versions + SPARE_ADAPTERS)
        layers = -(-model.layers // server.pipeline_parallel)
        token = 2 * layers * max(model.kv_heads // server.tensor_parallel, 1) * model.head_dim * item
        if not self.on_gpu:  # all workers share its memory
            rows = {
                "weights": model.parameters * item * server.replicas,
                "adapter slots": slots * server.workers,
                CACHE: CPU_CACHE_BYTES * server.workers,
                "process": CPU_PROCESS * server.workers,
            }
            return [MemoryRow(0, "server", what, size) for what, size in rows.items() if size], CPU_CACHE_BYTES // token
        weights = model.parameters * item // server.parts
        cache = int(server.gpu_share * self.devices.total) - weights - slots - SERVER_WORKSPACE
        rows = {
            "weights": weights,
            "adapter slots": slots,
            "workspace": SERVER_WORKSPACE,
            "context": SERVER_CONTEXT,
            CACHE: max(cache, 0),
        }
        on_each = [(what, size) for what, size in rows.items() if size]
        placed = [MemoryRow(device, "server", what, size) for device in server.devices for what, size in on_each]
        return placed, server.replicas * (cache // token)

    def _trainer_parts(self) -> dict[str, float]:
        """What one trainer holds besides activations, in bytes."""
        config, model, item = self.config, self.model, self.item
        trained = trained_parameters(config, model)
        shared, adapter = config.shares_weights, isinstance(config.bridge, LoraOptions)
        if adapter:
            weights, cast, grad = 0.0 if shared else self._frozen_bytes(), 0.0, 4
        else:  # `none` holds fp32 and computes in --dtype from a cast copy; `shared_vllm` holds no weights
            weights = 0.0 if shared else 4.0 * model.parameters
            cast = 0.0 if shared or item == 4 else float(item * model.parameters)
            grad = item if shared and config.compute.grad_dtype == "weights" else 4
        copy = not adapter and config.loss.needs_reference and not config.loss.ref_offload
        held = {
            "weights": weights,
            "weights, cast": cast,
            "adapter": 4.0 * trained if adapter else 0.0,
            "gradients": float(grad * trained),
            "optimizer states": STATE_BYTES[config.optimizer.optimizer] * trained,
            "master weights": 4.0 * trained if config.master_weights and item == 2 else 0.0,
            "reference": float(item * model.parameters) if copy else 0.0,
            "head": head_bytes(model, config.largest_pass, item),
            "process": float(CONTEXT if self.on_gpu else CPU_PROCESS),
        }
        if self.trainers > 1 and wants_parts(config) and why_whole(config) is None:
            return self._sharded(held)
        if self.trainers > 1 and shards_weights(config):
            for what in ("gradients", "optimizer states", "master weights", "head"):
                held[what] /= self.trainers
            return held
        if shards_update(config):
            for what in ("optimizer states", "master weights"):
                held[what] /= self.trainers
        return {**held, "gradient bucket": float(BUCKET_BYTES)} if self.trainers > 1 else held

    def _sharded(self, held: dict[str, float]) -> dict[str, float]:
        """What each of several trainers holds of sharded weights, as `engine.fitting.gathered_bytes` counts it: parts,
        and whole what is in no layer, two layers, and one's gradient in fp32."""
        model, item = self.model, self.item
        for what in ("weights", "gradients", "optimizer states"):
            held[what] /= self.trainers
        del held["weights, cast"]
        together = model.layer_parameters * (3 * item + 4) + (model.embedding_parameters + model.hidden) * item
        return {**held, "gathered weights": float(together)}

    def _frozen_bytes(self) -> float:
        """A frozen base model: whole, or its layers in 4 bits."""
        if not self.config.model.load_in_4bit:
            return float(self.item * self.model.parameters)
        layers = self.model.layers * self.model.layer_parameters
        return NF4_BYTES * layers + self.item * (self.model.parameters - layers)

    @property
    def chooses(self) -> bool:
        """Whether it is the trainer that decides how many layers are recomputed."""
        return self.config.model.gradient_checkpointing is None and self.on_gpu

    def _recomputed(self, free: float) -> int:
        """As many layers as are asked for; left to itself a GPU's trainer takes the fewest that fit."""
        layers = self.model.layers
        if self.chooses:
            return next((count for count in range(layers) if self._activations(count) <= free), layers)
        return layers if self.config.model.gradient_checkpointing else 0

    def _activations(self, recomputed: int) -> float:
        """Bytes at the peak of the largest pass: what layers keep, all or their inputs, and one layer's gradients.

        Compiled layers can keep something between (`engine.recompute.Kept`), and then less is recomputed than this
        says.
        """
        tokens = self.config.largest_pass
        layer = tokens * layer_bytes_per_token(self.config, self.model, self.item)
        inputs = float(tokens * self.model.hidden * self.item)
        kept = (self.model.layers - recomputed) * layer + recomputed * inputs
        return kept + (1 if recomputed < self.model.layers else 2) * layer


def trained_parameters(config: TrainConfig, model: ModelShape) -> int:
    """Elements that the optimizer moves."""
    bridge = config.bridge
    layers = None if bridge.layer_indices is None else len([n for n in bridge.layer_indices if n < model.layers])
    if isinstance(bridge, LoraOptions):
        return model.adapter_parameters(bridge.r, bridge.target_modules, layers)
    return model.parameters if layers is None else layers * model.layer_parameters


def layer_bytes_per_token(config: TrainConfig, model: ModelShape, item: int) -> float:
    """Of one decoder layer: two RMS norms (computed in fp32), attention without its scores, a gated MLP, and inputs of
    linear modules, once where several have the same. A process with a shard of each matrix has a part of the widths."""
    ranks = config.vllm.tensor_parallel_size if shards_weights(config) else 1
    hidden = model.hidden
    q, kv, inner = (width // ranks for width in (model.q_width, model.kv_width, model.active_intermediate))
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
