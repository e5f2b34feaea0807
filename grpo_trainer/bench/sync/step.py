"""Measures a whole training step next to the server: the GPU memory of both while they share the GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from grpo_trainer.bench.step.options import BatchChoice
from grpo_trainer.bench.step.rollouts import synthetic_batch
from grpo_trainer.bench.sync.options import StepChoice
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)

STEPS = 2
"""Two steps, of which the first creates the optimizer's states."""


@dataclass(frozen=True)
class Training:
    """The trained model of a subject.

    Attributes:
        writing: returns the context for each write of the weights.
        written: called after each write.
        server_gb: GPU memory of the server after its start; None: there is no GPU.
    """

    model: nn.Module
    config: TrainConfig
    server_gb: float | None
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    written: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class StepFigures:
    """Sizes in units of 1e9 bytes, None without a GPU.

    Attributes:
        seconds: of the last step.
        weights_gb: allocated by the trainer before the first step.
        peak_gb: the most that the trainer had allocated at one time: its own weights, gradients, states, activations.
        server_gb: taken by the server alone.
        together_gb: used on the GPU after the steps, by whomever.
        together_over_parts: `together_gb / (server_gb + peak_gb)`: above 1 by what CUDA and torch keep for themselves.
    """

    sequences: int
    optimizer: str
    seconds: float
    loss: float
    weights_gb: float | None
    peak_gb: float | None
    server_gb: float | None
    together_gb: float | None
    together_over_parts: float | None


def measure_step(training: Training, choice: StepChoice, vocab: int, gpu_gb: Callable[[], float | None]) -> StepFigures:
    """Train on synthetic rollouts, twice."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 1e9 if on_gpu else None
    trainer = Trainer(training.model, training.config)
    seconds, loss = 0.0, 0.0
    for number in range(STEPS):
        batch = trainer.ready(synthetic_batch(_batch(choice), vocab, number))
        started = time.perf_counter()
        result = trainer.step(batch, number, training.writing)
        if on_gpu:
            torch.cuda.synchronize()
        seconds, loss = time.perf_counter() - started, reduce(result.metrics)["train/loss"]
        training.written()
        log.info("training step %d: %.2f s", number, seconds)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    together = gpu_gb()
    parts = None if peak is None or training.server_gb is None else training.server_gb + peak
    return StepFigures(
        sequences=choice.step_seqs,
        optimizer=choice.step_optimizer,
        seconds=round(seconds, 3),
        loss=loss,
        weights_gb=_rounded(before),
        peak_gb=_rounded(peak),
        server_gb=_rounded(training.server_gb),
        together_gb=_rounded(together),
        together_over_parts=None if parts is None or together is None else round(together / parts, 4),
    )


def _batch(choice: StepChoice) -> BatchChoice:
    return BatchChoice(
        seqs=choice.step_seqs, prompt_len=choice.step_prompt_len, completion_len=choice.step_completion_len
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
