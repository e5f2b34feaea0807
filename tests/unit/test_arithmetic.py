"""The arithmetic task: pure functions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.arithmetic import Problem, ProblemSet, reward


@pytest.mark.parametrize(
    ("problem", "prompt", "answer"),
    [
        (Problem(12, 34), "12+34=", "46"),
        (Problem(12, 34, "-"), "12-34=", "-22"),
        (Problem(7, 8, "*"), "7*8=", "56"),
    ],
)
def test_prompt_and_answer(problem: Problem, prompt: str, answer: str) -> None:
    assert (problem.prompt, problem.answer) == (prompt, answer)


@pytest.mark.parametrize(
    ("completion", "worth"),
    [("46", 1.0), (" 46\n", 1.0), ("46 ", 1.0), ("", 0.0), ("45", 0.0), ("046", 0.0), ("46.", 0.0), ("46 46", 0.0)],
)
def test_only_the_exact_answer_is_rewarded(completion: str, worth: float) -> None:
    assert reward(Problem(12, 34), completion) == worth


def test_a_hidden_special_token_is_not_the_answer() -> None:
    assert reward(Problem(12, 34), "<|pad|>46") == 0.0


@given(st.integers(-50, 50), st.integers(3, 12), st.sampled_from(["+", "-", "*"]))
def test_every_pair_is_in_exactly_one_part(low: int, width: int, operation: str) -> None:
    problems = ProblemSet.of(low, low + width, operation)  # type: ignore[arg-type]
    pairs = [(problem.left, problem.right) for problem in problems.train + problems.held_out]
    operands = range(low, low + width + 1)
    assert sorted(pairs) == [(left, right) for left in operands for right in operands]
    assert {problem.operation for problem in problems.train + problems.held_out} == {operation}


def test_the_split_is_the_same_every_time() -> None:
    first = ProblemSet.of(10, 49)
    assert first == ProblemSet.of(10, 49)
    assert (len(first.train), len(first.held_out)) == (1440, 160)  # 40 * 40 pairs, a tenth held out


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [(5, 4, ["5", "4"]), (5, 5, ["5", "5", "1", "0.1"])],  # one problem, of which a share is to be held out
)
def test_an_empty_range_is_refused(low: int, high: int, numbers: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ProblemSet.of(low, high)
    assert re.findall(r"[\d.]+", str(error.value)) == numbers
