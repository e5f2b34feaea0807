"""Measures a whole training step next to the server: the GPU memory of both while they share the GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from grpo_trainer.bench.step.options import BatchChoice
from grpo_trainer.bench.step.work import synthetic_batch
from grpo_trainer.bench.sync.options import StepChoice
from grpo_trainer.bench.sync.subject import Subject
from grpo_trainer.metrics.types import reduce
from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)

STEPS = 2
"""Two steps, of which the first creates the optimizer's states."""


def step_figures(
    subject: Subject[Any], choice: StepChoice, vocab: int, gpu_gb: Callable[[], float | None]
) -> dict[str, Any]:
    """Train on synthetic rollouts, twice. Sizes are in units of 1e9 bytes, None without a GPU.

    * `seconds`: of the last step;
    * `weights_gb`: allocated by the trainer before the first step;
    * `peak_gb`: the most that the trainer had allocated at one time: weights, gradients, states, activations;
    * `server_gb`: taken by the server alone; `together_gb`: used on the GPU after the steps, by whomever;
    * `together_over_parts`: above 1 by what CUDA and torch keep for themselves.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 1e9 if on_gpu else None
    trainer = Trainer(subject.model, subject.config)
    batch = BatchChoice(
        seqs=choice.step_seqs, prompt_len=choice.step_prompt_len, completion_len=choice.step_completion_len
    )
    seconds, loss = 0.0, 0.0
    for number in range(STEPS):
        ready = trainer.ready(synthetic_batch(batch, vocab, number))
        started = time.perf_counter()
        result = trainer.step(ready, number, subject.bridge.updating)
        if on_gpu:
            torch.cuda.synchronize()
        seconds, loss = time.perf_counter() - started, reduce(result.metrics)["train/loss"]
        subject.trained()
        log.info("training step %d: %.2f s", number, seconds)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    together = gpu_gb()
    parts = None if peak is None or subject.server_gb is None else subject.server_gb + peak
    return {
        "sequences": choice.step_seqs,
        "optimizer": choice.step_optimizer,
        "seconds": round(seconds, 3),
        "loss": loss,
        "weights_gb": _rounded(before),
        "peak_gb": _rounded(peak),
        "server_gb": _rounded(subject.server_gb),
        "together_gb": _rounded(together),
        "together_over_parts": None if parts is None or together is None else round(together / parts, 4),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
