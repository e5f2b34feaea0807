"""Whose answer one is: the pure half of `grpo bench fence`."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from grpo_trainer.bench.fence.asking import Answer, answer_of, request
from grpo_trainer.bench.fence.patterns import (
    EXAMPLES,
    KNOWN,
    References,
    Verdicts,
    nearest,
    patterns_of,
    quantiles,
    two_patterns,
)
from vllm_server.protocol import GenerateResponse

FIRST = [-1.0, -2.0]
SECOND = [-3.0, -0.5]
BARELY = [-1.02, -2.04]  # 0.03 from FIRST


def heard(*answers: list[float]) -> list[Answer]:
    """Answers to one prompt."""
    return [Answer(0, 0, 0, logprobs) for logprobs in answers]


REFERENCES = References.of(heard(FIRST, BARELY), heard(SECOND, SECOND))


def test_distance_is_the_mean_over_all_tokens_to_the_nearest() -> None:
    assert nearest(np.array(FIRST), np.array([SECOND])) == pytest.approx((2.0 + 1.5) / 2)
    assert nearest(np.array(FIRST), np.array([SECOND, BARELY])) == pytest.approx(0.03)


def test_noise_is_that_of_answers_that_are_not_kept_and_says_what_is_allowed() -> None:
    assert [known[0].tolist() for known in REFERENCES.answers] == [[FIRST], [SECOND]]
    assert REFERENCES.own == pytest.approx([0.03, 0.0])
    assert REFERENCES.noise == pytest.approx(0.03)
    assert REFERENCES.spread == pytest.approx(1.75)
    assert REFERENCES.allowed == pytest.approx(1.75 / 20), "more than twice the noise, 0.06"
    assert REFERENCES.distinct
    noisy = References.of(heard(FIRST, [-1.2, -2.2]), heard(SECOND, SECOND))
    assert noisy.allowed == pytest.approx(0.4) and noisy.distinct  # 3 * 0.4 < 1.75
    noisier = References.of(heard(FIRST, [-1.3, -2.3]), heard(SECOND, SECOND))
    assert noisier.allowed == pytest.approx(0.6) and not noisier.distinct  # 3 * 0.6 > 1.75


def test_of_many_answers_a_few_from_beginning_to_end_are_kept() -> None:
    many = [[-1.0 - 0.001 * number] for number in range(10 * KNOWN)]
    references = References.of(heard(*many), heard([5.0], [5.0]))
    assert references.answers[0][0].tolist() == many[::10]
    # from each kept one the next is 0.001 to 0.009 away, and from the other side as near; after the last there is none
    assert references.noise == pytest.approx(0.009)
    assert len(references.own) == 9 * KNOWN + 1


def test_an_answer_between_the_patterns_is_torn_and_one_of_the_wrong_version_misnamed() -> None:
    verdicts = Verdicts()

    def judge(logprobs: list[float], begun: int, ended: int, even: int | None = 0) -> None:
        verdicts.judge(REFERENCES, Answer(0, begun, ended, logprobs), even)

    def counts() -> list[int]:
        return [verdicts.figures()[name] for name in ("answers", "torn", "misnamed", "spanning")]

    judge(FIRST, 4, 4)
    judge([-2.99, -0.51], 5, 5)
    assert counts() == [2, 0, 0, 0]
    assert verdicts.distances == pytest.approx([0.0, 0.01])
    judge(SECOND, 4, 4)
    judge([-2.0, -1.25], 4, 5)
    judge(SECOND, 4, 4, even=None)
    assert counts() == [5, 1, 1, 1]
    (torn,) = verdicts.examples
    assert torn.distances == pytest.approx((0.875, 0.875)) and torn.patterns == [0, 1]
    for _ in range(EXAMPLES):
        judge([0.0, 0.0], 4, 4)
    assert verdicts.torn == 1 + EXAMPLES and len(verdicts.examples) == EXAMPLES
    assert verdicts.figures()["distance_max"] == pytest.approx(1.5)  # of [0, 0] from FIRST


def test_quantiles() -> None:
    found = quantiles([float(number) for number in range(101)])
    assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


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
    assert answer_of(msgspec.json.encode(said), 8, [5, 7, 9]) == Answer(8, 3, 3, [-0.5, -1.5])
    later = msgspec.structs.replace(said, policy_version_end=5)
    assert answer_of(msgspec.json.encode(later), 8, [5, 7, 9]) == Answer(8, 3, 5, [-0.5, -1.5])


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
