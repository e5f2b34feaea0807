"""Scores and tools that take too long are given up, and code that blocks the event loop ends its process by name."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.demo_model.model import build_tokenizer
from environments.maths.answer_form import AnswerForm, in_the_asked_form, last_number, read_number
from environments.maths.judge import UNJUDGED, MathJudge, Verdict
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.inference import Completion
from environments.running import cli
from environments.scoring import ScoreTimeout, Scoring, Threads, gathered
from tests.stand_ins import pass_time

SECONDS = 0.1


async def waits_for_ever() -> None:
    await asyncio.Event().wait()


async def catches_all() -> None:
    try:
        await asyncio.Event().wait()
    except:  # noqa: E722 - as users write it
        return


async def ignores_the_first() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


@pytest.mark.parametrize("score", [waits_for_ever, catches_all, ignores_the_first])
def test_scoring_gives_a_group_up_by_name(
    score: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("environments.scoring.GRACE_S", SECONDS)

    class Unspeakable:
        def __repr__(self) -> str:
            raise ValueError

    async def got(item: object) -> str:
        with pytest.raises(ScoreTimeout) as error:
            await Scoring(SECONDS).within(item, score())
        assert error.value.field == "--env.score_timeout" and f"{SECONDS:g} s" in error.value.wanted
        return error.value.got

    assert "'item 7'" in asyncio.run(got("item 7"))
    assert len(asyncio.run(got("x" * 100_000))) < 300
    assert "Unspeakable" in asyncio.run(got(Unspeakable()))


async def test_scoring_raises_what_the_code_raises() -> None:
    async def raises(error: BaseException) -> None:
        raise error

    limited = Scoring(60.0)
    with pytest.raises(ZeroDivisionError):
        await limited.within(1, raises(ZeroDivisionError()))
    with pytest.raises(TimeoutError) as error:
        await limited.within(1, raises(TimeoutError("its own")))
    assert not isinstance(error.value, ScoreTimeout)
    task = asyncio.create_task(limited.within(1, waits_for_ever()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
async def test_scoring_an_interrupt_of_the_code_is_an_error_of_its_group(error: BaseException, in_thread: bool) -> None:
    def score() -> float:
        raise error

    async def score_in_loop() -> float:
        raise error

    with pytest.raises(RuntimeError) as raised:
        await Scoring(60.0).within("item", Threads(1).call(score) if in_thread else score_in_loop())
    assert raised.value.__cause__ is error


async def test_threads_limit_their_number_and_leave_the_loop_free() -> None:
    threads, most, lock, full = Threads(3), [0, 0], threading.Lock(), threading.Event()

    async def let_go() -> None:  # never, if a function blocked the loop
        while most[1] < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # a fourth would begin meanwhile
        full.set()

    def work() -> None:
        with lock:
            most[0] += 1
            most[1] = max(most)
        assert full.wait(20)
        with lock:
            most[0] -= 1

    await asyncio.gather(let_go(), *(threads.call(work) for _ in range(9)))
    assert most[1] == 3


async def test_threads_coroutines_stay_in_the_loop_and_errors_are_raised() -> None:
    async def here() -> str:
        return threading.current_thread().name

    def raises(error: BaseException) -> None:
        raise error

    threads = Threads(1)
    assert await threads.call(here) == threading.main_thread().name
    assert await threads.call(lambda: here()) == threading.main_thread().name
    assert await threads.call(lambda: threading.current_thread().name) != threading.main_thread().name
    with pytest.raises(ZeroDivisionError):
        await threads.call(raises, ZeroDivisionError())
    with pytest.raises(RuntimeError, match="StopIteration: 3"):
        await threads.call(raises, StopIteration(3))


async def test_threads_a_time_limit_begins_when_a_thread_is_free() -> None:
    class Env(BaseEnv[int]):
        def score(self, item: int, answer: str) -> float:
            return 1.0

    env = Env(BaseEnvConfig(tokenizer_name="demo", max_threads=1), cast("Any", None), build_tokenizer())
    work = asyncio.ensure_future(asyncio.sleep(0, 1.0))
    async with env.threads.slot():
        limited = asyncio.create_task(env.scored_within(0, work), context=contextvars.Context())
        await work
        await asyncio.sleep(0.05)
        assert not limited.done(), "it has neither begun nor been given up"
        assert await env.threads.call(lambda: 2) == 2, "a group has one place for all its calls"
    assert await limited == 1.0


async def test_threads_a_hung_function_is_named_and_gives_its_place_to_others(caplog: pytest.LogCaptureFixture) -> None:
    over, begun = threading.Event(), threading.Event()

    def solve() -> None:
        begun.set()
        over.wait()

    async def solving(work: Awaitable[Any]) -> asyncio.Future[Any]:
        begun.clear()
        task = asyncio.ensure_future(work)
        while not begun.is_set():
            await asyncio.sleep(0.01)
        return task

    try:
        threads = Threads(1)
        for work in (threads.call(solve, timeout=60), Scoring(60.0).within("item", threads.call(solve))):
            task = await solving(work)
            pass_time(61.0)
            with pytest.raises(TimeoutError, match=r"\b60 s"):
                await task
        with pytest.raises(TimeoutError, match=r"\b0\.05 s"):
            await threads.call(asyncio.sleep, 60, timeout=0.05)
        task = await solving(threads.call(solve))
        task.cancel()  # as at the end of the program: nothing is logged
        await asyncio.wait([task])
        assert (await threads.call(lambda: "next", timeout=20)) == "next"
    finally:
        over.set()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all(re.search(r"\bin solve\n", message) for message in messages)


BLOCKING = """
import asyncio, logging, os, re, signal, subprocess, sys, time
from environments import scoring

