"""What a run holds in memory, from its options and the model's sizes: one model for doctor, run, dry run and trainer.

`held` says what a trainer holds besides activations; `Setup.plan` lays trainers and servers out on their devices.
No model is loaded, and torch is not imported. Weights, gradients, states and the key-value cache are exact up to
allocators' rounding; activations are estimates of what the backward pass keeps, for layers such as Llama's and Qwen's.
The trainer counts its own parameters by `update_bytes`, `head_bytes` and `gathered_bytes`, and measures activations
(`engine.recompute`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any

from grpo_common.errors import Problem
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import BUCKET_BYTES, SPARE, TrainConfig
from grpo_trainer.machine import Machine
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
HEAD_CHUNK_BYTES = 64 << 20
"""Bytes of the logits that exist at one time; `engine.head.HeadPlan` computes in chunks of this size."""
HEAD_INTERMEDIATE_BYTES = 25
"""Bytes at the peak for each logit of a chunk besides itself: its gradient and intermediate tensors. Measured in
`tests/unit/test_head.py`; compiled functions need less."""
CACHE = "key-value cache"
NEARLY_FULL = 0.93
"""Of a device's memory."""
NF4_BYTES = 0.52
STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 2 * 4 / 256}
"""Bytes of optimizer states for each trained number: two in fp32, or in 8 bits with an fp32 scale for each 256."""
SHARES = tuple(round(0.1 + 0.05 * n, 2) for n in range(17))
"""Of a GPU, what `--server.gpu-memory-utilization` is tried with."""
NOTHING_HELPS = "no option makes it fit: choose a smaller model, or a machine with more memory"


# quantities -------------------------------------------------------------------------------------------------


def trained_parameters(config: TrainConfig, model: ModelShape) -> int:
    """Return the number of elements that the optimizer changes."""
    bridge = config
    layers = None if bridge.layer_indices is None else len([n for n in bridge.layer_indices if n < model.layers])
    if bridge.trains_adapter:
        return model.adapter_parameters(bridge.lora_r, bridge.lora_target_modules, layers)
    return model.parameters if layers is None else layers * model.layer_parameters


def update_bytes(config: TrainConfig, count: float, item: int, states_over: int = 1) -> dict[str, float]:
    """Return what an update of weights needs besides them, from the first step on.

    This process has the gradients of `count` weights of `item` bytes; states and master weights are sharded over
    `states_over` processes.
    """
    gradient = 4 if config.grad_dtype == "float32" or config.dtype == "float16" else item
    return {
        "gradients": gradient * count,
        "optimizer states": STATE_BYTES[config.optimizer] * count / states_over,
        "master weights": 4.0 * count / states_over if config.master_weights and item < 4 else 0.0,
    }


def head_bytes(logits: int, logit_bytes: int, weights: int, *, item: int, weight_item: int, gradient: int) -> float:
    """Return the bytes that the head needs: a chunk of logits, and what is made of its weights.

    A logit has `logit_bytes` at the peak, a number to compute with `item` bytes, one of its weights `weight_item`, and
    that one's gradient as it is summed `gradient`: 0 if it is not trained.
    """
    copied = item if weight_item != item else 0
    return logits * logit_bytes + (copied + gradient) * weights


def gathered_bytes(layer_parameters: int, item: int) -> float:
    """Return the bytes of sharded layers while they are gathered: the weights of two (one computes, the next is on its
    way), and the gradient of one, in the weights' dtype and as a sum in fp32."""
    return layer_parameters * (3.0 * item + 4)


def layer_bytes_per_token(config: TrainConfig, model: ModelShape, item: int) -> float:
    """Return what one decoder layer keeps of a token for the backward pass.

    Two RMS norms (computed in fp32), attention without its scores, a gated MLP, and inputs of linear modules, once
    where several have the same. A process with a shard of each matrix has a part of the widths.
    """
    ranks = config.server.tensor_parallel_size if config.shards_weights else 1
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
    if config.trains_adapter:
        targets = set(config.lora_target_modules)
        kept = sum(width for width, modules in inputs if targets.intersection(modules))
    else:  # norms are trained as well: they keep what they scaled
        kept = sum(width for width, _ in inputs) + 2 * hidden
    return float(norms + attention + mlp + item * kept)


