"""Two sets of weights (patterns), and the comparison of an answer with those of each. The second half is pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor

from grpo_trainer.bench.sync.figures import percentile
from vllm_server.protocol import GenerateResponse

NOISE_MARGIN = 2.0
"""Times the largest distance among answers of one pattern, of which far fewer are looked at than are judged."""

FINENESS = 20.0
"""An answer this part of the way from one pattern to the other, or less, is the pattern's."""

ROOM = 3.0
"""Times what is allowed, from one pattern to the other: between them lies what is neither's."""

KNOWN = 8
"""Answers of a pattern to a prompt that others are held against, at most."""

EXAMPLES = 3
"""Torn answers that are told in full."""

RELATIVE_CHANGE = 0.5
"""Of each matrix, from one pattern to the other."""

Answer = list[float]
"""Logprobs of a prompt's tokens, but the first. The mean over many positions has less rounding than any single one."""

Heard = list[list[Answer]]
"""Answers to each prompt, in the order in which they came."""


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


def request(prompt: Sequence[int]) -> dict[str, Any]:
    """Return a request for one forward pass over the prompt.

    A request for prompt logprobs does not use the prefix cache, so all logprobs are of one pass. Only a prompt that is
    split for lack of room (`max_num_batched_tokens`) would need two.
    """
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True, "seed": 0}
    return {"prompt": {"prompt_token_ids": list(prompt)}, **sampling}


def answer_of(body: bytes, prompt: Sequence[int]) -> tuple[Answer, int, int]:
    """The logprobs in an answer, and the policy versions at its start and end."""
    response = msgspec.json.decode(body, type=GenerateResponse)
    assert response.prompt_logprobs is not None, "asked with prompt_logprobs"
    told = zip(prompt[1:], response.prompt_logprobs[1:], strict=True)
    end = response.policy_version if response.policy_version_end is None else response.policy_version_end
    return [entry[token] for token, entry in told if entry is not None], response.policy_version, end


def distance(one: Answer, other: Answer) -> float:
    """Return the mean |difference| of the logprobs, in nats a token."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@dataclass(frozen=True)
class Quantiles:
    """Of distances, in nats a token."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, distances: Sequence[float]) -> Quantiles:
        return cls(*(percentile(distances, part) for part in (0.5, 0.95, 0.99, 1.0)))


@dataclass(frozen=True)
class References:
    """What each pattern answers to each prompt.

    Attributes:
        answers: by pattern, by prompt: several answers, which differ by rounding; that depends on what else is in a
            batch.
        own: distances of other answers of each pattern from the nearest of its `answers`.
    """

    answers: tuple[Heard, Heard]
    own: Sequence[float]

    @classmethod
    def of(cls, first: Heard, second: Heard) -> References:
        """Of answers while the server had nothing but one pattern; each prompt has two or more.

        Every second one, or every n-th of many, is kept to hold others against; the rest says how far those may be.
        """
        known: list[Heard] = []
        own: list[float] = []
        for heard in (first, second):
            steps = [max(2, -(-len(several) // KNOWN)) for several in heard]
            known.append([several[::step] for several, step in zip(heard, steps, strict=True)])
            for kept, several, step in zip(known[-1], heard, steps, strict=True):
                own += [nearest(answer, kept) for index, answer in enumerate(several) if index % step]
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

    def distances(self, prompt: int, answer: Answer) -> tuple[float, float]:
        """From what each of the patterns answers."""
        first, second = (nearest(answer, pattern[prompt]) for pattern in self.answers)
        return first, second


def nearest(answer: Answer, known: Sequence[Answer]) -> float:
    """Return the distance from the nearest of them."""
    return min(distance(answer, other) for other in known)


def patterns_of(begun: int, ended: int, even: int | None) -> frozenset[int]:
    """Those of the versions from one to the other: the one forward pass was made by any of them.

    Args:
        even: the pattern of versions of even number; None: not known, then nothing is said.
    """
    return frozenset() if even is None else frozenset((version + even) % 2 for version in range(begun, ended + 1))


@dataclass(frozen=True)
class Torn:
    """An answer that no pattern gives; `distances` from each, in nats a token."""

    prompt: int
    patterns: list[int]
    distances: tuple[float, float]
    answer: Answer


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

    @property
    def answers(self) -> int:
        return len(self.distances)

    def judge(self, references: References, prompt: int, answer: Answer, patterns: frozenset[int]) -> None:
        """Count an answer.

        Args:
            patterns: those of the versions that the answer says it is of, 0 or 1; two if an update came in between;
                none: not known.
        """
        distances = references.distances(prompt, answer)
        least = min(distances)
        self.distances.append(least)
        self.spanning += len(patterns) > 1
        if least > references.allowed:
            self.torn += 1
            if len(self.examples) < EXAMPLES:
                self.examples.append(Torn(prompt, sorted(patterns), distances, answer))
            return
        self.misnamed += bool(patterns) and distances.index(least) not in patterns

    def figures(self) -> dict[str, Any]:
        """Return the figures to report."""
        counts = {name: getattr(self, name) for name in ("answers", "torn", "misnamed", "spanning")}
        quantiles = asdict(Quantiles.of(self.distances)) if self.distances else {}
        return counts | {f"distance_{name}": value for name, value in quantiles.items()}
