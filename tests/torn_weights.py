"""Whether a server ever answers with half-written weights.

Two patterns of weights are written in turn, each within a fence, while requests run. Every judged answer is one forward
pass over a prompt, and must be what one of the two patterns answers: a mixture of both says something else.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.bench.load import Demand, generating
from grpo_trainer.bench.models import SHAPES
from grpo_trainer.bench.publish import Publisher
from vllm_server.protocol import GENERATE_ROUTE, GenerateResponse

PROMPTS, PROMPT_TOKENS = 8, 24
LEAST_REFERENCES = 4
"""Answers of each pattern to each prompt; half of them are kept to compare others with."""
LEAST_ANSWERS = 24
"""Judged answers during writes within a fence."""
NOISE_MARGIN = 2.0
"""Factor for the largest distance among answers of one pattern, of which only a sample is compared."""
FINENESS = 20.0
"""An answer this part of the way from one pattern to the other, or less, is the pattern's."""
ROOM = 3.0
"""Times what is allowed, from one pattern to the other: between them lies what is neither's."""
RELATIVE_CHANGE = 0.5
"""Of each matrix, from one pattern to the other."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """One forward pass over a prompt."""

    prompt: int
    versions: tuple[int, int]
    """At the answer's start and end."""
    logprobs_T: Floats
    """Of the prompt's tokens but the first. The mean over many positions has less rounding than any single one."""


@dataclass(frozen=True)
class Found:
    """What the answers during the writes said; distances are the mean |difference| of logprobs, in nats a token."""

    writes: int
    answers: int
    torn: int
    """Answers that neither pattern gives."""
    misnamed: int
    """Answers of a pattern, but of none of the versions that the answer names."""
    farthest: float
    """From the nearest pattern."""
    allowed: float
    """The largest distance of an answer that is one of a pattern."""
    spread: float
    """The smallest distance between the two patterns' answers to a prompt."""


@dataclass(frozen=True)
class Judge:
    """What a server under load answers with each of two patterns of weights, to which later answers are compared."""

    publisher: Publisher
    prompts: Sequence[Sequence[int]]
    patterns: Sequence[Sequence[Tensor]]
    known: Sequence[Sequence[Floats]]
    """Of each pattern and prompt some answers [answer, token]."""
    allowed: float
    spread: float
    """See `Found`."""

    def find(self, *, writes: int, fenced: bool) -> Found:
        """Write the two patterns in turn, and judge the answers meanwhile.

        Args:
            writes: the number of writes; without a fence at most, since the first torn answer ends them. With a fence
                there are more of them until `LEAST_ANSWERS` were judged.
        """
        distances: list[tuple[float, float]] = []
        first, written, is_torn = self.publisher.version + 1, 0, threading.Event()

        def judge(answer: Answer) -> None:
            one, other = (_nearest(answer.logprobs_T, pattern[answer.prompt]) for pattern in self.known)
            distances.append((one, other))
            if min(one, other) > self.allowed:
                is_torn.set()

        with _asking(self.publisher.config.server.url, self.prompts, judge=judge) as answers:
            while (written < writes or (fenced and len(distances) < LEAST_ANSWERS)) and (
                fenced or not is_torn.is_set()
            ):
                pattern = self.patterns[written % 2]
                if fenced:
                    self.publisher.write(lambda pattern=pattern: _copy(self.publisher.weights, pattern))
                else:
                    _copy(self.publisher.weights, pattern)
                written += 1
        misnamed = 0
        for answer, (one, other) in zip(answers, distances, strict=True):
            begun, ended = answer.versions
            may = {(version - first) % 2 for version in range(begun, ended + 1)}
            misnamed += fenced and min(one, other) <= self.allowed and int(other < one) not in may
        least = [min(pair) for pair in distances]
        torn = sum(distance > self.allowed for distance in least)
        return Found(written, len(least), torn, misnamed, max(least, default=math.nan), self.allowed, self.spread)


