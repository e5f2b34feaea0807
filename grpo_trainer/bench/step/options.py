"""Options of `grpo bench step`."""

from __future__ import annotations

from typing import Literal

from grpo_trainer.bench.shapes import SHAPE_HELP, ShapeName
from grpo_trainer.config.compute import ComputeConfig
from grpo_trainer.config.options import Section, option


class ModelChoice(Section):
    """Model."""

    shape: ShapeName = option("0.5b", help=SHAPE_HELP)
    lora_r: int = option(0, help="Rank of an adapter on all linear modules; 0: all weights are trained.", ge=0)
    gradient_checkpointing: bool | None = option(
        None, help="Recompute activations (default: auto, in as few layers as the GPU's free memory allows)."
    )
    logits_dtype: Literal["auto", "float32", "model"] = option("auto", help="As the trainer's --logits-dtype.")
    attention: Literal["sdpa", "eager"] = option("sdpa", help="Attention implementation for padded sequences.")


class BatchChoice(Section):
    """Batch."""

    seqs: int = option(64, help="Sequences of a step, a multiple of 8.", ge=8, multiple_of=8)
    prompt_len: int = option(512, help="Tokens of a prompt.", ge=1)
    completion_len: int = option(1024, help="Tokens of a completion; with --lognormal the longest.", ge=1)
    lognormal: bool = option(
        False, help="Draw lengths of completions from a log-normal distribution: median 0.3 of the longest, sigma 0.7."
    )
    batch_size: int = option(8, help="Sequences of a microbatch, if --max-tokens-per-microbatch is not set.", ge=1)


class StepOptions(Section):
    """What is measured."""

    optimizer: Literal["auto", "adamw", "adamw_8bit"] = option(
        "auto", help="auto: adamw_8bit for all weights, adamw for an adapter."
    )
    warmup: int = option(2, help="Unmeasured steps before the measured ones.", ge=1)
    steps: int = option(5, help="Measured steps.", ge=1)
    peak_tflops: float = option(
        989.0, help="Peak of the GPU for mfu, in TFLOP/s: dense bfloat16 of an H100 or H200 by its data sheet.", gt=0
    )
    sharding: Literal["auto", "none", "full"] = option(
        "auto", help="Under torchrun, if all weights are trained: shard them over the GPUs (full, auto), or not (none)."
    )
    seed: int = option(0, help="Seed of weights, tokens, lengths and rewards.")
    model: ModelChoice = ModelChoice()
    batch: BatchChoice = BatchChoice()
    compute: ComputeConfig = ComputeConfig()

    @property
    def optimizer_name(self) -> Literal["adamw", "adamw_8bit"]:
        """The optimizer that `--optimizer auto` means."""
        if self.optimizer == "auto":
            return "adamw" if self.model.lora_r else "adamw_8bit"
        return self.optimizer
