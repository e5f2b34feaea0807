"""Scoring that does not end is reported with its stack and given up, whatever it waits for or blocks."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from environments import scoring, stacks
from environments.scoring import ScoreTimeout, Scoring, allow_interrupts
from environments.threads import Threads

SECONDS = 0.1


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks more often than it does for users."""
    monkeypatch.setattr(scoring, "MOVES_S", 0.1)
    monkeypatch.setattr(scoring, "LOOK_AGAIN_S", 0.05)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    allow_interrupts()
    yield
    signal.signal(signal.SIGUSR1, before)


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


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("waiting", [False, True])
def test_code_that_blocks_the_event_loop_is_interrupted(waiting: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def blocks() -> float:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            pass
        return 1.0

    async def sleeps() -> float:
        time.sleep(60)
        return 1.0

    async def scene() -> list[Any]:
        watched, over = Scoring(SECONDS), asyncio.Event()

        async def innocent() -> float:
            await over.wait()
            return 1.0

        work = [watched.within("late", innocent())] if waiting else []
        work += [watched.within("blocked", blocks())]
        asyncio.get_running_loop().call_later(2 * SECONDS, over.set)
        found = await asyncio.gather(*work, return_exceptions=True)
        with pytest.raises(ScoreTimeout):
            await watched.within("asleep", sleeps())
        return found

    found = asyncio.run(scene())
    assert isinstance(found[-1], ScoreTimeout) and "'blocked'" in found[-1].got
    # The group that was only kept waiting had its score as soon as the loop moved again.
    assert found[:-1] == [1.0] * waiting
    said = [record.getMessage() for record in caplog.records if record.name == scoring.__name__]
    assert len(said) == 2  # one for each time that the loop was blocked
    assert all("threads.call" in each for each in said)  # what to do about it
    assert re.search(r"\bin blocks\n", said[0]) and re.search(r"\bin sleeps\n", said[1])


def test_without_interrupts_blocked_code_is_reported_and_left_alone() -> None:
    said, messages = threading.Event(), list[str]()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == scoring.__name__:
                messages.append(record.getMessage())
                said.set()

    async def blocks() -> bool:
        return said.wait(20)

    heard, root = Heard(), logging.getLogger()
    root.addHandler(heard)  # the last handler of all: none gets the record when the test has ended
    try:
        assert asyncio.run(Scoring(SECONDS).within("item", blocks()))
    finally:
        root.removeHandler(heard)
    assert re.search(r"\bin blocks\n", messages[0])


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
    assert stacks.of_thread(thread.ident, Scoring.within.__code__) == ""


BLOCKED = """
import asyncio, time
from environments.running import cli

async def main():
    stop = asyncio.Event()
    cli._stop_on_signals(stop, status=7)
    try:
        print("blocks", flush=True)
        {block}
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
        assert said == "left\n"
        assert process.returncode == status
