"""The measurement: a model with random weights on the device, the trainer's own steps, a clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from grpo_trainer.bench.random_model import random_model
from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.bench.step.options import StepOptions
from grpo_trainer.bench.step.work import GROUP, lengths_of, step_flops, synthetic_batch
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
from grpo_trainer.parallel.shards import is_sharded
from grpo_trainer.parallel.world import World, join
from grpo_trainer.rollouts.types import RolloutBatch
from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)


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


def build_model(options: StepOptions, device: torch.device, world: World | None = None) -> PreTrainedModel:
    """Return a model with random weights, in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    model = options.model
    return random_model(SHAPES[model.shape], dtype, device, attention=model.attention, seed=options.seed, world=world)


def build_trainer(options: StepOptions, device: torch.device, world: World | None = None) -> Trainer:
    """As a run has it, but for the weights."""
    world = world or World()
    config = train_config(options, world.size)
    model = build_model(options, device, world if is_sharded(world, config) else None)
    freeze(model, config.model)
    if isinstance(config.bridge, LoraOnly):
        return Trainer(add_adapter(model, config.bridge, options.seed), config, world=world)
    return Trainer(model.requires_grad_(True), config, world=world)


def measure(options: StepOptions) -> dict[str, Any] | None:
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


def _measure(options: StepOptions, device: torch.device, world: World) -> dict[str, Any]:
    shape, asked, on_gpu = SHAPES[options.model.shape], options.batch, device.type == "cuda"
    started = time.perf_counter()
    with world.working():
        trainer = build_trainer(options, device, world)
    log.info("model and trainer are there after %.1f s", time.perf_counter() - started)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    numbers = range(options.warmup + options.steps)
    batches = [synthetic_batch(asked, shape.vocab, options.seed + number) for number in numbers]
    done = [_one_step(trainer, batch, number, device) for number, batch in enumerate(batches)][options.warmup :]
    lengths = [lengths_of(batch) for batch in batches[options.warmup :]]
    readers = GROUP if trainer.forward.shared else 1
    flops = fmean(step_flops(shape, each, options.model.lora_r, readers=readers) for each in lengths)
    seconds = [one for one, _ in done]
    middle = median(seconds)
    return {
        "shape": options.model.shape,
        "lora_r": options.model.lora_r,
        "seqs": asked.seqs,
        "prompt_len": asked.prompt_len,
        "completion_len": asked.completion_len,
        "lognormal": asked.lognormal,
        "optimizer": options.optimizer_name,
        "max_tokens_per_microbatch": options.compute.max_tokens_per_microbatch,
        "step_s_median": round(middle, 4),
        "step_s": [round(one, 4) for one in seconds],
        # Losses and gradient norms, which the number of processes changes only by rounding.
        "loss": [row["train/loss"] for _, row in done],
        "grad_norm": [row["train/grad_norm"] for _, row in done],
        "tokens_per_s": round(fmean(sum(map(sum, each)) for each in lengths) / middle),
        "completion_tokens_per_s": round(fmean(sum(last for _, last in each) for each in lengths) / middle),
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if on_gpu else None,
        "peak_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if on_gpu else None,
        "mfu": round(flops / middle / options.peak_tflops / 1e12 / world.size, 4),
        "tflops": round(flops / middle / 1e12, 1),
        "peak_tflops": options.peak_tflops,
        "phases": _phases(trainer, batches[-1], len(batches), device),
        "processes": world.size,
        "cut": not trainer.holding.whole,
        **trainer.forward.facts(),
        "microbatches": len(trainer.ready(batches[-1]).microbatches),
        "dtype": str(trainer.parameters[0].dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }


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


def _phases(trainer: Trainer, batch: RolloutBatch, number: int, device: torch.device) -> dict[str, float]:
    """Run one more step, and return the seconds of its phases. Each phase waits for the device at its end, so the step
    takes a little longer than those that are measured."""
    spent = {"prepare": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            started = _now(device)
            found = call(*args, **kwargs)
            spent[phase] += _now(device) - started
            return found

        return clocked

    ready = timed("prepare", trainer.ready)(batch)
    with (
        mock.patch.object(trainer.forward, "scores", timed("forward", trainer.forward.scores)),
        mock.patch.object(trainer, "optimizer_step", timed("optimizer", trainer.optimizer_step)),
    ):
        timed("backward", trainer.step)(ready, number)
    spent["backward"] -= spent["forward"] + spent["optimizer"]
    return {phase: round(seconds, 4) for phase, seconds in spent.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
