"""The work of a step: synthetic rollouts, and their floating-point operations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from grpo_trainer.bench.step.options import BatchChoice
from grpo_trainer.config.bridge import ALL_LINEAR
from grpo_trainer.doctor.model import ModelShape
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
    """Return one step's rollouts: random tokens, groups of 8 with rewards that differ.

    They have no logprobs: old logprobs are the trainer's own, as in an on-policy run.
    """
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


def lengths_of(batch: RolloutBatch) -> list[tuple[int, int]]:
    """Return the tokens of each sequence's prompt and completion."""
    samples = [sample for group in batch.groups for sample in group.samples]
    return [(int((~sample.trained_T).sum()), int(sample.trained_T.sum())) for sample in samples]


def step_flops(shape: ModelShape, lengths: Iterable[tuple[int, int]], lora_r: int, *, readers: int = 1) -> float:
    """Return the operations of the model's own arithmetic, without recomputation.

    A product with a matrix of n elements is 2n operations a token forward; as many backward for the gradient of its
    input, and as many for its own unless it is frozen.

    * layers: 6 n for each token, 4 n if frozen (LoRA), and 6 n of the adapter;
    * head: the same, for trained tokens only, and its own is frozen with LoRA;
    * attention: 2 products of heads x head size for each pair of tokens that sees one another, t (t + 1) / 2 of t
      tokens, forward, and twice that backward.

    Args:
        lengths: tokens of each sequence's prompt and completion.
        readers: sequences that have one prompt, computed once for all of them.
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
