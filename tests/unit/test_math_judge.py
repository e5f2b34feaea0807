"""Answers judged by math-verify in processes that can be ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from environments.maths.answer_form import AnswerForm, in_the_asked_form, last_number
from environments.maths.judge import UNJUDGED, MathJudge, Verdict
from environments.scoring import Scoring

pytest.importorskip("math_verify", reason="answers are judged by it: pip install math-verify")


@pytest.mark.parametrize(
    ("answer", "form", "final"),
    [
        ("so \\boxed{18}", "boxed", "18"),
        ("\\boxed{17} no, \\boxed{\\frac{36}{2}}", "boxed", "\\frac{36}{2}"),
        ("\\boxed{18", "boxed", None),
        ("\\boxed{}", "boxed", None),
        ("18", "boxed", None),
        ("it is\n#### 18\nAnd so on", "hashes", "18"),
        ("\\boxed{18}", "hashes", None),
        ("####", "hashes", None),
    ],
)
def test_the_form_that_was_asked_for(answer: str, form: AnswerForm, final: str | None) -> None:
    assert in_the_asked_form(answer, form) == final


@pytest.mark.parametrize(
    ("text", "number"), [("from 17 to $1,800.", "1800"), ("-3", "-3"), ("2.50 dollars", "2.50"), ("none", None)]
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


BOTH, LENIENT, NEITHER = Verdict(True, True), Verdict(False, True), Verdict(False, False)
CASES: list[tuple[str, str, AnswerForm, Verdict]] = [
    ("18", "2 + 16, so \\boxed{18}", "boxed", BOTH),
    ("18", "\\boxed{\\frac{36}{2}}", "boxed", BOTH),
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


def test_answers_that_wait_for_the_judge_cost_their_group_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 16 groups has the only judge for a tenth of its time: the last ones wait longer than their time."""

    async def slowly(*_: object) -> bytes:
        await asyncio.sleep(0.1)
        return b'{"strict": true, "lenient": true}'

    async def start(_: MathJudge) -> object:
        return object()

    monkeypatch.setattr(MathJudge, "_start", start)
    monkeypatch.setattr(MathJudge, "_ask", slowly)

    async def scene() -> list[Verdict]:
        watched, judge = Scoring(1.0), MathJudge(workers=1)
        groups = (watched.within(item, judge.judge("18", "18", "boxed")) for item in range(16))
        return await asyncio.gather(*groups)

    assert asyncio.run(scene()) == [BOTH] * 16


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
