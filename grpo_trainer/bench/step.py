"""`grpo bench step`: optimisation steps, the trainer's own, on synthetic rollouts and a model with random weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from grpo_trainer.bench.models import SHAPES, ShapeName, random_model
from grpo_trainer.config.bridge import ALL_LINEAR
from grpo_trainer.config.options import build, option
from grpo_trainer.config.rules import checked
from grpo_trainer.config.train import ComputeConfig, DistributedConfig, TrainConfig
from grpo_trainer.model.shape import ModelShape
from grpo_trainer.rollouts.groups import Group, RolloutBatch, Sample

if TYPE_CHECKING:
    import torch

    from grpo_trainer.parallel.world import World
    from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)

GROUP = 8


class StepOptions(ComputeConfig):
    """What is measured."""

    shape: ShapeName = option("0.5b", help="Shape of the model; its weights are random.")
    lora_r: int = option(0, help="Rank of an adapter on all linear modules; 0: all weights are trained.", ge=0)
    gradient_checkpointing: bool | None = option(
        None, help="Recompute activations (default: auto, in as few layers as the GPU's free memory allows)."
    )
    seqs: int = option(64, help="Sequences of a step, a multiple of 8.", ge=8, multiple_of=8)
    prompt_len: int = option(512, help="Tokens of a prompt.", ge=1)
    completion_len: int = option(1024, help="Tokens of a completion; with --lognormal the longest.", ge=1)
    lognormal: bool = option(
        False, help="Draw lengths of completions from a log-normal distribution: median 0.3 of the longest, sigma 0.7."
    )
    batch_size: int = option(8, help="Sequences of a microbatch, if --max-tokens-per-microbatch is not set.", ge=1)
    optimizer: Literal["adamw", "adamw_8bit"] | None = option(
        None, help="Optimizer (default: adamw_8bit for all weights, adamw for an adapter)."
    )
    warmup: int = option(2, help="Unmeasured steps before the measured ones.", ge=1)
    steps: int = option(5, help="Measured steps.", ge=1)
    peak_tflops: float = option(
        989.0, help="Peak of the GPU for mfu, in TFLOP/s: dense bfloat16 of an H100 or H200 by its data sheet.", gt=0
    )


def completion_lengths(options: StepOptions, random: np.random.Generator) -> NDArray[np.int64]:
    """Of all sequences; one has the full length, so that padding to the longest is what it would be in training."""
    longest = options.completion_len
    if not options.lognormal:
        return np.full(options.seqs, longest)
    drawn = 0.3 * longest * np.exp(0.7 * random.standard_normal(options.seqs))
    lengths = np.clip(drawn.round().astype(np.int64), min(8, longest), longest)
    lengths[lengths.argmax()] = longest
    return lengths


def synthetic_batch(options: StepOptions, seed: int) -> RolloutBatch:
    """Return one step's rollouts: random tokens, groups of 8 with rewards that differ.

    They have no logprobs: old logprobs are the trainer's own, as in an on-policy run.
    """
    random, vocab = np.random.default_rng(seed), SHAPES[options.shape].vocab
    lengths = completion_lengths(options, random)

    def sample(prompt: NDArray[np.int64], length: int) -> Sample:
        tokens_T = np.concatenate([prompt, random.integers(0, vocab, length)])
        return Sample(tokens_T, np.arange(len(prompt), len(tokens_T)), reward=float(random.random()))

    groups = []
    for start in range(0, options.seqs, GROUP):
        prompt = random.integers(0, vocab, options.prompt_len)
        groups.append(Group(tuple(sample(prompt, int(length)) for length in lengths[start : start + GROUP])))
    return RolloutBatch(f"synthetic-{seed}", tuple(groups))


def lengths_of(batch: RolloutBatch) -> list[tuple[int, int]]:
    """Return the tokens of each sequence's prompt and completion."""
    samples = [sample for group in batch.groups for sample in group.samples]
    return [(len(sample.tokens_T) - len(sample.positions), len(sample.positions)) for sample in samples]


def step_flops(shape: ModelShape, lengths: Iterable[tuple[int, int]], lora_r: int, *, readers: int = 1) -> float:
    """Return the operations of the model's own arithmetic, without recomputation.

    A product with a matrix of n elements is 2n operations a token forward; as many backward for the gradient of its
    input, and as many for its own unless it is frozen.

    * layers: 6 n for each token, 4 n if frozen (LoRA), and 6 n of the adapter;
    * head: the same, for trained tokens only, and its own is frozen with LoRA;
    * attention: 2 products of heads x head size for each pair of tokens that sees one another, t (t + 1) / 2 of t
      tokens, forward, and twice that backward.

    `lengths` are tokens of each sequence's prompt and completion; `readers` sequences have one prompt, computed once.
    """
    layer = sum(inputs * outputs for inputs, outputs in shape.module_widths.values())
    factor = 4 if lora_r else 6
    adapter = shape.adapter_parameters(lora_r, ALL_LINEAR)
    total = 0.0
    for prompt, completion in lengths:
        tokens = prompt / readers + completion
        pairs = prompt * (prompt + 1) / 2 / readers + completion * (prompt + (completion + 1) / 2)
        total += tokens * (factor * layer * shape.layers + 6 * adapter)
        total += completion * factor * shape.hidden * shape.vocab
        total += 3 * 4 * pairs * shape.hidden * shape.layers
    return total


