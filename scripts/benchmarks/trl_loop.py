"""The whole loop on one task, here and in TRL: `python scripts/benchmarks/trl_loop.py --model MODEL --out DIR`.

Sums of two numbers, the same model, prompts, rewards, batch, loss and learning rate, all weights trained, one after the
other on the same machine. TRL's GRPOTrainer generates with transformers in its own process; `grpo run` has a vLLM
server on the trainer's GPU. Seconds count from the begin of the first step. Prints one JSON object.

Needs `pip install --no-deps trl==1.16.0` and what TRL needs (accelerate, datasets).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from environments.arithmetic import ProblemSet, reward
from grpo_trainer.metrics.rows import read_rows

SMOOTHED = 5
"""A reward is reached when the mean of this many steps reaches it."""
LONGEST = 4
"""Tokens of an answer, as the environment allows: two digits, the token that ends it, and one more."""


@dataclass(frozen=True)
class Job:
    """What both trainers do."""

    model: Path
    steps: int
    sequences: int
    """Completions of a step, in groups of `group`."""
    group: int
    lr: float
    warmup: int = 5
    lora_r: int = 0
    """Rank of the adapter; 0: all weights are trained."""
    save_every: int = 0
    """Steps between checkpoints; 0: none."""


@dataclass(frozen=True)
class Questions:
    """A task for TRL: `grpo run` has an environment."""

    columns: Mapping[str, Sequence[Any]]
    """Of TRL's data set, in the order of training: `prompt`, and what `score` needs."""
    score: Callable[..., list[float]]
    """TRL's reward function."""
    longest: int
    """Tokens of an answer."""


@dataclass
class Curve:
    """Rewards of the steps, and the seconds at which each ended."""

    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def reached(self, target: float) -> tuple[int, float] | None:
        """Step and seconds at which the smoothed reward reached `target`; None: it did not."""
        for step in range(SMOOTHED, len(self.rewards) + 1):
            if fmean(self.rewards[step - SMOOTHED : step]) >= target:
                return step, round(self.seconds[step - 1], 1)
        return None

    def figures(self, targets: Sequence[float]) -> dict[str, Any]:
        """What is printed of it."""
        lasted = [end - start for start, end in zip([0.0, *self.seconds], self.seconds, strict=False)]
        return {
            "steps": len(self.rewards),
            "seconds": round(self.seconds[-1], 1),
            "step_s_median": round(median(lasted), 3),
            "reward_last": round(fmean(self.rewards[-SMOOTHED:]), 3),
            "reached": {str(target): self.reached(target) for target in targets},
        }


def ours(job: Job, mode: str, folder: Path, more: Sequence[str], task: Mapping[str, object]) -> Curve:
    """`grpo run` with its defaults, but for `task`: the environment, its settings and the lengths that it needs."""
    command = [sys.executable, "-m", "grpo_trainer", "run", "--model-name", job.model, "--run-dir", folder]
    options = {
        "weight-bridge-mode": mode,
        "training-steps": job.steps,
        "batch-size": job.sequences,
        "gradient-accumulation-steps": 1,
        "lr": job.lr,
        "lr-schedule": "constant",
        "warmup-steps": job.warmup,
        "loss": "dapo",
        "server.port": 0,
        "api.port": 0,
        "env.group_size": job.group,
        **({"lora-r": job.lora_r, "lora-alpha": 2 * job.lora_r} if job.lora_r else {}),
        **({"checkpoint-interval": job.save_every, "keep-checkpoints": 0} if job.save_every else {}),
        **task,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run([*map(str, command), *flags, *more], check=True, stdout=sys.stderr)
    rows = read_rows(folder / "metrics.jsonl")
    return Curve([row["reward/mean"] for row in rows], [*accumulate(row["train/seconds"] for row in rows)])


def trl(job: Job, questions: Questions, folder: Path, **settings: Any) -> Curve:
    """TRL's GRPOTrainer, by default with transformers' generation and in float32. `settings`: more of GRPOConfig."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    curve = Curve()
    began: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not began:
                began.append(time.perf_counter())

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "reward" in logs:
                curve.rewards.append(float(logs["reward"]))
                curve.seconds.append(time.perf_counter() - began[0])

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "per_device_train_batch_size": job.sequences,
        "gradient_accumulation_steps": 1,
        "num_generations": job.group,
        "max_completion_length": questions.longest,
        "max_steps": job.steps,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": job.warmup,
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not on_gpu,
        "logging_steps": 1,
        "save_strategy": "steps" if job.save_every else "no",
        "save_steps": job.save_every or job.steps,
        "save_only_model": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    # Adapters are float32 on a 16-bit model; all weights are trained in float32, with 16-bit products.
    dtype = torch.bfloat16 if settings.get("bf16") and job.lora_r else torch.float32
    adapter = LoraConfig(
        r=job.lora_r, lora_alpha=2 * job.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
    ) if job.lora_r else None  # fmt: skip
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype),
        questions.score,
        GRPOConfig(str(folder), **(options | settings)),
        Dataset.from_dict(dict(questions.columns)),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=adapter,
        callbacks=[Watch()],
    ).train()
    return curve


SUMS = {"env": "arithmetic", "seq-len": 64}
"""The task of `grpo run`; `sums` is TRL's."""


def sums() -> Questions:
    """Return the sums of two numbers that the demo model knows a little of."""

    problems = {problem.prompt: problem for problem in ProblemSet.of(10, 49).train}

    def score(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [reward(problems[prompt], answer) for prompt, answer in zip(prompts, completions, strict=True)]

    return Questions({"prompt": list(problems)}, score, LONGEST)


def main(
    model: Annotated[Path, typer.Option(help="A demo model's folder (`grpo demo-model OUT`).")],
    out: Annotated[Path, typer.Option(help="A folder for the run; a new one.")],
    mode: Annotated[str, typer.Option(help="Weight bridge of `grpo run`.")] = "shared_vllm",
    steps: Annotated[int, typer.Option(help="Steps of `grpo run`.")] = 250,
    trl_steps: Annotated[int, typer.Option(help="Steps of TRL; 0: leave it out.")] = 500,
    sequences: Annotated[int, typer.Option(help="Sequences a step.")] = 512,
    group: Annotated[int, typer.Option(help="Sequences of a prompt.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
    targets: Annotated[str, typer.Option(help="Rewards; the time to reach each is printed.")] = "0.7,0.9",
    more: Annotated[str, typer.Option(help="More arguments for `grpo run`.")] = "",
) -> None:
    """Race `grpo run` and TRL's GRPOTrainer to a reward."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wanted = [float(each) for each in targets.split(",")]
    out.mkdir(parents=True)
    job = Job(model, steps, sequences, group, lr)
    found = {"grpo": ours(job, mode, out / "grpo", more.split(), SUMS).figures(wanted)}
    if trl_steps:
        found["trl"] = trl(replace(job, steps=trl_steps), sums(), out / "trl").figures(wanted)
    print(json.dumps({"mode": mode, "sequences": sequences, "lr": lr, **found}))


if __name__ == "__main__":
    typer.run(main)
