"""How errors read: the one place where their wording is asserted."""

from __future__ import annotations

import pytest

from grpo_common.errors import Problem, UserError
from grpo_trainer.errors import PortBusyError


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (
            Problem(field="--dtype", got="int8", wanted="float32 or bfloat16", fix="use --dtype auto"),
            "--dtype: got int8, wanted float32 or bfloat16; use --dtype auto",
        ),
        (
            Problem(field="--sharding", got="full", fix="use --sharding none", summary="supports no reference model"),
            "--sharding: supports no reference model; got full; use --sharding none",
        ),
        (Problem(field="seed", wanted="a number"), "seed: wanted a number"),
        (Problem(summary="the server was killed by SIGKILL"), "the server was killed by SIGKILL"),
    ],
)
def test_a_problem_in_words(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_an_error_carries_its_parts_and_reads_as_its_problem() -> None:
    error = UserError(field="--port", got=80, wanted="1024 or more", fix="choose another")
    assert (error.field, error.got, error.wanted, error.fix) == ("--port", "80", "1024 or more", "choose another")
    assert str(error) == str(error.problems[0])


def test_several_problems_are_a_line_each() -> None:
    first, second = Problem(field="a", got="1", wanted="2"), Problem(field="b", summary="unknown")
    error = UserError.of([first, second])
    assert error.problems == (first, second) and error.field == "a"
    assert str(error).splitlines() == [str(first), str(second)]


def test_an_error_of_the_operating_system_takes_its_parts_as_well() -> None:
    error = PortBusyError(field="--port", got=80, fix="choose another")
    assert isinstance(error, OSError) and error.got == "80" and str(error) == "--port: got 80; choose another"
