"""Scoring and tools that do not end are given up, whatever they wait for or block, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from environments import scoring, threads
from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.inference import Completion
from environments.running import cli
from environments.scoring import ScoreTimeout, Scoring
from environments.threads import Threads, elsewhere, stack_of_thread

SECONDS = 0.1


async def waits_for_ever() -> float:
    await asyncio.Event().wait()
    return 1.0


async def waits_for_two() -> list[float]:
    return list(await asyncio.gather(waits_for_ever(), waits_for_ever()))


async def hangs_in_a_thread() -> float:
    over = threading.Event()

    def solve() -> float:
        over.wait()
        return 1.0

    try:
        return await Threads(1).call(solve)
    finally:
        over.set()


@pytest.mark.parametrize(
    ("score", "stands_in"),
    [(waits_for_ever, "waits_for_ever"), (waits_for_two, "waits_for_ever"), (hangs_in_a_thread, "solve")],
)
def test_a_group_is_given_up_and_the_log_says_which_and_where(
    score: Callable[[], Awaitable[Any]], stands_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> float:
        watched = Scoring(SECONDS)
        with pytest.raises(ScoreTimeout) as error:
            await watched.within("item 7", score())
        assert error.value.field == "--env.score_timeout" and "'item 7'" in error.value.got
        assert f"{SECONDS:g} s" in error.value.wanted

        async def one() -> float:
            return 1.0

        return await watched.within("item 8", one())  # the next group is scored as if nothing had been

    assert asyncio.run(scene()) == 1.0
    (record,) = [record for record in caplog.records if record.name == scoring.__name__]
    said = record.getMessage()
    assert "'item 7'" in said and re.search(rf"\bin {stands_in}\n", said)
    assert "run_until_complete" not in said, "the stack begins at the scoring"


def test_a_group_is_not_given_up_for_waiting_for_a_thread() -> None:
    """Each of 16 groups has the only thread for a tenth of its time: the last ones wait longer than their time."""

    async def scene() -> list[Any]:
        watched, threads = Scoring(10 * SECONDS), Threads(1)
        groups = (watched.within(item, threads.call(time.sleep, SECONDS)) for item in range(16))
        return await asyncio.gather(*groups)

    assert asyncio.run(scene()) == [None] * 16


def test_a_group_whose_thread_hangs_is_given_up_though_others_of_its_calls_wait() -> None:
    async def scene() -> None:
        over, threads = threading.Event(), Threads(1)

        async def score() -> None:
            await asyncio.gather(threads.call(over.wait), threads.call(time.sleep, 0))

        try:
            with pytest.raises(ScoreTimeout):
                await Scoring(SECONDS).within("item 7", score())
        finally:
            over.set()

    asyncio.run(scene())


def test_a_call_may_take_any_time_while_it_waits_for_a_server() -> None:
    async def evaluate() -> float:
        with elsewhere():
            await asyncio.sleep(3 * SECONDS)
        return 1.0

    assert asyncio.run(Scoring(SECONDS).call("evaluate()", evaluate())) == 1.0


@pytest.mark.parametrize("tool", [partial(time.sleep, 3 * SECONDS), partial(asyncio.sleep, 3 * SECONDS)])
def test_a_call_with_a_time_limit_may_take_that_long(tool: Callable[[], Any]) -> None:
    call = Threads(1).call(tool, timeout=60.0)
    asyncio.run(Scoring(SECONDS).call("collect_trajectories()", call))


def test_a_call_without_progress_is_given_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ScoreTimeout) as error:
        asyncio.run(Scoring(SECONDS).call("evaluate()", waits_for_two()))
    assert "evaluate()" in error.value.got
    assert "in waits_for_ever\n" in caplog.text


def test_a_clock_that_restarts_counts_from_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now))

    def seconds(*, restarts: bool) -> float:
        """Of 5 s before a call, which waits 2 s for its thread and runs for 4 s, and 3 s after it."""
        nonlocal now
        clock = threads.Clock(restarts=restarts)
        now += 5.0
        with clock.count(calls=1):
            with clock.count(waiting=1):
                now += 2.0
            now += 4.0
        now += 3.0
        return clock.seconds

    assert seconds(restarts=False) == 5.0 + 4.0 + 3.0
    assert seconds(restarts=True) == 3.0


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_that_a_score_raises_is_an_error_of_its_group(error: BaseException, in_thread: bool) -> None:
    def score() -> float:
        raise error

    async def score_in_loop() -> float:
        raise error

    async def scene() -> None:
        with pytest.raises(RuntimeError) as raised:
            await Scoring(60.0).within("item", Threads(1).call(score) if in_thread else score_in_loop())
        assert raised.value.__cause__ is error

    asyncio.run(scene())


BLOCKING = """
import asyncio, logging, re, time
from contextlib import nullcontext
from environments import scoring

