"""Scores and tools that take too long are given up, and code that blocks the event loop ends its process by name."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.demo_model.model import build_tokenizer
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.inference import Completion
from environments.running import cli
from environments.scoring import ScoreTimeout, Scoring, Threads
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


def test_scoring_raises_what_the_code_raises() -> None:
    async def raises(error: BaseException) -> None:
        raise error

    async def scene() -> None:
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

    asyncio.run(scene())


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_scoring_an_interrupt_of_the_code_is_an_error_of_its_group(error: BaseException, in_thread: bool) -> None:
    def score() -> float:
        raise error

    async def score_in_loop() -> float:
        raise error

    async def scene() -> None:
        with pytest.raises(RuntimeError) as raised:
            await Scoring(60.0).within("item", Threads(1).call(score) if in_thread else score_in_loop())
        assert raised.value.__cause__ is error

    asyncio.run(scene())


def test_threads_limit_their_number_and_leave_the_loop_free() -> None:
    async def scene() -> int:
        threads, most, lock, full = Threads(3), [0, 0], threading.Lock(), threading.Event()
        asyncio.get_running_loop().call_later(0.05, full.set)  # never, if a function blocked the loop

        def work() -> None:
            with lock:
                most[0] += 1
                most[1] = max(most)
            assert full.wait(20)
            with lock:
                most[0] -= 1

        await asyncio.gather(*(threads.call(work) for _ in range(9)))
        return most[1]

    assert asyncio.run(scene()) == 3


def test_threads_coroutines_stay_in_the_loop_and_errors_are_raised() -> None:
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


def test_threads_a_time_limit_begins_when_a_thread_is_free() -> None:
    class Env(BaseEnv[int]):
        def score(self, item: int, answer: str) -> float:
            return 1.0

    async def scene() -> None:
        env = Env(BaseEnvConfig(tokenizer_name="demo", max_threads=1), cast("Any", None), build_tokenizer())
        work = asyncio.ensure_future(asyncio.sleep(0, 1.0))
        async with env.threads.slot():
            limited = asyncio.create_task(env.scored_within(0, work), context=contextvars.Context())
            await work
            await asyncio.sleep(0.05)
            assert not limited.done(), "it has neither begun nor been given up"
            assert await env.threads.call(lambda: 2) == 2, "a group has one place for all its calls"
        assert await limited == 1.0

    asyncio.run(scene())


def test_threads_a_hung_function_is_named_and_gives_its_place_to_others(caplog: pytest.LogCaptureFixture) -> None:
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

    async def scene() -> str:
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
        return await threads.call(lambda: "next", timeout=20)

    try:
        assert asyncio.run(scene()) == "next"
    finally:
        over.set()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all(re.search(r"\bin solve\n", message) for message in messages)


BLOCKING = """
import asyncio, logging, re, sys, time
from environments import scoring

scoring.LOOK_S, scoring.NATIVE_S = 0.2, 6.0
logging.basicConfig(format="%(levelname)s %(message)s")

async def evaluate():
    {block}

async def main():
    watch = scoring.LoopWatch({seconds})
    async with watch:
        watch.is_armed = {armed}
        await asyncio.sleep(0.5)
        await evaluate()
        await asyncio.sleep(0.5)
    print("moved", flush=True)

asyncio.run(main())
"""
NATIVE = "re.match('(a+)+$', 'a' * 60 + 'b')"


@pytest.mark.parametrize(
    ("block", "seconds", "armed", "status", "named"),
    [
        ("time.sleep(20)", 1.6, True, os.EX_SOFTWARE, True),
        ("while True: pass", 0.1, True, os.EX_SOFTWARE, True),
        (NATIVE, 1.6, True, 1, False),  # no Python code runs meanwhile
        ("time.sleep(2)", 60, True, 0, False),
        ("time.sleep(3)", 1.6, False, 0, False),  # as in setup()
        ("sys._getframe().f_trace = print; time.sleep(9)", 0.1, True, 0, False),  # as in a debugger
    ],
)
def test_loop_watch_ends_a_process_whose_event_loop_is_blocked(
    block: str, seconds: float, armed: bool, status: int, named: bool
) -> None:
    script = BLOCKING.format(block=block, seconds=seconds, armed=armed)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("" if status else "moved\n")
    assert done.stderr.startswith("ERROR ") == named
    assert bool(re.search(r"\bin evaluate$", done.stderr, re.MULTILINE)) == bool(status)


BLOCKED = """
import asyncio, time
from environments.running import cli

async def score(stop):
    {block}

async def main():
    stop = asyncio.Event()
    cli._stop_on_signals(stop, status=7)
    try:
        print("blocks", flush=True)
        await score(stop)
    finally:
        await asyncio.sleep(0.01)
        print("left", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(("block", "status"), [("while True: pass", 7), ("await stop.wait()", 0)])
def test_cli_a_signal_ends_a_process_whose_event_loop_is_blocked(block: str, status: int) -> None:
    command = [sys.executable, "-c", BLOCKED.format(block=block)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "blocks\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert output == ("" if status else "left\n")
        assert process.returncode == status


STUBBORN = """
import asyncio
from environments.running import cli

async def main():
    stop = asyncio.Event()
    cli._stop_on_signals(stop, status=7)
    print("works", flush=True)
    await stop.wait()
    print("stops", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_cli_a_second_interrupt_ends_a_process_that_does_not_stop() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("works\n", "stops\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


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


@pytest.mark.parametrize("left", ["clings()", "asyncio.to_thread(time.sleep, 3600)"])
@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("raise ValueError('mine')", 1)])
def test_cli_a_process_ends_although_code_stays_behind(left: str, end: str, status: int) -> None:
    command = [sys.executable, "-c", CLINGING.format(left=left, end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