@contextmanager
def judging(publisher: Publisher, concurrency: int = 16) -> Iterator[Judge]:
    """Keep a server busy within the block, and learn what it answers with each of two patterns.

    Args:
        concurrency: sequences in flight beside those that are judged.
    """
    vocab, url = SHAPES[publisher.options.shape].vocab, publisher.config.server.url
    draw = random.Random(0)
    prompts = [draw.choices(range(2, vocab), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
    patterns = _two_patterns(publisher.weights)
    with generating(Demand(url, concurrency, PROMPT_TOKENS, 64, vocab, {})):
        known: list[list[Floats]] = []
        noise = 0.0
        for pattern in patterns:
            publisher.write(lambda pattern=pattern: _copy(publisher.weights, pattern))
            # Each further write repeats the present pattern, so these answers are right; they differ by rounding, which
            # depends on the batch.
            with _asking(url, prompts, LEAST_REFERENCES) as answers:
                until = time.perf_counter() + 1.0
                while time.perf_counter() < until:
                    publisher.write(lambda pattern=pattern: _copy(publisher.weights, pattern))
            by_prompt = [[each.logprobs_T for each in answers if each.prompt == number] for number in range(PROMPTS)]
            known.append([np.array(several[::2]) for several in by_prompt])
            noise = max(noise, *(_nearest(one, known[-1][i]) for i, each in enumerate(by_prompt) for one in each[1::2]))
        spread = min(_nearest(answer, b) for a, b in zip(*known, strict=True) for answer in a)
        allowed = max(NOISE_MARGIN * noise, spread / FINENESS)
        assert ROOM * allowed <= spread, f"the patterns are {spread} apart, answers of one pattern {noise}"
        yield Judge(publisher, prompts, patterns, known, allowed, spread)


@contextmanager
def _asking(
    url: str, prompts: Sequence[Sequence[int]], least: int = 0, judge: Callable[[Answer], None] = lambda answer: None
) -> Iterator[list[Answer]]:
    """Send requests during the block, and afterwards until each prompt has `least` answers.

    A request for prompt logprobs does not use the prefix cache, so all logprobs are of one pass.
    """
    answers: list[Answer] = []
    stop, lock = threading.Event(), threading.Lock()
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True, "seed": 0}

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=300.0, trust_env=False) as http:
            while not (stop.is_set() and all(counts[each] >= least for each in range(PROMPTS))):
                number = (number + 1) % len(prompts)
                prompt = prompts[number]
                body = {"prompt": {"prompt_token_ids": prompt}, **sampling}
                content = http.post(GENERATE_ROUTE, json=body).raise_for_status().content
                response = msgspec.json.decode(content, type=GenerateResponse)
                assert response.prompt_logprobs is not None
                end = response.policy_version_end
                later = zip(prompt[1:], response.prompt_logprobs[1:], strict=True)
                logprobs_T = np.array([entry[token] for token, entry in later if entry is not None])
                versions = response.policy_version, response.policy_version if end is None else end
                with lock:
                    answers.append(Answer(number, versions, logprobs_T))
                    counts[number] += 1
                    judge(answers[-1])

    counts = [0] * len(prompts)
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        try:
            while not answers and not any(each.done() for each in asking):
                time.sleep(0.01)
            yield answers
        finally:
            stop.set()
    for each in asking:
        each.result()


def _two_patterns(weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the present weights, and a second set that differs in every matrix; both are copies."""
    first = [weight.clone() for weight in weights]
    second = []
    for index, weight in enumerate(first):
        other = weight.clone()
        if weight.ndim >= 2:
            generator = torch.Generator(weight.device).manual_seed(index)
            noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
            other += noise.mul_(RELATIVE_CHANGE * float(weight.float().square().mean().sqrt()))
        second.append(other)
    return first, second


def _nearest(answer_T: Floats, known_KT: Floats) -> float:
    return float(np.abs(known_KT - answer_T).mean(axis=1).min())


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