scoring.LOOK_S, scoring.NATIVE_S, scoring.REPORT_S = 0.2, 6.0, 0.8
logging.basicConfig(format="%(levelname)s %(message)s")

async def evaluate(watch):
    with {within}:
        {block}

async def main():
    watch = scoring.LoopWatch({seconds})
    async with watch:
        await asyncio.sleep(0.5)
        await evaluate(watch)
    print("moved", flush=True)

asyncio.run(main())
"""
SLOW_START = """with watch.patience():
            time.sleep(3)
        time.sleep(0.5)"""
NATIVE = "re.match('(a+)+$', 'a' * 60 + 'b')"


@pytest.mark.parametrize(
    ("block", "within", "seconds", "status", "levels"),
    [
        ("time.sleep(20)", "nullcontext()", 1.6, os.EX_SOFTWARE, ["WARNING", "ERROR"]),
        ("while True: pass", "nullcontext()", 0.1, os.EX_SOFTWARE, ["ERROR"]),
        (NATIVE, "nullcontext()", 1.6, 1, []),  # no Python code runs meanwhile
        ("time.sleep(2)", "nullcontext()", 60, 0, ["WARNING"]),
        ("time.sleep(3)", "watch.patience()", 1.6, 0, ["WARNING"]),
        (SLOW_START, "nullcontext()", 1.6, 0, ["WARNING"]),
    ],
)
def test_a_process_whose_event_loop_is_blocked_shows_where_and_ends(
    block: str, within: str, seconds: float, status: int, levels: list[str]
) -> None:
    script = BLOCKING.format(block=block, within=within, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("" if status else "moved\n")
    assert re.findall("^(WARNING|ERROR) ", done.stderr, re.MULTILINE) == levels
    assert re.search(r"\bin evaluate$", done.stderr, re.MULTILINE)
    assert ("--env.score_timeout" in done.stderr) == ("ERROR" in levels)


def test_long_scoring_is_reported_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring, "REPORT_S", 0.05)

    async def scene() -> list[float]:
        watched, reported = Scoring(60.0), asyncio.Event()

        async def slow() -> float:
            await reported.wait()
            return 1.0

        async def until_reported() -> None:
            while not caplog.records:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # time for a second report, were there one
            reported.set()

        *scores, _ = await asyncio.gather(watched.within(1, slow()), watched.within(2, slow()), until_reported())
        return scores

    assert asyncio.run(scene()) == [1.0, 1.0]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and re.search(r"\bin slow\n", record.getMessage())
    assert record.getMessage().splitlines()[0].endswith(":")  # a display of one line says where the others are


def test_what_scoring_raises_is_raised_and_a_time_out_of_its_own_is_no_other() -> None:
    async def raises(error: Exception) -> None:
        raise error

    async def scene() -> None:
        watched = Scoring(60.0)
        with pytest.raises(ZeroDivisionError):
            await watched.within(1, raises(ZeroDivisionError()))
        with pytest.raises(TimeoutError) as error:
            await watched.within(1, raises(TimeoutError("its own")))
        assert not isinstance(error.value, ScoreTimeout)
        task = asyncio.create_task(watched.within(1, waits_for_ever()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())


def test_an_item_is_shown_shortened() -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise ValueError

    async def scene() -> list[str]:
        got = []
        for item in ("x" * 100_000, Unspeakable()):
            with pytest.raises(ScoreTimeout) as error:
                await Scoring(0.01).within(item, waits_for_ever())
            got.append(error.value.got)
        return got

    long, unspeakable = asyncio.run(scene())
    assert len(long) < 300 and "Unspeakable" in unspeakable


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert stack_of_thread(thread.ident, Scoring._limited.__code__) == ""


BLOCKED = """
import asyncio, time
from environments.running import cli
from environments.scoring import Scoring

async def score(stop):
    {block}

