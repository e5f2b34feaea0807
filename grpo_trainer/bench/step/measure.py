"""The measurement: a model with random weights on the device, the trainer's own steps, a clock."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from grpo_trainer.bench.step.flops import step_flops
from grpo_trainer.bench.step.options import StepOptions
from grpo_trainer.bench.step.rollouts import GROUP, synthetic_batch
from grpo_trainer.bench.sync.random_model import model_config
from grpo_trainer.bench.sync.shapes import SHAPES, Shape
from grpo_trainer.config.bridge import LoraOnly
from grpo_trainer.config.distributed import DistributedConfig
from grpo_trainer.config.options import build
from grpo_trainer.config.rules import checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.allocator import grow_segments
from grpo_trainer.follower import run_worker
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import freeze
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.parallel.shards import draw_weights, give_memory, is_sharded, shard_model
from grpo_trainer.parallel.world import World, join
from grpo_trainer.rollouts.types import RolloutBatch
from grpo_trainer.shared.attach import build_without_weights
from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phases:
    """Seconds of one step whose phases wait for each other: it takes a little longer than those that are measured."""

    prepare: float
    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True)
class StepFigures:
    """The measurements.

    Attributes:
        losses, norms: losses and gradient norms of the measured steps, which the number of processes changes only by
            rounding.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    phases: Phases
    tokens: float
    completion_tokens: float
    flops: float
    peak_allocated: int | None
    peak_reserved: int | None
    facts: dict[str, Any]


