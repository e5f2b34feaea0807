"""The job of `grpo bench step` done by TRL's GRPOTrainer: `python scripts/benchmarks/trl_step.py --shape 1.5b --json`.

Needs `pip install --no-deps trl==1.16.0` and what TRL needs (accelerate, datasets), liger-kernel for `--liger`. The
same model with random weights, the same rollouts in place of generation; everything else is TRL's own: rewards,
advantages, scoring, its head that makes no whole logits, checkpointing, fused AdamW in the weights' dtype. It takes the
options of `grpo bench step`, of which the trainer's own (microbatch budget, packing, …) mean nothing to it.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import typer

from grpo_trainer.bench.__main__ import JsonLine, run_command, show
from grpo_trainer.bench.models import SHAPES, random_model
from grpo_trainer.bench.step import GROUP, StepOptions, bench_dtype, lengths_of, step_flops, synthetic_batch
from grpo_trainer.config.flags import given, taking
from grpo_trainer.config.options import build, option

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class TrlOptions(StepOptions):
    """What is measured, and TRL's own settings."""

    micro: int = option(8, help="Sequences of a microbatch.")
    scoring: bool = option(True, help="Score all samples first, as TRL does with vLLM by default.")
    checkpointing: bool = option(True, help="Recompute activations.")
    liger: bool = option(False, help="liger-kernel's norms, rotary embedding and activations.")


def timer(seconds: list[float]) -> Any:
    """What TRL calls around each optimizer step: it adds the step's seconds, the device having come there."""
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(now() - self.began)

    return Timer()


def make_trainer(options: TrlOptions, folder: str, seconds: list[float]) -> Any:
    """TRL's trainer, fed with synthetic rollouts."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from grpo_trainer.bench.models import numbered_tokenizer
    from grpo_trainer.config.bridge import BridgeConfig

    on_gpu = torch.cuda.is_available()
    shape = SHAPES[options.shape]
    calls: list[int] = []

    def rollouts(prompts: list[Any], _: Any) -> dict[str, Any]:
        made = synthetic_batch(options, len(calls))
        calls.append(len(prompts))
        samples = [sample for group in made.groups for sample in group.samples]
        return {
            "prompt_ids": [sample.tokens_T[: sample.prompt_len].tolist() for sample in samples],
            "completion_ids": [sample.tokens_T[sample.positions].tolist() for sample in samples],
            "logprobs": [[-math.log(shape.vocab)] * len(sample.positions) for sample in samples],
        }

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        made = synthetic_batch(options, len(calls) - 1)
        rewards: list[float | None] = [sample.reward for group in made.groups for sample in group.samples]
        return rewards[: len(completions)]

    steps = options.warmup + options.steps
    args = GRPOConfig(
        folder,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.seqs // options.micro,
        num_generations=GROUP,
        max_completion_length=options.completion_len,
        max_steps=steps,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        gradient_checkpointing=options.checkpointing,
        use_liger_kernel=options.liger,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        beta=0.0,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    names = list(BridgeConfig(weight_bridge_mode="lora_only").lora_target_modules)
    adapter = LoraConfig(
        r=options.lora_r, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"
    ) if options.lora_r else None  # fmt: skip
    device = torch.device("cuda" if on_gpu else "cpu")
    rows = Dataset.from_dict({"prompt": [f"<{number}>" for number in range(steps * options.seqs // GROUP)]})
    trainer: Any = GRPOTrainer(
        random_model(shape, bench_dtype(device), device), reward, args, rows,
        processing_class=numbered_tokenizer(shape.vocab),
        peft_config=adapter, rollout_func=rollouts, callbacks=[timer(seconds)],
    )  # fmt: skip
    if options.scoring:  # what it does with vLLM: samples come from another engine, so their ratio is corrected
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = type("Engine", (), {"sync_weights": lambda self: None})()
    return trainer


def measure(options: TrlOptions) -> dict[str, Any]:
    """Figures under the names of `grpo bench step`."""
    import torch

    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, seconds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    shape = SHAPES[options.shape]
    seconds = seconds[options.warmup :]
    numbers = range(options.warmup, options.warmup + options.steps)
    batches = [lengths_of(synthetic_batch(options, number)) for number in numbers]
    median = statistics.median(seconds)
    tokens = statistics.mean(sum(map(sum, lengths)) for lengths in batches)
    flops = statistics.mean(step_flops(shape, lengths, options.lora_r) for lengths in batches)
    gpu = torch.cuda.is_available()
    return {
        "trainer": "trl 1.16",
        **options.model_dump(include={"shape", "lora_r", "lognormal", "micro", "scoring", "checkpointing", "liger"}),
        "step_s_median": round(median, 4),
        "step_s": [round(one, 4) for one in seconds],
        "tokens_per_s": round(tokens / median),
        "completion_tokens_per_s": round(statistics.mean(sum(c for _, c in one) for one in batches) / median),
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if gpu else None,
        "peak_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if gpu else None,
        "mfu": round(flops / median / options.peak_tflops / 1e12, 4),
    }


@app.command(cls=taking(TrlOptions))
def main(ctx: typer.Context, json_line: JsonLine = False) -> None:
    """Measure TRL's GRPOTrainer on the job of `grpo bench step`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    warnings.simplefilter("ignore")
    show(measure(build(TrlOptions, given(ctx))), in_a_line=json_line)


if __name__ == "__main__":
    run_command(app, "trl_step.py")