async def main():
    stop = asyncio.Event()
    cli._stop_on_signals(stop, status=7)
    try:
        print("blocks", flush=True)
        await Scoring(60).within("item", score(stop))
    finally:
        await asyncio.sleep(0.01)
        print("left", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("block", "status"), [("time.sleep(60)", 7), ("while True: pass", 7), ("await stop.wait()", 0)]
)
def test_a_signal_ends_an_environment_whose_event_loop_is_blocked(block: str, status: int) -> None:
    command = [sys.executable, "-c", BLOCKED.format(block=block)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "blocks\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
        assert said == ("" if status else "left\n")
        assert process.returncode == status


async def catches_all(seconds: float) -> float:
    try:
        await asyncio.sleep(60)
    except:  # noqa: E722 - as users write it
        await asyncio.sleep(seconds)
    return 1.0


def test_scoring_that_catches_its_cancellation_loses_its_group() -> None:
    with pytest.raises(ScoreTimeout):
        asyncio.run(Scoring(SECONDS).within("item 7", catches_all(0.0)))


STUBBORN = """
import asyncio, logging
from environments import scoring
from tests.unit.test_scoring import blocks_and_ends, catches_all

scoring.STUBBORN_S = 0.3
logging.basicConfig(format="%(levelname)s %(message)s")

async def main():
    watched = scoring.Scoring(0.2)
    async with watched.loop:
        await watched.within("item 7", {score})

asyncio.run(main())
"""


def run_stubborn(score: str) -> subprocess.CompletedProcess[str]:
    script = STUBBORN.format(score=score)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


async def blocks_and_ends() -> None:
    try:
        await asyncio.sleep(60)
    finally:
        time.sleep(1)  # longer than STUBBORN_S there, and no other code runs
        for _ in range(5):
            await asyncio.sleep(0)


def test_a_process_is_not_blamed_for_time_in_which_its_scoring_could_not_end() -> None:
    done = run_stubborn("blocks_and_ends()")
    assert done.returncode == 1 and "ScoreTimeout" in done.stderr, done.stderr


def test_a_process_whose_scoring_goes_on_after_its_cancellation_ends_and_says_where() -> None:
    done = run_stubborn("catches_all(60)")
    assert done.returncode == os.EX_SOFTWARE, done.stderr
    assert re.search("^ERROR .*'item 7'", done.stderr, re.MULTILINE)
    assert re.search(r"\bin catches_all$", done.stderr, re.MULTILINE)


def test_a_thread_of_a_group_that_is_given_up_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    async def scene() -> None:
        threads = Threads(4)
        for item in range(2):
            with pytest.raises(ScoreTimeout):
                await Scoring(SECONDS).within(item, threads.call(over.wait))
        task = asyncio.create_task(Scoring(60).within(2, threads.call(over.wait)))
        await asyncio.sleep(SECONDS)
        task.cancel()  # as at the end of the program: nothing is said
        await asyncio.wait([task])

    try:
        asyncio.run(scene())
    finally:
        over.set()
    counted = [record.args for record in caplog.records if record.name == threads.__name__]
    assert counted == [("wait", 1), ("wait", 2)]


class Closing:
    """An environment, as far as `_command` needs one, whose `close` does something wrong."""

    teacher = None

    def __init__(self, close: Callable[[], Awaitable[None]], server: SimpleNamespace) -> None:
        self.scoring, self.close, self.server = Scoring(60.0), close, server


async def raises() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("close", [raises, waits_for_ever])
def test_a_close_that_fails_or_hangs_is_logged_and_the_connections_are_closed(
    close: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    class Client:
        async def close(self) -> None:
            closed.append("server")

    async def evaluate(env: Any) -> None:
        return None

    monkeypatch.setattr(scoring, "CLOSE_S", SECONDS)
    monkeypatch.setattr(cli, "servers", lambda *_, **__: Client())
    monkeypatch.setattr(cli, "evaluate", evaluate)
    monkeypatch.setattr(cli, "_stop_on_signals", lambda *_, **__: None)
    settings: Any = SimpleNamespace(openai=None, env=SimpleNamespace(retry_timeout=1.0), data=None, rewards=())
    env_cls: Any = lambda *_: Closing(close, SimpleNamespace())  # noqa: E731
    asyncio.run(cli._command("evaluate", env_cls, settings, None))
    assert closed == ["server"]
    assert any(record.levelno >= logging.WARNING for record in caplog.records)


def test_a_close_that_blocks_ends_the_process() -> None:
    script = """
import asyncio, time
from environments import scoring

scoring.LOOK_S, scoring.CLOSE_S = 0.2, 0.5

async def close():
    time.sleep(60)

async def main():
    watched = scoring.Scoring(120.0)
    async with watched.loop:
        await watched.close(close())

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == os.EX_SOFTWARE and "close()" in done.stderr, done.stderr


def test_the_loop_goes_on_while_a_function_waits_for_it() -> None:
    async def scene() -> str:
        said = threading.Event()
        asyncio.get_running_loop().call_later(0.05, said.set)  # never, if the function stood in the loop's way
        return await Threads(1).call(lambda: "heard" if said.wait(20) else "the loop stood still")

    assert asyncio.run(scene()) == "heard"


def test_so_many_run_at_once_and_no_more() -> None:
    async def scene() -> int:
        threads, most, lock = Threads(3), [0, 0], threading.Lock()
        full = threading.Event()

        def work() -> None:
            with lock:
                most[0] += 1
                most[1] = max(most)
                if most[0] == 3:
                    full.set()
            full.wait(20)
            with lock:
                most[0] -= 1

        await asyncio.gather(*(threads.call(work) for _ in range(9)))
        return most[1]

    assert asyncio.run(scene()) == 3


def test_coroutines_stay_in_the_loop_and_what_functions_raise_is_raised() -> None:
    async def here() -> str:
        return threading.current_thread().name

    def raises(error: BaseException) -> None:
        raise error

    async def scene() -> None:
        threads = Threads(1)
        assert await threads.call(here) == threading.main_thread().name
        assert await threads.call(lambda: here()) == threading.main_thread().name
        assert await threads.call(lambda: threading.current_thread().name) != threading.main_thread().name
        with pytest.raises(ZeroDivisionError):
            await threads.call(raises, ZeroDivisionError())
        with pytest.raises(RuntimeError, match="StopIteration: 3"):
            await threads.call(raises, StopIteration(3))

    asyncio.run(scene())


def test_a_function_that_hangs_is_left_behind_and_gives_up_its_place(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    async def scene() -> str:
        threads = Threads(1)
        with pytest.raises(TimeoutError, match=r"\b0\.05 s"):
            await threads.call(over.wait, timeout=0.05)
        with pytest.raises(TimeoutError, match=r"\b0\.05 s"):
            await threads.call(asyncio.sleep, 60, timeout=0.05)
        return await threads.call(lambda: "next", timeout=20)

    try:
        assert asyncio.run(scene()) == "next"
    finally:
        over.set()
    assert [(record.levelno, record.args) for record in caplog.records] == [(logging.WARNING, ("wait", 1))]


class Judge(BaseEnv[int]):
    """Scores by the thread that it is in."""

    name = "judge"

    async def get_next_item(self) -> int:
        return 1

    def score(self, item: int, answer: str) -> float:
        return float(threading.current_thread() is threading.main_thread())

    async def evaluate(self) -> dict[str, float]:
        return {}


class Quick(Judge):
    """Scores in no time."""

    score_in_thread = False


@pytest.mark.parametrize(("kind", "score"), [(Judge, 0.0), (Quick, 1.0)])
def test_scores_are_given_in_a_thread_unless_the_environment_says_otherwise(kind: type[Judge], score: float) -> None:
    env: Any = kind(BaseEnvConfig(tokenizer_name="m"), None, None)  # type: ignore[arg-type]
    answers = [Completion([1], [], [], text, "stop", None) for text in ("a", "b")]
    assert asyncio.run(env.score_group(1, answers)) == [score, score]


class Tools(MultiTurnEnv[int]):
    """Two tools: one that hangs, one whose argument has a name of ours."""

    name = "tools"
    over = threading.Event()

    async def get_next_item(self) -> int:
        return 1

    def opening(self, item: int) -> list[dict[str, Any]]:
        return []

    async def score_conversation(self, item: int, talk: Any) -> float:
        return 0.0

    async def evaluate(self) -> dict[str, float]:
        return {}

    def tools(self) -> list[Any]:
        def hang() -> None:
            self.over.wait()

        def wait(timeout: float, function: str) -> dict[str, Any]:
            return {"timeout": timeout, "function": function}

        return [hang, wait]


def test_the_policy_hears_that_a_tool_took_too_long(caplog: pytest.LogCaptureFixture) -> None:
    config = MultiTurnConfig(
        tokenizer_name="m", tool_format="hermes", tool_timeout=5.0
    )  # enough for the second tool on a slow machine
    env = Tools(config, None, None)  # type: ignore[arg-type]
    text = (
        '<tool_call>{"name": "hang"}</tool_call>'
        '<tool_call>{"name": "wait", "arguments": {"timeout": 3, "function": "f"}}</tool_call>'
    )
    try:
        with caplog.at_level(logging.WARNING):
            heard = asyncio.run(env.call_tools(text))
    finally:
        env.over.set()
    hung, answered = [each["content"] for each in heard]
    assert hung.startswith("TimeoutError: ") and "5 s" in hung
    assert answered == '{"timeout": 3, "function": "f"}'
    assert [record.args for record in caplog.records] == [("hang", 1)]