def train_config(options: StepOptions, processes: int = 1) -> TrainConfig:
    """The trainer's, for all weights in the dtype that a server has them in, or for an adapter."""
    all_weights = "shared_vllm" if processes == 1 else "none"  # shared memory is one process's
    batch = options.batch
    bridge = (
        {"weight_bridge_mode": "lora_only", "lora_r": options.model.lora_r}
        if options.model.lora_r
        else {"weight_bridge_mode": all_weights, "sharding": options.sharding}
    )
    values = {
        "model": "random",
        "seq_len": batch.prompt_len + batch.completion_len,
        "training_steps": 1000,
        "batch_size": batch.batch_size,
        "gradient_accumulation_steps": -(-batch.seqs // batch.batch_size),
        "gradient_checkpointing": options.model.gradient_checkpointing,
        "logits_dtype": options.model.logits_dtype,
        "optimizer": options.optimizer_name,
        "drift_limit": 0,
        "world_size": processes,
        "init_method": "env://",
        **bridge,
        **options.compute.model_dump(),
    }
    return checked(build(TrainConfig, {key: value for key, value in values.items() if value is not None}))


def build_model(
    shape: Shape, options: StepOptions, device: torch.device, cut_over: World | None = None
) -> PreTrainedModel:
    """Return a model with random weights created on their device, in bfloat16 on a GPU, independent of sharding."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    model = build_without_weights(model_config(shape, dtype), dtype, options.model.attention, device)
    if cut_over is not None:
        shard_model(model, cut_over, device, dtype)
    give_memory(model, device)
    draw_weights(model, options.seed)
    return model


def build_trainer(options: StepOptions, device: torch.device, world: World | None = None) -> Trainer:
    """As a run has it, but for the weights."""
    world = world or World()
    config = train_config(options, world.size)
    model = build_model(SHAPES[options.model.shape], options, device, world if is_sharded(world, config) else None)
    freeze(model, config.model)
    if isinstance(config.bridge, LoraOnly):
        return Trainer(add_adapter(model, config.bridge, options.seed), config, world=world)
    return Trainer(model.requires_grad_(True), config, world=world)


def measure(options: StepOptions) -> StepFigures | None:
    """Warm up, then measure; memory counts from the first step on.

    Under torchrun all processes take their shares of each batch; rank 0 measures, for the others this is None.
    """
    world = join(DistributedConfig(), on_gpu=torch.cuda.is_available())
    grow_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if world.leads:
        with world:
            return _measure(options, device, world)
    run_worker(world, build_trainer(options, device, world))
    return None


def _measure(options: StepOptions, device: torch.device, world: World) -> StepFigures:
    shape = SHAPES[options.model.shape]
    started = time.perf_counter()
    with world.working():
        trainer = build_trainer(options, device, world)
    log.info("model and trainer are there after %.1f s", time.perf_counter() - started)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    numbers = range(options.warmup + options.steps)
    batches = [synthetic_batch(options.batch, shape.vocab, options.seed + number) for number in numbers]
    done = [_one_step(trainer, batch, number, device) for number, batch in enumerate(batches)][options.warmup :]
    measured = [lengths_of(batch) for batch in batches[options.warmup :]]
    on_gpu = device.type == "cuda"
    readers = GROUP if trainer.forward.shared else 1
    flops = [step_flops(shape, lengths, options.model.lora_r, readers=readers) for lengths in measured]
    return StepFigures(
        seconds=tuple(seconds for seconds, _ in done),
        losses=tuple(row["train/loss"] for _, row in done),
        norms=tuple(row["train/grad_norm"] for _, row in done),
        peak_allocated=torch.cuda.max_memory_allocated() if on_gpu else None,
        peak_reserved=torch.cuda.max_memory_reserved() if on_gpu else None,
        tokens=statistics.mean(sum(map(sum, lengths)) for lengths in measured),
        completion_tokens=statistics.mean(sum(last for _, last in lengths) for lengths in measured),
        flops=statistics.mean(flops),
        phases=_phases(trainer, batches[-1], len(batches), device),
        facts={
            "processes": world.size,
            "cut": not trainer.holding.whole,
            **trainer.forward.facts(),
            "microbatches": len(trainer.ready(batches[-1]).microbatches),
            "dtype": str(trainer.parameters[0].dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
        },
    )


def _one_step(
    trainer: Trainer, batch: RolloutBatch, number: int, device: torch.device
) -> tuple[float, dict[str, float]]:
    """Run a step; return its seconds, from scored groups to finished weights, and its metrics."""
    started = _now(device)
    result = trainer.step(trainer.ready(batch), number)
    seconds = _now(device) - started
    row = reduce(result.metrics)
    log.info("step %d: %.3f s, loss %.3g", number, seconds, row["train/loss"])
    return seconds, row


def _phases(trainer: Trainer, batch: RolloutBatch, number: int, device: torch.device) -> Phases:
    """Run one more step that waits for the device at the end of each phase."""
    forward: list[float] = []
    scores = trainer.forward.scores

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = _now(device)
        found = scores(*args, **kwargs)
        forward.append(_now(device) - started)
        return found

    update = trainer.optimizer_step
    optimizer: list[float] = []

    def timed_update(*args: Any) -> bool:
        started = _now(device)
        landed = update(*args)
        optimizer.append(_now(device) - started)
        return landed

    started = _now(device)
    ready = trainer.ready(batch)
    prepare = _now(device) - started
    with (
        mock.patch.object(trainer.forward, "scores", timed),
        mock.patch.object(trainer, "optimizer_step", timed_update),
    ):
        started = _now(device)
        trainer.step(ready, number)
        whole = _now(device) - started
    return Phases(prepare, sum(forward), whole - sum(forward) - sum(optimizer), sum(optimizer))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def lengths_of(batch: RolloutBatch) -> list[tuple[int, int]]:
    """Return the tokens of prompt and completion."""
    samples = [sample for group in batch.groups for sample in group.samples]
    return [(int((~sample.trained_T).sum()), int(sample.trained_T.sum())) for sample in samples]


def as_dict(options: StepOptions, found: StepFigures) -> dict[str, Any]:
    """Return one line of JSON."""
    median = statistics.median(found.seconds)

    def in_gb(nbytes: int | None) -> float | None:
        return None if nbytes is None else round(nbytes / 1e9, 2)

    return {
        "shape": options.model.shape,
        "lora_r": options.model.lora_r,
        "seqs": options.batch.seqs,
        "prompt_len": options.batch.prompt_len,
        "completion_len": options.batch.completion_len,
        "lognormal": options.batch.lognormal,
        "optimizer": options.optimizer_name,
        "max_tokens_per_microbatch": options.compute.max_tokens_per_microbatch,
        "step_s_median": round(median, 4),
        "step_s": [round(one, 4) for one in found.seconds],
        "loss": list(found.losses),
        "grad_norm": list(found.norms),
        "tokens_per_s": round(found.tokens / median),
        "completion_tokens_per_s": round(found.completion_tokens / median),
        "peak_allocated_gb": in_gb(found.peak_allocated),
        "peak_reserved_gb": in_gb(found.peak_reserved),
        "mfu": round(found.flops / median / options.peak_tflops / 1e12 / found.facts["processes"], 4),
        "tflops": round(found.flops / median / 1e12, 1),
        "peak_tflops": options.peak_tflops,
        "phases": {name: round(value, 4) for name, value in asdict(found.phases).items()},
        **found.facts,
    }
