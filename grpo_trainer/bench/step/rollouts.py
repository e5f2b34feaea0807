"""Synthetic rollouts: random tokens, groups of 8 with rewards that differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from grpo_trainer.bench.step.options import BatchChoice
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample

GROUP = 8
MEDIAN, SIGMA = 0.3, 0.7
"""Of log-normal lengths, relative to the longest."""
SHORTEST = 8


def completion_lengths(choice: BatchChoice, random: np.random.Generator) -> NDArray[np.int64]:
    """Of all sequences; one has the full length, so that padding to the longest is what it would be in training."""
    if not choice.lognormal:
        return np.full(choice.seqs, choice.completion_len)
    drawn = MEDIAN * choice.completion_len * np.exp(SIGMA * random.standard_normal(choice.seqs))
    lengths = np.clip(drawn.round().astype(np.int64), min(SHORTEST, choice.completion_len), choice.completion_len)
    lengths[lengths.argmax()] = choice.completion_len
    return lengths


def synthetic_batch(choice: BatchChoice, vocab: int, seed: int) -> RolloutBatch:
    """Return one step's rollouts, without logprobs: old logprobs are the trainer's own, as in an on-policy run."""
    random = np.random.default_rng(seed)
    lengths = completion_lengths(choice, random)
    groups = []
    for start in range(0, choice.seqs, GROUP):
        prompt = random.integers(0, vocab, choice.prompt_len)
        groups.append(
            Group(tuple(_sample(prompt, int(length), vocab, random) for length in lengths[start : start + GROUP]))
        )
    return RolloutBatch(f"synthetic-{seed}", tuple(groups))


def _sample(prompt: NDArray[np.int64], length: int, vocab: int, random: np.random.Generator) -> Sample:
    return Sample(
        tokens_T=np.concatenate([prompt, random.integers(0, vocab, length)]),
        trained_T=np.arange(len(prompt) + length) >= len(prompt),
        reward=float(random.random()),
    )
