"""`grpo bench step`: its rollouts, its arithmetic, and one run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.bench.step.options import BatchChoice, StepOptions
from grpo_trainer.bench.step.work import completion_lengths, step_flops, synthetic_batch
from grpo_trainer.config.options import build
from grpo_trainer.doctor.model import ModelShape
from grpo_trainer.errors import ConfigError
from tests.processes import ROOT

pytestmark = pytest.mark.usefixtures("warm_trainers")


def test_operations_by_hand() -> None:
    # hidden 4, inner 6, 2 layers, 2 heads of 2, 1 of keys and values, 10 tokens
    shape = ModelShape(4, 6, 2, 2, 1, 2, 10, tied=False)
    # a layer: q and o 4 x 4, k and v 4 x 2, three of 4 x 6: 32 + 16 + 72 = 120 elements
    # 5 tokens, 3 of them trained: 5 x 6 x 120 x 2 + 3 x 6 x 4 x 10; pairs 15: 3 x 4 x 15 x 4 x 2
    assert step_flops(shape, [(2, 3)], lora_r=0) == 7200 + 720 + 1440
    # frozen: 4 instead of 6; an adapter of rank 1: 2 x (4 + 4) + 2 x (4 + 2) + 3 x (4 + 6) = 58 a layer
    assert step_flops(shape, [(2, 3)], lora_r=1) == 4800 + 5 * 6 * 116 + 480 + 1440
    assert step_flops(shape, [(2, 3), (2, 3)], lora_r=0) == 2 * 9360
    # one prompt for both: 8 tokens' layers instead of 10, and its 3 pairs of tokens once
    shared = step_flops(shape, [(2, 3), (2, 3)], lora_r=0, readers=2)
    assert shared == 2 * 9360 - 2 * 7200 / 5 - 3 * 1440 / 15


def test_the_job_that_is_raced() -> None:
    """1.5B, 64 sequences of 512 and 1,024 tokens: 6 x 1.31e9 x 98,304 for the layers, and the head for 65,536."""
    total = step_flops(SHAPES["1.5b"], [(512, 1024)] * 64, lora_r=0)
    layers = 6 * 1.31e9 * 98_304
    head = 6 * 1536 * 151_936 * 65_536
    attention = 3 * 4 * 64 * (1536 * 1537 / 2) * 1536 * 28
    assert total == pytest.approx(layers + head + attention, rel=0.01)


def test_lengths() -> None:
    fixed = BatchChoice(seqs=16, completion_len=100)
    assert completion_lengths(fixed, np.random.default_rng(0)).tolist() == [100] * 16
    drawn = completion_lengths(BatchChoice(seqs=4096, lognormal=True), np.random.default_rng(0))
    assert drawn.max() == 1024 and drawn.min() >= 8
    assert 290 < np.median(drawn) < 325  # 0.3 x 1024 = 307
    # real tokens of what padding to the longest comes to, prompts of 512 included
    assert 0.55 < (drawn + 512).sum() / (1536 * 4096) < 0.6


def test_the_same_seed_gives_the_same_rollouts() -> None:
    choice = BatchChoice(seqs=16, prompt_len=4, completion_len=9, lognormal=True)
    one, same, other = (synthetic_batch(choice, 50, seed) for seed in (1, 1, 2))

    def tokens(batch: object) -> list[list[int]]:
        return [s.tokens_T.tolist() for group in batch.groups for s in group.samples]  # type: ignore[attr-defined]

    assert tokens(one) == tokens(same) != tokens(other)
    assert len(one.groups) == 2
    for group in one.groups:
        assert len({tuple(sample.tokens_T[:4]) for sample in group.samples}) == 1
        assert len(set(group.rewards)) == 8
        assert all(not sample.trained_T[:4].any() and sample.trained_T[4:].all() for sample in group.samples)


def test_options() -> None:
    assert build(StepOptions, {}).optimizer_name == "adamw_8bit"
    assert build(StepOptions, {"lora_r": 8}).optimizer_name == "adamw"
    with pytest.raises(ConfigError) as error:
        build(StepOptions, {"seqs": 12})
    assert (error.value.field, error.value.got) == ("--seqs", "12") and "8" in error.value.wanted


def test_a_run() -> None:
    command = [sys.executable, "-m", "grpo_trainer", "bench", "step", "--shape", "tiny", "--lora-r", "8"]
    sizes = ["--seqs", "8", "--prompt-len", "6", "--completion-len", "20", "--lognormal", "--json"]
    compute = ["--packing", "on", "--max-tokens-per-microbatch", "64", "--warmup", "1", "--steps", "2"]
    done = subprocess.run([*command, *sizes, *compute], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["shape"], found["lora_r"], found["packed"], found["whole_logits"]) == ("tiny", 8, True, False)
    assert len(found["step_s"]) == 2 and found["microbatches"] > 1
    # 8 prompts of 6 tokens, and completions: the mean of both steps
    prompts = (found["tokens_per_s"] - found["completion_tokens_per_s"]) * found["step_s_median"]
    assert prompts == pytest.approx(48, rel=0.01)
    assert set(found["phases"]) == {"prepare", "forward", "backward", "optimizer"}
    assert all(value > 0 for value in found["phases"].values())
    assert len(found["loss"]) == len(found["grad_norm"]) == 2


@pytest.mark.complete
def test_the_loss_is_that_of_one_process_whatever_their_number() -> None:
    def bench(*how: str) -> dict[str, Any]:
        sizes = ["--seqs", "8", "--prompt-len", "6", "--completion-len", "20", "--lognormal"]
        steps = ["--warmup", "1", "--steps", "2", "--optimizer", "adamw", "--batch-size", "3", "--json"]
        command = [sys.executable, *how, "-m", "grpo_trainer.bench", "step", "--shape", "tiny", *sizes, *steps]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    alone, together = bench(), bench("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert (alone["processes"], alone["cut"]) == (1, False)
    assert (together["processes"], together["cut"]) == (2, True)
    assert alone["loss"] == pytest.approx(together["loss"], abs=1e-6)
    assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-4)
    assert len(set(alone["loss"])) == len(set(alone["grad_norm"])) == 2