def held(config: TrainConfig, model: ModelShape, trainers: int = 1, *, on_gpu: bool) -> dict[str, float]:
    """Return the bytes that one of several trainers holds besides activations, by what they are."""
    item = trainer_item(config, on_gpu=on_gpu)
    adapter, shared = config.trains_adapter, config.shares_weights
    is_cut = trainers > 1 and config.wants_parts and config.why_whole is None  # each has a part of all weights
    of_shards = trainers > 1 and config.shards_weights  # each has its part of the server's shards
    parts = trainers if is_cut or of_shards else 1
    trained = trained_parameters(config, model)
    layers = model.layers * model.layer_parameters
    weights, cast = 0.0, 0.0
    if adapter and not shared:
        weights = float(item * model.parameters)
        if config.load_in_4bit:
            weights = NF4_BYTES * layers + item * (model.parameters - layers)
    elif not shared:  # fp32, which computes in --dtype from a copy
        weights = 4.0 * model.parameters
        cast = float(item * layers) if item < 4 and not is_cut else 0.0
    own = item if adapter or shared else 4  # of a weight of the model
    wide = own == 4 or config.grad_dtype == "float32" or config.dtype == "float16"
    sums = (4 if wide else item) + (item if is_cut and item < 4 else 0)  # cut: also handed over in 16 bits
    rows = min(config.largest_pass, max(128, HEAD_CHUNK_BYTES // (model.vocab * 4) // 128 * 128))
    head = head_bytes(
        rows * model.vocab,
        4 + HEAD_INTERMEDIATE_BYTES,
        model.vocab * model.hidden,
        item=item,
        weight_item=item if is_cut else own,  # a cut head is gathered in the dtype that it computes with
        gradient=sums if not adapter and config.layer_indices is None else 0,
    )
    copy = not adapter and config.needs_reference and not config.ref_offload
    update = update_bytes(
        config, trained / parts, 4 if adapter else own, trainers if parts == 1 and config.shards_update else 1
    )
    return {
        "weights": weights / parts,
        "weights, cast": cast,
        "adapter": 4.0 * trained if adapter else 0.0,
        **update,
        "reference": float(item * model.parameters) if copy else 0.0,
        "head": head / (trainers if of_shards else 1),
        "process": float(CONTEXT if on_gpu else CPU_PROCESS),
        "gathered weights": (
            gathered_bytes(model.layer_parameters, item) + (model.embedding_parameters + model.hidden) * item
            if is_cut
            else 0.0
        ),
        "gradient bucket": float(BUCKET_BYTES) if trainers > 1 and parts == 1 else 0.0,
    }


def trainer_item(config: TrainConfig, *, on_gpu: bool) -> int:
    """Return the bytes of a number that the trainer computes with."""
    return 4 if config.trainer_dtype(on_gpu=on_gpu) == "float32" else 2


# where it lies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Devices:
    """Where a run is to live: `count` GPUs of `total` bytes each, or main memory."""

    kind: str  # cuda or cpu
    total: int
    count: int = 1
    visible: tuple[str, ...] | None = None
    """Names of the GPUs in CUDA_VISIBLE_DEVICES; None: all are visible."""

    @property
    def _numbers(self) -> tuple[int, ...] | None:
        """The numbers in CUDA_VISIBLE_DEVICES; None: it names a GPU otherwise, such as by a UUID."""
        names = self.visible or ()
        return tuple(map(int, names)) if all(name.isdecimal() for name in names) else None

    def first(self, wanted: int) -> list[int]:
        """Return the numbers of the first GPUs that are visible.

        They are counted from 0 if they are not known. GPUs that are not there have numbers after those that are.
        """
        numbers = self._numbers or ()
        return [*islice(chain(numbers, count(max(numbers, default=-1) + 1)), wanted)]

    @classmethod
    def of(cls, machine: Machine) -> Devices:
        """Return the smallest visible GPU's memory for each of them, or main memory."""
        if machine.on_gpu:
            return cls("cuda", min(gpu.total for gpu in machine.gpus), len(machine.gpus), machine.visible)
        return cls("cpu", machine.memory)

    def of_servers(self, server: Server) -> list[int] | None:
        """Return the numbers of the GPUs of all servers, each once for every server on it.

        None: they are not known. A UUID that this process does not see may be any GPU; so may a number beside UUIDs.
        """
        if server.gpus is None:
            return self.first(server.degree * server.replicas)
        if not server.gpus:
            return []
        named, visible = [name.strip() for name in server.gpus.replace(";", ",").split(",")], self.visible or ()
        if self._numbers is not None and all(name.isdecimal() for name in named):
            return [int(name) for name in named]
        return [visible.index(name) for name in named] if {*named} <= {*visible} else None


@dataclass(frozen=True)
class MemoryRow:
    """One thing that lies in a device's memory."""

    device: int
    owner: str  # trainer or server
    what: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What lies where."""

    rows: tuple[MemoryRow, ...]
    devices: Devices
    kv_tokens: int
    """Of the server's key-value cache, in all replicas."""
    max_model_len: int
    recomputed: tuple[int, int]
    """Layers whose activations are recomputed in the backward pass, of how many."""
    least: int
    """Bytes on the tightest of the trainer's devices if a trainer that may choose recomputes all layers."""
    tightest: int
    """That device."""

    def used(self, device: int) -> int:
        return sum(row.nbytes for row in self.rows if row.device == device)

    @property
    def fullest(self) -> int:
        """The device with the least room left."""
        return max({row.device for row in self.rows}, key=self.used)

    @property
    def is_tight(self) -> bool:
        """Whether a wrong estimate of the activations could be too much, even with all layers recomputed."""
        return self.least > NEARLY_FULL * self.devices.total

    @property
    def fits(self) -> bool:
        """Whether it works, with room for a wrong estimate."""
        return not self.problems and not self.is_tight

    def largest_rows(self, device: int) -> list[MemoryRow]:
        """Return the three largest parts of what lies on a device."""
        return sorted((row for row in self.rows if row.device == device), key=lambda row: -row.nbytes)[:3]

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
    """Return a device's name, as CUDA_VISIBLE_DEVICES has it."""
    if devices.kind != "cuda":
        return "this machine"
    names = devices.visible or ()
    return f"GPU {names[index] if devices._numbers is None and index < len(names) else index}"


@dataclass(frozen=True)
class Setup:
    """What a memory plan is made of."""

    config: TrainConfig
    """Its `--device cuda:N` says which GPU is the trainer's."""
    model: ModelShape
    devices: Devices
    trainers: int = 1
    """Processes, on the first devices."""

    @classmethod
    def of(cls, config: RunConfig, model: ModelShape, machine: Machine) -> Setup:
        return cls(config.trainer, model, Devices.of(machine), config.options.trainer_gpus)

    @property
    def share(self) -> float:
        """Of each GPU's memory, what the server may use."""
        return self.config.server.gpu_memory_utilization

    @property
    def on_gpu(self) -> bool:
        return self.devices.kind == "cuda"

    def plan(self) -> MemoryPlan:
        """Lay out a run's memory."""
        rows, kv_tokens = self._server_rows()
        layers = self.model.layers
        recomputed, saved = 0, dict[int, int]()  # by device: bytes that recomputing all layers would save
        _, _, number = self.config.device.partition(":")
        alone = int(number) if self.on_gpu and number else 0
        several = self.devices.first(self.trainers) if self.on_gpu else [0] * self.trainers  # all in main memory
        for device in several if self.trainers > 1 else self.devices.first(alone + 1)[-1:]:
            taken = sum(row.nbytes for row in rows if row.device == device)
            parts = held(self.config, self.model, self.trainers, on_gpu=self.on_gpu)
            free = (1 - SPARE) * (self.devices.total - taken - sum(parts.values()))
            count = layers if self.config.gradient_checkpointing else 0
            if self.chooses:  # left to itself a GPU's trainer takes the fewest that fit
                count = next((number for number in range(layers) if self._activations(number) <= free), layers)
            recomputed = max(recomputed, count)
            parts["activations"] = self._activations(count)
            spare = parts["activations"] - self._activations(layers) if self.chooses else 0.0
            saved[device] = max(0, int(spare))
            rows += [MemoryRow(device, "trainer", what, int(size)) for what, size in parts.items() if size >= 1]
        least = {device: sum(row.nbytes for row in rows if row.device == device) - saved[device] for device in saved}
        tightest = max(least, key=least.__getitem__)
        longest, recomputation = self.config.served_len, (recomputed, layers)
        return MemoryPlan(tuple(rows), self.devices, kv_tokens, longest, recomputation, least[tightest], tightest)

    def _server_rows(self) -> tuple[list[MemoryRow], int]:
        """The server's rows on each of its devices, and the tokens of its cache."""
        config, model, server = self.config, self.model, self.config.server
        workers, replicas = server.degree * server.replicas, server.data_parallel_size * server.replicas
        item = 2 if config.served_dtype(on_gpu=self.on_gpu) != "float32" else 4
        layers = -(-model.layers // server.pipeline_parallel_size)
        slots = 0  # the adapters that the server holds at one time
        if config.weight_bridge_mode == "lora_only":
            adapter = layers * model.slot_parameters(config.lora_r, server.tensor_parallel_size)
            slots = item * adapter * (config.keep_versions + SPARE_ADAPTERS)
        token = 2 * layers * max(model.kv_heads // server.tensor_parallel_size, 1) * model.head_dim * item
        if not self.on_gpu:  # all workers share its memory
            rows = {
                "weights": model.parameters * item * replicas,
                "adapter slots": slots * workers,
                CACHE: CPU_CACHE_BYTES * workers,
                "process": CPU_PROCESS * workers,
            }
            return [MemoryRow(0, "server", what, size) for what, size in rows.items() if size], CPU_CACHE_BYTES // token
        weights = model.parameters * item * replicas // workers
        cache = int(server.gpu_memory_utilization * self.devices.total) - weights - slots - SERVER_WORKSPACE
        rows = {
            "weights": weights,
            "adapter slots": slots,
            "workspace": SERVER_WORKSPACE,
            "context": SERVER_CONTEXT,
            CACHE: max(cache, 0),
        }
        on_each = [(what, size) for what, size in rows.items() if size]
        devices = self.devices.of_servers(server) or self.devices.first(workers)
        placed = [MemoryRow(device, "server", what, size) for device in devices for what, size in on_each]
        return placed, replicas * (cache // token)

    @property
    def chooses(self) -> bool:
        """Whether it is the trainer that decides how many layers are recomputed."""
        return self.config.gradient_checkpointing is None and self.on_gpu

    def _activations(self, recomputed: int) -> float:
        """Bytes at the peak of the largest pass: what layers keep, all or their inputs, and one layer's gradients.

        Compiled layers can keep something between (`engine.recompute.Kept`), and then less is recomputed than this
        says.
        """
        tokens = self.config.largest_pass
        item = trainer_item(self.config, on_gpu=self.on_gpu)
        layer = tokens * layer_bytes_per_token(self.config, self.model, item)
        inputs = float(tokens * self.model.hidden * item)
        kept = (self.model.layers - recomputed) * layer + recomputed * inputs
        return kept + (1 if recomputed < self.model.layers else 2) * layer


# what would make it fit -------------------------------------------------------------------------------------


def advice(setup: Setup) -> str:
    """Return at most three ways to make a run fit: a hint, or a hint with another share for the server."""
    ways: list[str] = []
    for flags, changed in hints(setup):
        if changed.plan().fits:
            ways.append(flags)
        elif (other := other_share(changed)) is not None:
            ways.append(f"{flags} with --server.gpu-memory-utilization {other.share:g}")
    return "; or ".join(ways[:3]) or NOTHING_HELPS


def hints(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield flags, and the setup with them, that may make a run fit.

    What costs least is first: what is learnt stays the same, then speed is lost, then another kind of training begins.
    """
    config, last, longest = setup.config, setup.devices.count - 1, setup.config.seq_len
    on_servers, alone = config.shares_weights, setup.trainers == 1
    if last and alone and not on_servers and config.device != f"cuda:{last}":
        yield f"--device cuda:{last}", _with(setup, device=f"cuda:{last}")
    if (other := other_share(setup)) is not None:
        yield f"--server.gpu-memory-utilization {other.share:g}", other
    if config.largest_pass > longest:
        smaller = _with(setup, max_tokens_per_microbatch=longest)
        yield f"--max-tokens-per-microbatch {longest}", smaller
    if not config.gradient_checkpointing and not setup.chooses:
        yield "--gradient-checkpointing", _with(setup, gradient_checkpointing=True)
    if config.optimizer != "adamw_8bit":
        yield "--optimizer adamw_8bit", _with(setup, optimizer="adamw_8bit")
    can_share = alone and not config.load_in_4bit  # an adapter on the server's weights, on the server's GPU
    if config.weight_bridge_mode == "lora_only" if on_servers else config.trains_adapter and not can_share:
        return
    flags = "" if config.weight_bridge_mode == "lora_only" else "--weight-bridge-mode lora_only "
    setup = _with(setup, weight_bridge_mode="lora_only", share_base=can_share)
    if can_share and config.device.startswith("cuda:"):
        flags, setup = f"{flags}--device auto ", _with(setup, device="auto")
    yield flags + ("--share-base" if can_share else ""), setup


def other_share(now: Setup, *, smaller: bool = False) -> Setup | None:
    """Return the setup with the share of a GPU for the server that fits and is nearest to the present one; None: there
    is none, as on a CPU. With `smaller` no larger share is tried."""
    present = now.share
    shares = [share for share in SHARES if now.on_gpu and (share < present or not smaller)]
    tried = (
        _with(now, server=now.config.server.model_copy(update={"gpu_memory_utilization": share}))
        for share in sorted(shares, key=lambda share: abs(share - present))
    )
    return next((setup for setup in tried if setup.plan().fits), None)


def _with(setup: Setup, **values: Any) -> Setup:
    return replace(setup, config=setup.config.model_copy(update=values))