def bench_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a benchmark's weights: bfloat16 on a GPU."""
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build_trainer(options: StepOptions, device: torch.device, world: World) -> Trainer:
    """Return the trainer of a run, for all weights in the dtype that a server has them in, or for an adapter."""
    from grpo_trainer.model.load import freeze
    from grpo_trainer.model.lora import add_adapter
    from grpo_trainer.parallel.shards import is_sharded
    from grpo_trainer.trainer import Trainer

    all_weights = "shared_vllm" if world.size == 1 else "none"  # shared memory is one process's
    bridge = (
        {"weight_bridge_mode": "lora_only", "lora_r": options.lora_r}
        if options.lora_r
        else {"weight_bridge_mode": all_weights}
    )
    values = {
        "model": "random",
        "seq_len": options.prompt_len + options.completion_len,
        "training_steps": 1000,
        "batch_size": options.batch_size,
        "gradient_accumulation_steps": -(-options.seqs // options.batch_size),
        "gradient_checkpointing": options.gradient_checkpointing,
        "optimizer": options.optimizer or ("adamw" if options.lora_r else "adamw_8bit"),
        "drift_limit": 0,
        "world_size": world.size,
        "init_method": "env://",
        **bridge,
        **options.model_dump(include={*ComputeConfig.model_fields}),
    }
    config = checked(build(TrainConfig, {key: value for key, value in values.items() if value is not None}))
    sharded = world if is_sharded(world, config) else None
    model = random_model(SHAPES[options.shape], bench_dtype(device), device, world=sharded)
    freeze(model, config)
    if config.weight_bridge_mode == "lora_only":
        return Trainer(add_adapter(model, config, 0), config, world=world)
    return Trainer(model.requires_grad_(True), config, world=world)


def measure(options: StepOptions) -> dict[str, Any] | None:
    """Warm up, then measure; memory counts from the first step on.

    Under torchrun all processes take their shares of each batch; rank 0 measures, for the others this is None.
    """
    import torch

    from grpo_trainer.engine.allocator import grow_segments
    from grpo_trainer.parallel.world import join

    on_gpu = torch.cuda.is_available()
    world = join(DistributedConfig(), on_gpu=on_gpu)
    grow_segments()
    device = torch.device("cuda" if on_gpu else "cpu")
    with world:
        trainer = build_trainer(options, device, world)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        batches = [synthetic_batch(options, n) for n in range(options.warmup + options.steps)]
        done = [timed_step(trainer, batch, number) for number, batch in enumerate(batches)][options.warmup :]
        lengths = [lengths_of(batch) for batch in batches[options.warmup :]]
        if not world.leads:
            return None
        shape, readers = SHAPES[options.shape], GROUP if trainer.forward.shared else 1
        flops = fmean(step_flops(shape, each, options.lora_r, readers=readers) for each in lengths)
        middle = median(seconds for seconds, _ in done)
        return {
            **options.model_dump(include={"shape", "lora_r", "seqs", "prompt_len", "completion_len", "lognormal"}),
            "optimizer": trainer.config.optimizer,
            "max_tokens_per_microbatch": options.max_tokens_per_microbatch,
            "step_s_median": round(middle, 4),
            "step_s": [round(seconds, 4) for seconds, _ in done],
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
            "processes": world.size,
            "cut": not trainer.holding.whole,
            **trainer.forward.facts(),
            "microbatches": len(trainer.ready(batches[-1]).microbatches),
            "dtype": str(trainer.parameters[0].dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
        }


def timed_step(
    trainer: Trainer,
    batch: RolloutBatch,
    number: int,
    updating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[float, dict[str, float]]:
    """Run a step; return its seconds, from scored groups to finished weights, and its metrics."""
    from grpo_trainer.metrics.types import reduce

    started = _now()
    result = trainer.step(batch, number, updating)
    seconds = _now() - started
    row = reduce(result.metrics)
    log.info("step %d: %.3f s, loss %.3g", number, seconds, row["train/loss"])
    return seconds, row


def _now() -> float:
    """Return the time once the device has done all its work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
