"""Tools and scores that take their time: nobody waits for them but who asked, and none of them for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.inference import Completion
from environments.threads import Threads


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
