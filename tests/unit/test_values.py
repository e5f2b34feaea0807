"""Numbers and ranges as flags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.config.values import format_ranges, parse_ranges
from grpo_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,28-31", (0, 1, 2, 3, 28, 29, 30, 31)), ("5", (5,)), (" 7, 1-2 ,2", (1, 2, 7)), ("3-3", (3,))],
)
def test_numbers_and_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text) == numbers


@given(st.sets(st.integers(0, 200), min_size=1))
def test_what_is_written_is_read_back(numbers: set[int]) -> None:
    text = format_ranges(numbers)
    assert parse_ranges(text) == tuple(sorted(numbers))
    assert format_ranges(parse_ranges(text)) == text


@pytest.mark.parametrize(
    ("text", "got"),
    [
        *(("", "nothing"), ("1,,2", "nothing"), ("0,a", "a"), ("3-", "3-"), ("-3", "-3"), ("4-2", "4-2")),
        *(("1.5", "1.5"), ("0-99999", "0-99999")),
    ],
)
def test_anything_else_is_refused(text: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_ranges(text)
    assert error.value.got == got and "0-3,28-31" in error.value.wanted