scoring.LEAST_S, scoring.BEAT_S, scoring.NATIVE_S = 1.5, 0.2, {native}
logging.basicConfig(format="%(levelname)s %(message)s")

def stopped(seconds):
    subprocess.Popen(["sh", "-c", f"sleep {{seconds}}; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), signal.SIGSTOP)

async def evaluate():
    {block}

async def main():
    watching = asyncio.create_task(scoring.watch_loop({seconds}, lambda: {armed}))
    await asyncio.sleep(0.5)
    await evaluate()
    await asyncio.sleep(0.5)
    print("moved", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("block", "seconds", "armed", "status"),
    [
        ("time.sleep(60)", 1.6, True, os.EX_SOFTWARE),
        ("while True: pass", 0.1, True, os.EX_SOFTWARE),
        ("re.match('(a+)+$', 'a' * 60 + 'b')", 1.6, True, 1),  # no Python code runs meanwhile
        ("stopped(5)", 1.6, True, 0),
        ("time.sleep(2)", 60, True, 0),
        ("time.sleep(3)", 1.6, False, 0),  # as in setup()
    ],
)
def test_loop_watch_ends_a_blocked_process(block: str, seconds: float, armed: bool, status: int) -> None:
    native = 1.0 if status == 1 else 9.0
    script = BLOCKING.format(block=block, seconds=seconds, armed=armed, native=native)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("" if status else "moved\n")
    assert done.stderr.startswith("ERROR ") == (status == os.EX_SOFTWARE)
    assert bool(re.search(r"\bin evaluate$", done.stderr, re.MULTILINE)) == bool(status)


SIGNALLED = """
import asyncio
from environments.running import cli

async def main():
    stop = asyncio.Event()
    cli._stop_on_signals(stop, status=7)
    try:
        print("works", flush=True)
        {works}
        print("stops", flush=True)
        {stops}
    finally:
        await asyncio.sleep(0.01)
        print("left", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("works", "stops", "lines", "last", "status"),
    [
        ("while True: pass", "pass", ["works"], "", 7),  # its event loop is blocked
        ("await stop.wait()", "pass", ["works"], "stops\nleft\n", 0),
        ("await stop.wait()", "await asyncio.sleep(3600)", ["works", "stops"], "", 130),  # a second signal
    ],
)
def test_cli_a_signal_ends_a_process(works: str, stops: str, lines: list[str], last: str, status: int) -> None:
    command = [sys.executable, "-c", SIGNALLED.format(works=works, stops=stops)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in lines:
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.SIGTERM)
        if status == 130:
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == (last, status)


CLINGING = """
import asyncio, time
from contextlib import AsyncExitStack
from environments.running import cli

async def clings():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def main():
    async with AsyncExitStack() as stack:
        stack.push(cli._end_soon)
        left = asyncio.ensure_future({left})
        await asyncio.sleep(0.1)
        {end}

cli.CLOSE_S = 0.2
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("left", "end", "status"),
    [("clings()", "raise ValueError('mine')", 1), ("asyncio.to_thread(time.sleep, 3600)", "pass", 0)],
)
def test_cli_a_process_ends_although_code_stays_behind(left: str, end: str, status: int) -> None:
    command = [sys.executable, "-c", CLINGING.format(left=left, end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == status and ("mine" in done.stderr) == bool(status), done.stderr


async def raises() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("close", [raises, waits_for_ever])
def test_cli_a_close_that_fails_or_hangs_is_logged(
    close: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cli, "CLOSE_S", SECONDS)
    env: Any = SimpleNamespace(close=close)
    asyncio.run(cli._close(env))
    assert [record.levelno >= logging.WARNING for record in caplog.records] == [True]


class Judge(BaseEnv[int]):
    """Scores by the thread that it is in."""

    def score(self, item: int, answer: str) -> float:
        return float(threading.current_thread() is threading.main_thread())


class Quick(Judge):
    """Scores in the event loop."""

    score_in_thread = False


@pytest.mark.parametrize(("kind", "score"), [(Judge, 0.0), (Quick, 1.0)])
def test_base_scores_in_a_thread_unless_the_class_says_otherwise(kind: type[Judge], score: float) -> None:
    env: Any = kind(BaseEnvConfig(tokenizer_name="m"), None, None)  # type: ignore[arg-type]
    answers = [Completion([1], [], [], text, "stop", None) for text in ("a", "b")]
    assert asyncio.run(env.score_group(1, answers)) == [score, score]


class Tools(MultiTurnEnv[int]):
    """Two tools: one that hangs, one whose arguments have names of our own."""

    over = threading.Event()

    def tools(self) -> list[Any]:
        def hang() -> None:
            self.over.wait()

        def wait(timeout: float, function: str) -> dict[str, Any]:
            return {"timeout": timeout, "function": function}

        return [hang, wait]


def test_tools_the_policy_reads_that_one_took_too_long() -> None:
    # The limit is enough for the second tool on a slow machine.
    config = MultiTurnConfig(tokenizer_name="m", tool_format="hermes", tool_timeout=5.0)
    env = Tools(config, None, None)  # type: ignore[arg-type]
    text = (
        '<tool_call>{"name": "hang"}</tool_call>'
        '<tool_call>{"name": "wait", "arguments": {"timeout": 3, "function": "f"}}</tool_call>'
    )
    try:
        messages = asyncio.run(env.call_tools(text))
    finally:
        env.over.set()
    hung, answered = [each["content"] for each in messages]
    assert hung.startswith("TimeoutError: ") and "5 s" in hung
    assert answered == '{"timeout": 3, "function": "f"}'


# the judge -----------------------------------------------------------------------------------------------------------


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
        *(("10-12", "12"), ("10 - 12", "12"), ("10 -12", "12"), ("10\u201312", "12"), ("x-12", "12")),
        *(("$10-$12", "12"), ("x = -12", "-12"), ("is -12", "-12"), ("(-12)", "-12"), ("costs -$5", "-5")),
        *(("so \u22123.", "-3"), ("17,18", "18"), ("1,2345", "2345"), ("12/18/2024", "2024"), ("is 1/2.", "1/2")),
        *(("2 1/2", "2 1/2"), ("is 5 %.", "5%"), ("\\boxed{1{,}800}", "1800"), ("$\\frac{2}{4}$", "2/4")),
        *(("is...18", "18"), (".5", ".5"), ("$-\\frac{1}{2}$", "-1/2"), ("$-\\dfrac12$", "-1/2")),
        *(("x\\frac12", "1/2"), ("5-\\frac12", "1/2"), ("is $-\\mathbf{5}$", "-5"), ("10\\,-12", "12")),
        *(("$2\\,\\frac12$", "2 1/2"), ("$2\\frac12$", "2 1/2"), ("$100\\,000$", "100000")),
        *(("$10\\ 000$", "10000"), ("1\\;234\\:567", "1234567"), ("5~000", "5000"), ("5 000 apples", "5000")),
        *(("are 1 234.", "1234"), ("1 234 567,5", "5"), ("-2 500.5", "-2500.5"), ("in 2024 100", "100")),
        *(("0 100", "100"), ("17 18", "18"), ("5 1000", "1000"), ("100\\text{,}000", "100000")),
        *(("18\\text{ cm}^2", "18"), ("18 m ^2", "18"), ("18 m^2", "18"), ("18 m^{2}", "18"), ("18 cm2", "18")),
        *(("18/0", None), ("9" * 5000, None)),
    ],
)  # fmt: skip
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


@asynccontextmanager
async def judging(**settings: Any) -> AsyncIterator[MathJudge]:
    judge = MathJudge(**settings)
    try:
        yield judge
    finally:
        await judge.close()


@pytest.mark.usefixtures("warm_environments")
async def test_strict_is_right_in_the_form_and_lenient_is_right_anywhere() -> None:
    async with judging(workers=1) as judge:
        verdicts = [await judge.judge(gold, answer, form) for gold, answer, form, _ in CASES]
    assert [*zip(CASES, verdicts, strict=True)] == [(case, case[3]) for case in CASES]


@pytest.mark.usefixtures("warm_environments")
async def test_judge_that_hangs_is_ended() -> None:
    async with judging(workers=1, limit_s=30.0) as judge:
        assert await judge.judge("18", "\\boxed{18}", "boxed") == BOTH
        (worker,) = judge.running
        worker.send_signal(signal.SIGSTOP)  # as deaf as one in the midst of long arithmetic in C
        judge.limit_s = 0.2
        assert await judge.judge("17", "\\boxed{18}", "boxed") == UNJUDGED
        judge.limit_s = 30.0
        assert await judge.judge("18", "\\boxed{18}", "boxed") == BOTH
        assert [other.pid == worker.pid for other in judge.running] == [False]
    assert not judge.running


FRAGILE = """
import os, pathlib, signal

starts = pathlib.Path(__file__).with_name("starts")
with starts.open("a") as file:
    file.write("x")
if starts.stat().st_size <= {killed}:
    os.kill(os.getpid(), signal.SIGKILL)

from environments.maths import judge_worker

def noisy(judge):
    def judged(*given, **named):
        print("a library's remark")
        return judge(*given, **named)
    return judged

judge_worker.judge = noisy(judge_worker.judge)
judge_worker.main()
"""


@pytest.mark.parametrize("killed", [1, 2])
async def test_judge_that_is_killed_during_its_start_starts_once_more(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a library prints there is no verdict."""
    (tmp_path / "fragile_worker.py").write_text(FRAGILE.format(killed=killed))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("environments.maths.judge.WORKER", "fragile_worker")
    async with judging(workers=1, limit_s=60.0) as judge:
        with nullcontext() if killed == 1 else pytest.raises(RuntimeError):
            verdicts = [await judge.judge("18", answer, "boxed") for answer in ("\\boxed{18}", "\\boxed{17}", "18")]
            assert verdicts == [BOTH, NEITHER, LENIENT]
    assert not judge.running


@pytest.mark.usefixtures("warm_environments")
async def test_judge_that_is_given_up_during_its_start_leaves_nothing() -> None:
    """At any moment: a process of asyncio whose pipes are not connected yet would never be waited for."""
    async with judging(workers=1) as judge:
        started: list[Any] = []
        for moments in range(5):
            judging_one = asyncio.create_task(judge.judge("18", "\\boxed{18}", "boxed"))
            for _ in range(moments):
                await asyncio.sleep(0)
            started = [*judge.running]
            judging_one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await judging_one
            assert not judge.running and all(worker.returncode is not None for worker in started)
        assert started and await judge.judge("18", "\\boxed{18}", "boxed") == BOTH


@pytest.mark.usefixtures("warm_environments")
async def test_arithmetic_without_end_does_not_stop_the_rest() -> None:
    async with judging(workers=2) as judge:
        answers = ["\\boxed{9^{9^{9^{9}}}}", *["\\boxed{18}"] * 3]
        tower, *others = await asyncio.gather(*(judge.judge("18", answer, "boxed") for answer in answers))
    assert not tower.strict and others == [BOTH] * 3


KILLED = """
import asyncio, os
from environments.maths.judge import MathJudge

async def main():
    judge = MathJudge(1, 600.0)
    await judge.search("a", ["a"])  # it is ready
    searching = asyncio.create_task(judge.search("(a+)+$", ["a" * 60 + "b"]))
    await asyncio.sleep(0.5)
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


@pytest.mark.filterwarnings("error")
def test_an_error_waits_for_the_others_and_one_that_has_not_begun_is_closed() -> None:
    said: list[str] = []

    async def fails() -> None:
        raise ValueError("the first")

    async def holds() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("given back")

    async def check() -> None:
        with pytest.raises(ValueError, match="the first"):
            await gathered([fails(), holds()])
        assert said == ["given back"]
        task = asyncio.create_task(gathered([holds(), holds()]))
        await asyncio.sleep(0)  # the two are made, and have not begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())
    gc.collect()
