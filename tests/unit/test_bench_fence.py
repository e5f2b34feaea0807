"""Whose answer one is: the pure half of `grpo bench fence`."""

from __future__ import annotations

import msgspec
import pytest
import torch

from grpo_trainer.bench.fence.patterns import (
    EXAMPLES,
    KNOWN,
    Quantiles,
    References,
    Verdicts,
    answer_of,
    distance,
    patterns_of,
    request,
    two_patterns,
)
from vllm_server.protocol import GenerateResponse

FIRST = [-1.0, -2.0]
SECOND = [-3.0, -0.5]
BARELY = [-1.02, -2.04]  # 0.03 from FIRST
REFERENCES = References.of([[FIRST, BARELY]], [[SECOND, SECOND]])


def test_distance_is_the_mean_over_all_tokens() -> None:
    assert distance(FIRST, SECOND) == pytest.approx((2.0 + 1.5) / 2)


def test_noise_is_that_of_answers_that_are_not_kept_and_says_what_is_allowed() -> None:
    assert REFERENCES.answers == ([[FIRST]], [[SECOND]])
    assert REFERENCES.own == pytest.approx([0.03, 0.0])
    assert REFERENCES.noise == pytest.approx(0.03)
    assert REFERENCES.spread == pytest.approx(1.75)
    assert REFERENCES.allowed == pytest.approx(1.75 / 20), "more than twice the noise, 0.06"
    assert REFERENCES.distinct
    noisy = References.of([[FIRST, [-1.2, -2.2]]], [[SECOND, SECOND]])
    assert noisy.allowed == pytest.approx(0.4) and noisy.distinct  # 3 * 0.4 < 1.75
    noisier = References.of([[FIRST, [-1.3, -2.3]]], [[SECOND, SECOND]])
    assert noisier.allowed == pytest.approx(0.6) and not noisier.distinct  # 3 * 0.6 > 1.75


def test_of_many_answers_a_few_from_beginning_to_end_are_kept() -> None:
    many = [[-1.0 - 0.001 * number] for number in range(10 * KNOWN)]
    references = References.of([many], [[[5.0], [5.0]]])
    assert references.answers[0] == [many[::10]]
    # from each kept one the next is 0.001 to 0.009 away, and from the other side as near; after the last there is none
    assert references.noise == pytest.approx(0.009)
    assert len(references.own) == 9 * KNOWN + 1


def test_an_answer_between_the_patterns_is_torn_and_one_of_the_wrong_version_misnamed() -> None:
    verdicts = Verdicts()
    verdicts.judge(REFERENCES, 0, FIRST, frozenset({0}))
    verdicts.judge(REFERENCES, 0, [-2.99, -0.51], frozenset({1}))
    assert (verdicts.answers, verdicts.torn, verdicts.misnamed, verdicts.spanning) == (2, 0, 0, 0)
    assert verdicts.distances == pytest.approx([0.0, 0.01])
    verdicts.judge(REFERENCES, 0, SECOND, frozenset({0}))
    verdicts.judge(REFERENCES, 0, [-2.0, -1.25], frozenset({0, 1}))
    verdicts.judge(REFERENCES, 0, SECOND, frozenset())
    assert (verdicts.answers, verdicts.torn, verdicts.misnamed, verdicts.spanning) == (5, 1, 1, 1)
    (torn,) = verdicts.examples
    assert torn.distances == pytest.approx((0.875, 0.875)) and torn.patterns == [0, 1]
    for _ in range(EXAMPLES):
        verdicts.judge(REFERENCES, 0, [0.0, 0.0], frozenset())
    assert verdicts.torn == 1 + EXAMPLES and len(verdicts.examples) == EXAMPLES
    assert verdicts.figures()["distance_max"] == pytest.approx(1.5)  # of [0, 0] from FIRST


def test_quantiles() -> None:
    assert Quantiles.of([float(number) for number in range(101)]) == Quantiles(50.0, 95.0, 99.0, 100.0)


def test_patterns_of_all_versions_that_may_have_answered() -> None:
    assert patterns_of(4, 4, even=0) == {0}
    assert patterns_of(4, 4, even=1) == {1}
    assert patterns_of(4, 5, even=0) == {0, 1}
    assert patterns_of(4, 6, even=0) == {0, 1}, "the one in between may have answered"
    assert patterns_of(4, 6, even=None) == frozenset()


def test_an_answer_is_read_with_its_versions() -> None:
    said = GenerateResponse(
        text=["a"], prompt=None, finish_reasons=["length"], policy_version=3, model="m", prompt_token_ids=[5, 7, 9],
        token_ids=[[8]], prompt_logprobs=[None, {7: -0.5}, {2: -0.1, 9: -1.5}],
    )  # fmt: skip
    assert answer_of(msgspec.json.encode(said), [5, 7, 9]) == ([-0.5, -1.5], 3, 3)
    later = msgspec.structs.replace(said, policy_version_end=5)
    assert answer_of(msgspec.json.encode(later), [5, 7, 9])[1:] == (3, 5)


def test_what_is_asked_is_one_forward_pass_of_the_prompt() -> None:
    asked = request([5, 7, 9])
    assert asked["max_tokens"] == 1 and asked["prompt_logprobs"] == 0


def test_the_second_pattern_differs_in_every_matrix_and_both_are_copies() -> None:
    weights = [torch.randn(8, 8), torch.ones(8)]
    first, second = two_patterns(weights)
    assert torch.equal(first[0], weights[0]) and torch.equal(second[1], weights[1])
    changed = (second[0] - first[0]).square().mean().sqrt() / weights[0].square().mean().sqrt()
    assert 0.3 < float(changed) < 0.7
    weights[0].zero_()
    assert first[0].any()
