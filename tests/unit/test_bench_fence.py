"""Whose answer one is: the pure half of `grpo bench fence`."""

from __future__ import annotations

import msgspec
import pytest
import torch

from grpo_trainer.bench.fence.patterns import (
    References,
    Verdicts,
    answer_of,
    distance,
    patterns_of,
    two_patterns,
)
from vllm_server.protocol import GenerateResponse

FIRST = {1: -1.0, 2: -2.0}
SECOND = {1: -3.0, 2: -0.5}
KNOWN = References(([[FIRST, {1: -1.01, 2: -2.01}]], [[SECOND, SECOND]]))


def test_distance_is_the_mean_over_all_tokens_that_are_named() -> None:
    assert distance(FIRST, SECOND) == pytest.approx((2.0 + 1.5) / 2)
    # 3 is less likely than all that FIRST names: there it counts as FIRST's least, -2
    assert distance(FIRST, {1: -1.0, 3: -1.5}) == pytest.approx((0.0 + abs(-2.0 + 1.5) + abs(-2.0 + 1.5)) / 3)


def test_noise_spread_and_what_is_allowed() -> None:
    assert KNOWN.noise == pytest.approx(0.01)
    assert KNOWN.spread == pytest.approx(1.75)
    assert KNOWN.allowed == pytest.approx(1.75 / 20)
    assert KNOWN.distinct
    noisy = References(([[FIRST, {1: -1.2, 2: -2.2}]], [[SECOND]]))
    assert noisy.allowed == pytest.approx(0.8) and not noisy.distinct


def test_an_answer_between_the_patterns_is_torn_and_one_of_the_wrong_version_misnamed() -> None:
    verdicts = Verdicts()
    verdicts.judge(KNOWN, 0, FIRST, frozenset({0}))
    verdicts.judge(KNOWN, 0, {1: -2.99, 2: -0.51}, frozenset({1}))
    assert (verdicts.answers, verdicts.torn, verdicts.misnamed, verdicts.spanning) == (2, 0, 0, 0)
    assert verdicts.worst == pytest.approx(0.01)
    verdicts.judge(KNOWN, 0, SECOND, frozenset({0}))
    verdicts.judge(KNOWN, 0, {1: -2.0, 2: -1.25}, frozenset({0, 1}))
    verdicts.judge(KNOWN, 0, SECOND, frozenset())
    assert (verdicts.answers, verdicts.torn, verdicts.misnamed, verdicts.spanning) == (5, 1, 1, 1)


def test_patterns_of_all_versions_that_may_have_answered() -> None:
    assert patterns_of(4, 4, even=0) == {0}
    assert patterns_of(4, 4, even=1) == {1}
    assert patterns_of(4, 5, even=0) == {0, 1}
    assert patterns_of(4, 6, even=0) == {0, 1}, "the one in between may have answered"
    assert patterns_of(4, 6, even=None) == frozenset()


def test_an_answer_is_read_with_its_versions() -> None:
    said = GenerateResponse(
        text=["a"], prompt=None, finish_reasons=["length"], policy_version=3, model="m", prompt_token_ids=[5],
        token_ids=[[7]], logprobs=[[[{7: -0.5, 9: -1.5}]]],
    )  # fmt: skip
    assert answer_of(msgspec.json.encode(said)) == ({7: -0.5, 9: -1.5}, 3, 3)
    later = msgspec.structs.replace(said, policy_version_end=5)
    assert answer_of(msgspec.json.encode(later))[1:] == (3, 5)


def test_the_second_pattern_differs_in_every_matrix_and_both_are_copies() -> None:
    weights = [torch.randn(8, 8), torch.ones(8)]
    first, second = two_patterns(weights)
    assert torch.equal(first[0], weights[0]) and torch.equal(second[1], weights[1])
    changed = (second[0] - first[0]).square().mean().sqrt() / weights[0].square().mean().sqrt()
    assert 0.3 < float(changed) < 0.7
    weights[0].zero_()
    assert first[0].any()
