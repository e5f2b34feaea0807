"""Two sets of weights (patterns), and the comparison of answers with those of each. The second half is pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.bench.fence.asking import Answer

NOISE_MARGIN = 2.0
"""Factor for the largest distance among answers of one pattern, of which only a sample is compared."""

FINENESS = 20.0
"""An answer this part of the way from one pattern to the other, or less, is the pattern's."""

ROOM = 3.0
"""Times what is allowed, from one pattern to the other: between them lies what is neither's."""

KNOWN = 8
"""Answers of a pattern to a prompt that others are compared with, at most."""

EXAMPLES = 3
"""Torn answers that are reported in full."""

RELATIVE_CHANGE = 0.5
"""Of each matrix, from one pattern to the other."""

Floats = NDArray[np.float64]


def two_patterns(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The present weights, and a second set that differs in every matrix; both are copies."""
    first = [parameter.clone() for parameter in parameters]
    second = []
    for index, weight in enumerate(first):
        other = weight.clone()
        if weight.ndim >= 2:
            generator = torch.Generator(weight.device).manual_seed(index)
            noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
            other += noise.mul_(RELATIVE_CHANGE * float(weight.float().square().mean().sqrt()))
        second.append(other)
    return first, second


def nearest(answer_T: Floats, known_KT: Floats) -> float:
    """Return the distance from the nearest known answer: the mean |difference| of the logprobs, in nats a token."""
    return float(np.abs(known_KT - answer_T).mean(axis=1).min())


def quantiles(distances: Sequence[float]) -> dict[str, float]:
    values = np.quantile(distances, (0.5, 0.95, 0.99, 1.0)).tolist()
    return dict(zip(("p50", "p95", "p99", "max"), values, strict=True))


@dataclass(frozen=True)
class References:
    """What each pattern answers to each prompt.

    Attributes:
        answers: by pattern, by prompt: several answers `[K, T]`, which differ by rounding; that depends on what else is
            in a batch.
        own: distances of other answers of each pattern from the nearest of its `answers`.
    """

    answers: tuple[Sequence[Floats], Sequence[Floats]]
    own: Sequence[float]

    @classmethod
    def of(cls, first: Iterable[Answer], second: Iterable[Answer]) -> References:
        """Of answers while the server had nothing but one pattern; each prompt has two or more.

        Every second one, or every n-th of many, is kept to compare others with; the rest says how far those may be.
        """
        known: list[list[Floats]] = []
        own: list[float] = []
        for answers in (first, second):
            by_prompt: dict[int, list[list[float]]] = {}
            for answer in answers:
                by_prompt.setdefault(answer.prompt, []).append(answer.logprobs)
            known.append([])
            for _, several in sorted(by_prompt.items()):
                step = max(2, -(-len(several) // KNOWN))
                known[-1].append(np.array(several[::step]))
                own += [nearest(np.array(one), known[-1][-1]) for i, one in enumerate(several) if i % step]
        return cls((known[0], known[1]), own)

    @cached_property
    def noise(self) -> float:
        """Largest distance of an answer of a pattern from the nearest other answer of the same pattern."""
        return max(self.own)

    @cached_property
    def spread(self) -> float:
        """Smallest distance between the two patterns' answers to a prompt."""
        return min(nearest(answer, b) for a, b in zip(*self.answers, strict=True) for answer in a)

    @cached_property
    def allowed(self) -> float:
        """Largest allowed distance of an answer from the nearest answer of its pattern."""
        return max(NOISE_MARGIN * self.noise, self.spread / FINENESS)

    @property
    def distinct(self) -> bool:
        """Whether an answer can't be both patterns' within what is allowed, with room for mixtures between them."""
        return ROOM * self.allowed <= self.spread


def patterns_of(begun: int, ended: int, even: int | None) -> frozenset[int]:
    """Those of the versions from one to the other: the one forward pass was made by any of them.

    Args:
        even: the pattern of versions of even number; None: not known, then nothing is said.
    """
    return frozenset() if even is None else frozenset((version + even) % 2 for version in range(begun, ended + 1))


@dataclass(frozen=True)
class Torn:
    """An answer that no pattern gives; `distances` from each, in nats a token."""

    answer: Answer
    patterns: list[int]
    distances: tuple[float, float]


@dataclass
class Verdicts:
    """Counts of answers that were judged.

    Attributes:
        torn: no pattern answers so.
        misnamed: a pattern answers so, but not the one of the version that the answer names.
        spanning: the answer names more than one version, so that either pattern may have given it.
        distances: of each answer from the nearest pattern, in nats a token.
        examples: the first torn ones.
    """

    torn: int = 0
    misnamed: int = 0
    spanning: int = 0
    distances: list[float] = field(default_factory=list)
    examples: list[Torn] = field(default_factory=list)

    def judge(self, references: References, answer: Answer, even: int | None) -> None:
        """Count an answer.

        Args:
            even: the pattern of versions of even number; None: not known.
        """
        patterns = patterns_of(answer.begun, answer.ended, even)
        first, second = (nearest(np.array(answer.logprobs), known[answer.prompt]) for known in references.answers)
        least = min(first, second)
        self.distances.append(least)
        self.spanning += len(patterns) > 1
        if least > references.allowed:
            self.torn += 1
            if len(self.examples) < EXAMPLES:
                self.examples.append(Torn(answer, sorted(patterns), (first, second)))
            return
        self.misnamed += bool(patterns) and int(second < first) not in patterns

    def figures(self) -> dict[str, Any]:
        counts = {"answers": len(self.distances), **{n: getattr(self, n) for n in ("torn", "misnamed", "spanning")}}
        spread = quantiles(self.distances) if self.distances else {}
        return counts | {f"distance_{name}": value for name, value in spread.items()}
