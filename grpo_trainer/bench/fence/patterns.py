"""Two sets of weights, what the server answers with each, and whose answer one is. The second half is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm_server.protocol import GenerateResponse

TOP = 20
"""Likeliest tokens that an answer tells the logprobs of: as many as vLLM tells unless asked for more."""

NOISE_MARGIN = 4.0
"""Answers of one pattern differ among themselves by rounding, which depends on what else is in a batch."""

FINENESS = 20.0
"""An answer this part of the way from one pattern to the other, or less, is the pattern's."""

RELATIVE_CHANGE = 0.5
"""Of each matrix, from one pattern to the other."""

Answer = dict[int, float]
"""Logprobs of the likeliest tokens, by token id."""


def two_patterns(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The present weights, and others that differ from them in every matrix; both are copies."""
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
    """One forward pass: the prompt's, whose last position decides about one token."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": TOP, "ignore_eos": True, "seed": 0}
    return {"prompt": {"prompt_token_ids": list(prompt)}, **sampling}


def answer_of(body: bytes) -> tuple[Answer, int, int]:
    """The logprobs in an answer of the server, and the versions that it began and ended with."""
    response = msgspec.json.decode(body, type=GenerateResponse)
    assert response.logprobs is not None
    (entry,) = response.logprobs[0][0]
    end = response.policy_version if response.policy_version_end is None else response.policy_version_end
    return {int(token): float(value) for token, value in entry.items()}, response.policy_version, end


def distance(one: Answer, other: Answer) -> float:
    """Mean |difference| of the logprobs, in nats; a token that only one of them names counts with the least that the
    other says of any."""
    floors = min(one.values()), min(other.values())
    tokens = one.keys() | other.keys()
    return sum(abs(one.get(t, floors[0]) - other.get(t, floors[1])) for t in tokens) / len(tokens)


@dataclass(frozen=True)
class References:
    """What each pattern answers to each prompt.

    Attributes:
        answers: by pattern, by prompt: several answers, which differ by rounding.
    """

    answers: tuple[Sequence[Sequence[Answer]], Sequence[Sequence[Answer]]]

    @property
    def noise(self) -> float:
        """How far two answers of one pattern are from each other, at most."""
        return max(
            distance(several[0], other) for pattern in self.answers for several in pattern for other in several[1:]
        )

    @property
    def spread(self) -> float:
        """How far the two patterns' answers to a prompt are from each other, at least."""
        return min(distance(a[0], b[0]) for a, b in zip(*self.answers, strict=True))

    @property
    def allowed(self) -> float:
        """How far from the answer of a pattern one of it may be."""
        return max(NOISE_MARGIN * self.noise, self.spread / FINENESS)

    @property
    def distinct(self) -> bool:
        """Whether an answer can't be both patterns' within what is allowed, with room for mixtures between them."""
        return 4 * self.allowed <= self.spread

    def distances(self, prompt: int, answer: Answer) -> tuple[float, float]:
        """From what each of the patterns answers."""
        first, second = (min(distance(answer, known) for known in pattern[prompt]) for pattern in self.answers)
        return first, second


def patterns_of(begun: int, ended: int, even: int | None) -> frozenset[int]:
    """Those of the versions from one to the other: the one forward pass was made by any of them.

    Args:
        even: the pattern of versions of even number; None: not known, then nothing is said.
    """
    return frozenset() if even is None else frozenset((version + even) % 2 for version in range(begun, ended + 1))


@dataclass
class Verdicts:
    """Counts of answers that were judged.

    Attributes:
        torn: no pattern answers so.
        misnamed: a pattern answers so, but not the one of the version that the answer names.
        worst: the largest distance of an answer that was not torn.
    """

    answers: int = 0
    torn: int = 0
    misnamed: int = 0
    spanning: int = 0
    worst: float = 0.0

    def judge(self, references: References, prompt: int, answer: Answer, patterns: frozenset[int]) -> None:
        """Count an answer.

        Args:
            patterns: those of the versions that the answer says it is of, 0 or 1; two if an update came in between;
                none: not known.
        """
        distances = references.distances(prompt, answer)
        nearest = min(distances)
        self.answers += 1
        self.spanning += len(patterns) > 1
        if nearest > references.allowed:
            self.torn += 1
            return
        self.worst = max(self.worst, nearest)
        self.misnamed += bool(patterns) and distances.index(nearest) not in patterns

    def as_dict(self) -> Mapping[str, float]:
        return dict(vars(self))
