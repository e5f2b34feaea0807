"""Foreign text on a terminal or in a log."""

from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_common.text import Lines, PrintableFormatter, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain — ünïcode 漢字 🙂\t|", "plain — ünïcode 漢字 🙂\t|"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\r\x00", "a\\nb\\r\\x00"),
        ("\u202eevil", "\\u202eevil"),
        ("\x9b31m", "\\x9b31m"),
        ("\udcff", "\\udcff"),
    ],
    ids=["kept", "escape", "lines", "direction", "C1", "surrogate"],
)
def test_printable_shows_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_printable_counts_what_it_cuts() -> None:
    assert printable("x" * 501) == "x" * 500 + "… (1 more characters)"
    assert printable("x" * 500) == "x" * 500
    assert printable("x" * 9000, None) == "x" * 9000


def test_a_record_of_a_log_is_one_line_and_its_traceback_has_several() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("a", logging.INFO, "f", 1, "named %s", ("\x1b[0m\nb",), sys.exc_info())
    first, *rest = PrintableFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "INFO named \\x1b[0m\\nb" and rest[-1] == "ValueError: x"


def test_lines_of_a_log_record_and_of_a_traceback_are_printable() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        args = ("\x1b", Lines("one\ntwo\x1b"))
        record = logging.LogRecord("a", logging.INFO, "f", 1, "stack of %s\n%s", args, sys.exc_info())
    lines = PrintableFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert lines[:3] == ["INFO stack of \\x1b", "one", "two\\x1b"] and lines[-1] == "ValueError: \\x1b[2J"


@given(st.text(), st.integers(1, 50))
def test_printable_is_one_bounded_line(text: str, limit: int) -> None:
    line = printable(text, limit)
    assert all(each.isprintable() or each == "\t" for each in line)
    assert len(line) <= 10 * limit + 40  # the longest escape is \UXXXXXXXX
