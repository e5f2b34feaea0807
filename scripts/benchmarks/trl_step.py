"""The job of `grpo bench step` done by TRL's GRPOTrainer: `python scripts/benchmarks/trl_step.py --shape 1.5b --json`.

With `--generate` it is the job of `grpo bench loop`: vLLM in TRL's process generates, each token of a completion is the
last with the same probability, and a step's seconds contain everything.

Needs `pip install --no-deps trl==1.16.0` and what TRL needs (accelerate, datasets), liger-kernel for `--liger`. The
same model with random weights, the same rollouts in place of generation; everything else is TRL's own: rewards,
advantages, scoring, its head that makes no whole logits, checkpointing, fused AdamW in the weights' dtype. It takes the
options of `grpo bench step`, of which the trainer's own (microbatch budget, packing, …) mean nothing to it.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import typer

from environments.synthetic import SIGNS
from grpo_trainer.bench.__main__ import JsonLine, run_command, show
from grpo_trainer.bench.loop import work_of
from grpo_trainer.bench.models import SHAPES, ensure_model, numbered_tokenizer, random_model
from grpo_trainer.bench.step import GROUP, StepOptions, bench_dtype, step_flops, synthetic_batch
from grpo_trainer.config.flags import given, taking
from grpo_trainer.config.options import build, option

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class TrlOptions(StepOptions):
    """What is measured, and TRL's own settings."""

    micro: int = option(8, help="Sequences of a microbatch.")
    scoring: bool = option(True, help="Score all samples first, as TRL does with vLLM by default.")
    checkpointing: bool = option(True, help="Recompute activations.")
    liger: bool = option(False, help="liger-kernel's norms, rotary embedding and activations.")
    generate: bool = option(False, help="Generate with vLLM; sequences and lengths are those of `grpo bench loop`.")

    def for_the_loop(self) -> tuple[TrlOptions, dict[str, Any]]:
        """Return the options with the lengths of `grpo bench loop`, and TRL's settings that generate them."""
        work, vocab = work_of(self.shape), SHAPES[self.shape].vocab
        names = {"seqs": "sequences", "prompt_len": "prompt_len", "completion_len": "completion_len"}
        ends = round(vocab / work["completion_mean"])  # random weights sample all ids about equally often
        return self.model_copy(update={ours: int(work[name]) for ours, name in names.items()}), {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,
            "vllm_max_model_length": int(work["prompt_len"] + work["completion_len"]),
            "generation_kwargs": {"stop_token_ids": [*range(vocab - ends, vocab)]},
        }


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


def make_trainer(options: TrlOptions, folder: str, seconds: list[float], made: list[list[tuple[int, int]]]) -> Any:
    """TRL's trainer, fed with synthetic rollouts or its own. `made`: each step's tokens of prompts and completions."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from grpo_trainer.config.bridge import BridgeConfig

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    draw = random.Random(0)
    shape = SHAPES[options.shape]
    engine: dict[str, Any] = {}
    if options.generate:
        options, engine = options.for_the_loop()

    def rollouts(prompts: list[Any], _: Any) -> dict[str, Any]:
        samples = [sample for group in synthetic_batch(options, len(made)).groups for sample in group.samples]
        return {
            "prompt_ids": [sample.tokens_T[: sample.prompt_len].tolist() for sample in samples],
            "completion_ids": [sample.tokens_T[sample.positions].tolist() for sample in samples],
            "logprobs": [[-math.log(shape.vocab)] * len(sample.positions) for sample in samples],
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        made.append([(options.prompt_len, len(ids)) for ids in completion_ids])
        return [draw.random() for _ in completion_ids]

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
        **engine,
    )
    names = list(BridgeConfig(weight_bridge_mode="lora_only").lora_target_modules)
    adapter = LoraConfig(
        r=options.lora_r, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"
    ) if options.lora_r else None  # fmt: skip
    if options.generate:  # vLLM loads the model from a folder
        ensure_model(shape, Path(folder) / "model", bench_dtype(device))
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=bench_dtype(device))
    else:
        model = random_model(shape, bench_dtype(device), device)
    prompts = ["".join(draw.choices(SIGNS, k=options.prompt_len)) for _ in range(steps * options.seqs // GROUP)]
    trainer: Any = GRPOTrainer(
        model, reward, args, Dataset.from_dict({"prompt": prompts}),
        processing_class=numbered_tokenizer(shape.vocab), peft_config=adapter,
        rollout_func=None if options.generate else rollouts, callbacks=[timer(seconds)],
    )  # fmt: skip
    if options.scoring and not options.generate:  # what it does with vLLM: another engine's ratio is corrected
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = type("Engine", (), {"sync_weights": lambda self: None})()
    return trainer


def measure(options: TrlOptions) -> dict[str, Any]:
    """Figures under the names of `grpo bench step`."""
    import torch

    seconds: list[float] = []
    made: list[list[tuple[int, int]]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, seconds, made)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    shape = SHAPES[options.shape]
    seconds, made = seconds[options.warmup :], made[options.warmup :]
    median = statistics.median(seconds)
    typical = statistics.fmean(seconds) if options.generate else median  # lengths differ from step to step
    flops = statistics.mean(step_flops(shape, lengths, options.lora_r) for lengths in made)
    gpu = torch.cuda.is_available()
    kept = {"shape", "lora_r", "lognormal", "micro", "checkpointing", "liger", "generate"}
    kept |= set() if options.generate else {"scoring"}
    return {
        "trainer": "trl 1.16",
        **options.model_dump(include=kept),
        "step_s_median": round(median, 4),
        "step_s": [round(one, 4) for one in seconds],
        "tokens_per_s": round(statistics.mean(sum(map(sum, lengths)) for lengths in made) / typical),
        "completion_tokens_per_s": round(statistics.mean(sum(c for _, c in one) for one in made) / typical),
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
