"""Answers judged by math-verify in processes that can be ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.maths.answer_form import AnswerForm, in_the_asked_form, last_number, read_number
from environments.maths.judge import UNJUDGED, MathJudge, Verdict

pytest.importorskip("math_verify", reason="answers are judged by it: pip install math-verify")


def test_answer_in_the_form_that_was_asked_for() -> None:
    boxed = {"so \\boxed{18}": "18", "\\boxed{17} no, \\boxed{\\frac{36}{2}}": "\\frac{36}{2}"}
    boxed_none = ("\\boxed{18", "\\boxed{}", "18")
    assert [in_the_asked_form(answer, "boxed") for answer in (*boxed, *boxed_none)] == [*boxed.values(), *[None] * 3]
    hashes = ("it is\n#### 18\nAnd so on", "\\boxed{18}", "####")
    assert [in_the_asked_form(answer, "hashes") for answer in hashes] == ["18", None, None]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("from 17 to $1,800.", "1800"), ("-3", "-3"), ("2.50 dollars", "2.50"), ("none", None), ("", None)),
        *(
            ("10-12", "12"),
            ("10 - 12", "12"),
            ("10 -12", "12"),
            ("10\u201312", "12"),
            ("x-12", "12"),
            ("$10-$12", "12"),
        ),
        *(("x = -12", "-12"), ("is -12", "-12"), ("(-12)", "-12"), ("costs -$5", "-5"), ("so \u22123.", "-3")),
        *(("17,18", "18"), ("1,2345", "2345"), ("12/18/2024", "2024"), ("is 1/2.", "1/2"), ("2 1/2", "2 1/2")),
        *(("is 5 %.", "5%"), ("\\boxed{1{,}800}", "1800"), ("$\\frac{2}{4}$", "2/4"), ("is...18", "18"), (".5", ".5")),
        *(("$-\\frac{1}{2}$", "-1/2"), ("$-\\dfrac12$", "-1/2"), ("x\\frac12", "1/2"), ("5-\\frac12", "1/2")),
        *(("is $-\\mathbf{5}$", "-5"), ("10\\,-12", "12"), ("$2\\,\\frac12$", "2 1/2"), ("$2\\frac12$", "2 1/2")),
        *(("$100\\,000$", "100000"), ("$10\\ 000$", "10000"), ("1\\;234\\:567", "1234567"), ("5~000", "5000")),
        *(("5 000 apples", "5000"), ("are 1 234.", "1234"), ("1 234 567,5", "5"), ("-2 500.5", "-2500.5")),
        *(("in 2024 100", "100"), ("0 100", "100"), ("17 18", "18"), ("5 1000", "1000"), ("100\\text{,}000", "100000")),
        *(
            ("18\\text{ cm}^2", "18"),
            ("18 m ^2", "18"),
            ("18 m^2", "18"),
            ("18 m^{2}", "18"),
            ("18 cm2", "18"),
            ("18/0", None),
            ("9" * 5000, None),
        ),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (found.text if found else None) == number


STRICT: dict[str, tuple[list[str], list[str]]] = {
    "18": (
        [
            *("18", "18.", "18.0", "$18$", "\\$18", "18 dollars", "€18", "18 €", "US$18", "18 USD"),
            *("\\text{18 dollars}", "18 days", "18\\,\\text{km/h}", "18 m^2", "18^\\circ"),
            *("**18**", "+18", "18 m ^2", "18\\text{ cm}^2", "18\\,\\mathrm{m}^3", "18\\ \\mathrm{m}^{2}"),
            *("18\\,\\mathrm{km}/\\mathrm{h}", "18 km / h"),
        ],
        [
            *("1+17", "48/2-6", "17=18", "18=18", "x=18", "18\\%", "[18]", "(18)", "36/2", "\\frac{36}{2}"),
            *("17 or 18", "18, 19", "18 17", "17\n18", "not 18", "18 thousand", "18k", "18x", "18!", "18^1"),
            *("\\sqrt{324}", "9\\cdot 2", "\\boxed{}", "9" * 5000),
            *("$18 dollars", "18 square feet", "-18", "--18", "17", "18.5", "1 8", "eighteen", "1.8e1"),
        ],
    ),
    "1800": (
        [
            *("1800", "1,800", "1{,}800", "1\\,800", "1\\ 800", "1\\;800", "1~800", "1 800", "1,800 dollars"),
            *("\\$1,800.00", "1\\!800"),
        ],
        ["1.8k", "18 hundred", "1,80", "1,8000", "1.800", "18,00", "2000-200", "1 80 0", "0 001 800", "1800 000"],
    ),
    "2.5": (
        ["2.5", "2.50", "5/2", "\\frac{5}{2}", "\\dfrac52", "2 1/2", "2\\frac12", "2\\,\\frac12", "$2.50", "250\\%"],
        ["10/4", "2,5", "2.5.0", "2+1/2", "2 5/10", "25", "5/2/1", "\\frac{5}{0}"],
    ),
    "1/2": (
        ["1/2", "\\frac{1}{2}", "\\tfrac12", "0.5", ".5", "50\\%", "0.5 cups", "1/2 hour"],
        ["2/4", "1-1/2", "1 1/2", "1:2", "1/-2", "50", "half"],
    ),
    "-1/2": (["-\\frac{1}{2}", "-\\frac12", "\\frac{-1}{2}", "-0.5"], ["\\frac{1}{2}", "--\\frac12", "1-\\frac12"]),
    "5 %": (
        ["5 %", "5\\%", "5%", "5 percent", "5 per cent", "5", "0.05", "1/20"],
        ["0.05\\%", "5/100", "500\\%", "50\\%"],
    ),
}  # fmt: skip


ANSWERS = [
    (gold, each, right)
    for gold, (right_ones, wrong_ones) in STRICT.items()
    for right, part in ((True, right_ones), (False, wrong_ones))
    for each in part
]


@pytest.mark.parametrize(("gold", "answer", "right"), ANSWERS)
def test_a_strict_answer_is_one_number_with_one_unit_at_most(gold: str, answer: str, right: bool) -> None:
    forms: list[tuple[AnswerForm, str]] = [("boxed", f"so \\boxed{{{answer}}}"), ("hashes", f"so\n#### {answer}")]
    number = read_number(gold)
    for form, text in forms if "\n" not in answer else forms[:1]:
        final = in_the_asked_form(text, form)
        assert number is not None and (final is not None and number.accepts(read_number(final))) is right


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", [" ", "1 ", "1,", "\\frac{", "a-"])
def test_a_long_answer_is_read_in_time_that_grows_with_its_length(part: str) -> None:
    for text in (f"-{part * 50_000}x", f"1{part * 50_000}!", f"1 m{part * 50_000}!"):
        assert read_number(text) is None
        last_number(text)


@given(st.integers(-(10**6), 10**6), st.integers(0, 99), st.sampled_from(["{}", "${}", "{} km", "{}.", "€ {}"]))
def test_a_written_number_is_read_back(whole: int, cents: int, written: str) -> None:
    text = f"{whole:,}.{cents:02}" if cents else f"{whole:,}"
    value = Fraction(whole) + Fraction(cents if whole >= 0 and text[0] != "-" else -cents, 100)
    for number in (read_number(written.format(text)), last_number(f"From 3-4 to {written.format(text)}")):
        assert number is not None and number.value == value


BOTH, LENIENT, NEITHER = Verdict(True, True), Verdict(False, True), Verdict(False, False)
CASES: list[tuple[str, str, AnswerForm, Verdict]] = [
    ("18", "2 + 16, so \\boxed{18}", "boxed", BOTH),
    ("18", "\\boxed{\\frac{36}{2}}", "boxed", LENIENT),
    ("18", "\\boxed{1+17}", "boxed", LENIENT),
    ("5%", "\\boxed{5\\%}", "boxed", BOTH),
    ("5%", "It is 5 percent.", "boxed", LENIENT),
    ("\\sqrt{2}", "\\boxed{2/\\sqrt{2}}", "boxed", BOTH),
    ("1800", "\\boxed{1,800}", "boxed", BOTH),
    ("18", "\\boxed{\\$18}", "boxed", BOTH),
    ("18", "She makes $18 every day.", "boxed", LENIENT),
    ("18", "#### 18", "boxed", LENIENT),
    ("18", "#### 18", "hashes", BOTH),
    ("18", "\\boxed{17} or 18", "boxed", LENIENT),
    ("18", "18, no: \\boxed{17}", "boxed", NEITHER),
    ("18", "", "boxed", NEITHER),
    ("18", "\\boxed{(((((", "boxed", NEITHER),
]


def test_strict_is_right_in_the_form_and_lenient_is_right_anywhere() -> None:
    async def scene() -> list[Verdict]:
        judge = MathJudge(workers=1)
        try:
            return [await judge.judge(gold, answer, form) for gold, answer, form, _ in CASES]
        finally:
            await judge.close()

    assert [*zip(CASES, asyncio.run(scene()), strict=True)] == [(case, case[3]) for case in CASES]


def test_a_judge_that_hangs_is_ended_and_the_next_answer_is_judged_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> tuple[list[Verdict], list[int], set[Any]]:
        judge = MathJudge(workers=1, limit_s=30.0)
        try:
            first = await judge.judge("18", "\\boxed{18}", "boxed")
            (worker,) = judge.running
            worker.send_signal(19)  # SIGSTOP: as deaf as one in the midst of long arithmetic in C
            judge.limit_s = 0.2
            stuck = await judge.judge("17", "\\boxed{18}", "boxed")
            judge.limit_s = 30.0
            after = await judge.judge("18", "\\boxed{18}", "boxed")
            pids = [worker.pid, *(other.pid for other in judge.running)]
        finally:
            await judge.close()
        return [first, stuck, after], pids, judge.running

    verdicts, pids, left = asyncio.run(scene())
    assert verdicts == [BOTH, UNJUDGED, BOTH]
    assert len(pids) == 2 and len(set(pids)) == 2 and not left


def test_arithmetic_without_end_does_not_stop_the_rest() -> None:
    async def scene() -> list[Verdict]:
        judge = MathJudge(workers=2)
        try:
            towers = [judge.judge("18", "\\boxed{9^{9^{9^{9}}}}", "boxed")]
            return await asyncio.gather(*towers, *(judge.judge("18", "\\boxed{18}", "boxed") for _ in range(3)))
        finally:
            await judge.close()

    tower, *others = asyncio.run(scene())
    assert not tower.strict and others == [BOTH] * 3


KILLED = """
import asyncio, os
from environments.maths.judge import MathJudge

async def main():
    judge = MathJudge(1, 600.0)
    searching = asyncio.create_task(judge.search("(a+)+$", ["a" * 60 + "b"]))
    while not judge.running:
        await asyncio.sleep(0.05)
    await asyncio.sleep(5.0)  # it is ready, and searches
    print(next(iter(judge.running)).pid, flush=True)
    await searching

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends it")
def test_a_judge_does_not_outlive_a_killed_environment() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        status = Path(f"/proc/{int(process.stdout.readline())}/status")
        process.kill()
    until = time.monotonic() + 30.0
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not status.exists() or "State:\tZ" in status.read_text()
