"""A released model learns word problems, here and in TRL.

    grpo demo-model runs/smollm2 --released
    python scripts/benchmarks/trl_learn.py --model runs/smollm2 --out runs/race

`grpo run` and TRL's GRPOTrainer, which generates with vLLM in its own process (on a CPU with transformers), train the
same model on the same problems in the same order, with the same rewards, batches and length of answers, one after the
other and each at several learning rates. Plain transformers answers held-out problems with every checkpoint of both.
Seconds count from the begin of the first step. Prints one JSON object, and writes a file for each run
that `plot_runs.py` draws with `--y accuracy`.

Needs `pip install --no-deps trl==1.16.0` and what TRL needs (accelerate, datasets).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from trl_loop import Curve, Job, Questions, ours, trl

from environments.config import ServerConfig
from environments.peers.roster import servers
from environments.tokenizers import load_tokenizer
from environments.word_problems import WordProblemsConfig, WordProblemsEnv, is_right

RANK = 16
"""Of an adapter."""
SEQ_LEN = 256
"""Tokens of a problem with its answer."""
MICRO = 128
"""Sequences of a microbatch of TRL, about the tokens of one of `grpo run`."""


@dataclass(frozen=True)
class Checkpoint:
    """The share of right answers to held-out problems after a step, with its 95 % confidence interval."""

    step: int
    seconds: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float


@dataclass(frozen=True)
class Run:
    """One trainer at one learning rate; its first checkpoint is the untrained model."""

    trainer: str
    lr: float
    checkpoints: Sequence[Checkpoint]

    def reached(self, targets: Sequence[float]) -> dict[str, tuple[int, float] | None]:
        """Return step and seconds of the first checkpoint with each accuracy."""
        return {
            str(target): next(((each.step, each.seconds) for each in self.checkpoints if each.accuracy >= target), None)
            for target in targets
        }

    def write(self, path: Path) -> None:
        """Write one row a checkpoint."""
        rows, before = [], 0.0
        for each in self.checkpoints:
            rows.append({**asdict(each), "train/seconds": each.seconds - before})
            before = each.seconds
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def word_problems(job: Job, level: str) -> Questions:
    """Return the problems that `grpo env word_problems` asks, in its order, for TRL."""
    tokenizer = load_tokenizer(str(job.model))
    config = WordProblemsConfig(tokenizer_name=str(job.model), level=level, max_token_length=SEQ_LEN)
    env = WordProblemsEnv(config, servers(ServerConfig(), patience=1.0), tokenizer)

    async def problems() -> list[Any]:
        await env.setup()
        return [await env.get_next_item() for _ in range(job.steps * job.sequences // job.group)]

    def score(completions: list[Any], completion_ids: list[list[int]], problem: list[int], **_: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [
            float(ids[-1] == tokenizer.eos_token_id and is_right(asked[number], text))
            for number, text, ids in zip(problem, texts, completion_ids, strict=True)
        ]

    asked = asyncio.run(problems())
    columns = {"prompt": [env.prompt(each) for each in asked], "problem": list(range(len(asked)))}
    assert config.max_tokens is not None, "it has a default"
    return Questions(columns, score, config.max_tokens)


def learn_with_trl(job: Job, level: str, folder: Path) -> Curve:
    """Train with TRL, in a process that ends afterwards: vLLM inside it keeps its memory until then."""
    import torch

    on_gpu = torch.cuda.is_available()
    rows = min(job.sequences, MICRO)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": job.sequences // rows,
    }
    if on_gpu:
        engine = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": SEQ_LEN}
        settings |= {"bf16": True, "use_vllm": True, **engine}
    return trl(job, word_problems(job, level), folder, shuffle_dataset=False, **settings)


def held_out(folders: Mapping[int, Path], curve: Curve, model: Path, flags: Sequence[str]) -> list[Checkpoint]:
    """Evaluate the folder of each step. The steps' seconds are the curve's; step 0 is the untrained model."""
    from held_out import PlainTransformers, evaluate

    found = []
    for step, folder in sorted(folders.items()):
        figures = asyncio.run(evaluate("word_problems", str(model), PlainTransformers(str(folder)), flags))
        kept = {key: figures[key] for key in ("accuracy", "accuracy_low", "accuracy_high")}
        found.append(Checkpoint(step, round(curve.seconds[step - 1], 2) if step else 0.0, **kept))
    return found


def folders_of(run: Path, model: Path, steps: int) -> dict[int, Path]:
    """Return the checkpoints of a run of either trainer, by step."""
    saved = [*run.glob("checkpoints/*step_*"), *run.glob("checkpoint-*")]
    found = {0: model, **{int(re.split("[_-]", each.name)[-1]): each for each in saved}}
    for last in run.glob("checkpoints/*_final"):
        found[steps] = last
    return found


def train(trainer: str, job: Job, mode: str, level: str, folder: Path, more: Sequence[str]) -> Curve:
    """Train with `grpo` or `trl` in `folder`."""
    if trainer == "trl":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(learn_with_trl, job, level, folder).result()
    task = {"env": "word_problems", "seq-len": SEQ_LEN, "env.level": level, "env.max_token_length": SEQ_LEN}
    return ours(job, mode, folder, more, task)


def main(
    model: Annotated[Path, typer.Option(help="A model's folder (`grpo demo-model OUT --released`).")],
    out: Annotated[Path, typer.Option(help="A folder for the runs; a new one.")],
    mode: Annotated[str, typer.Option(help="lora_only, or for all weights shared_vllm or none.")] = "lora_only",
    level: Annotated[str, typer.Option(help="Levels of the problems.")] = "1-2",
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 100,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 5,
    sequences: Annotated[int, typer.Option(help="Sequences a step.")] = 512,
    group: Annotated[int, typer.Option(help="Sequences of a problem.")] = 16,
    lrs: Annotated[str, typer.Option(help="Learning rates of `grpo run`; '': leave it out.")] = "2e-4,3e-4,5e-4",
    trl_lrs: Annotated[str, typer.Option(help="Learning rates of TRL; '': leave it out.")] = "2e-4,3e-4,5e-4",
    targets: Annotated[str, typer.Option(help="Accuracies; steps and seconds to each are printed.")] = "0.5,0.8",
    questions: Annotated[int, typer.Option(help="Held-out problems of an evaluation.")] = 200,
    more: Annotated[str, typer.Option(help="More arguments for `grpo run`.")] = "",
) -> None:
    """Race `grpo run` and TRL's GRPOTrainer to a held-out accuracy."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, wanted = model.absolute(), [float(each) for each in targets.split(",")]
    asked = ["--env.level", level, "--env.max_token_length", str(SEQ_LEN), "--env.eval_questions", str(questions)]
    out.mkdir(parents=True)
    runs = []
    for trainer, rates in (("grpo", lrs), ("trl", trl_lrs)):
        for lr in map(float, filter(None, rates.split(","))):
            job = Job(model, steps, sequences, group, lr, lora_r=RANK if mode == "lora_only" else 0, save_every=every)
            folder = out / f"{lr:g}" / trainer
            curve = train(trainer, job, mode, level, folder, more.split())
            runs.append(Run(trainer, lr, held_out(folders_of(folder, model, steps), curve, model, asked)))
            runs[-1].write(out / f"{trainer}-{lr:g}.jsonl")
    rows = [asdict(run) | {"reached": run.reached(wanted)} for run in runs]
    print(json.dumps({"mode": mode, "level": level, "sequences": sequences, "runs": rows}))


if __name__ == "__main__":
    typer.run(main)
