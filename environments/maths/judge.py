"""Judge mathematical answers, and search answers for patterns, in separate processes, which can be ended."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, Final

from environments.config import ConfigError
from environments.maths.answer_form import AnswerForm
from environments.scoring import in_thread

WORKER: Final = "environments.maths.judge_worker"
START_LIMIT_S: Final = 120.0
LONGEST_ANSWER: Final = 20_000
"""Characters of an answer that are judged: the last ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one answer: whether it is right in the form that was asked for, or in any form."""

    strict: bool
    lenient: bool
    judged: bool = True
    """Whether the judge finished. An unjudged answer counts as wrong."""


UNJUDGED: Final = Verdict(strict=False, lenient=False, judged=False)


class MathJudge:
    """A few worker processes (`environments.maths.judge_worker`); each judges one answer, or searches a group's
    answers, at a time.

    A worker that takes more than `limit_s` seconds is killed, and its answer stays unjudged.
    Threads wait for them: a process of asyncio that is cancelled during its start keeps its event loop from ending.
    """

    def __init__(self, workers: int = 2, limit_s: float = 10.0) -> None:
        """Raise a ConfigError if math-verify is not installed; workers start with the first answers."""
        if find_spec("math_verify") is None:
            raise ConfigError(
                "is not installed; it judges the answers", field="math-verify", fix="pip install 'math-verify>=0.8'"
            )
        self.limit_s = limit_s
        self.running: set[Popen[bytes]] = set()
        self._idle: asyncio.LifoQueue[Popen[bytes] | None] = asyncio.LifoQueue()
        for _ in range(workers):
            self._idle.put_nowait(None)

    async def judge(self, gold: str, answer: str, form: AnswerForm) -> Verdict:
        """Return the verdict on one answer. Wait for a free worker, but at most `limit_s` for its verdict."""
        reply = await self._reply({"gold": gold, "answer": answer[-LONGEST_ANSWER:], "form": form})
        return Verdict(**json.loads(reply)) if reply else UNJUDGED

    async def search(self, pattern: str, texts: Sequence[str]) -> list[bool]:
        """Return for each text whether a regular expression is found in it; raise TimeoutError after `limit_s`."""
        reply = await self._reply({"pattern": pattern, "texts": list(texts)})
        if not reply:
            raise TimeoutError(f"no result within {self.limit_s:g} s")
        return json.loads(reply)["found"]

    async def _reply(self, request: dict[str, Any]) -> bytes:
        """Return a worker's answer line; nothing if it took too long, or ended."""
        worker, reply = await self._idle.get(), b""
        try:
            worker = worker or await self._start()
            with suppress(OSError, ValueError):  # it took too long; or the pipe is closed, by its end or by `close`
                async with asyncio.timeout(self.limit_s):
                    reply = await in_thread(_ask, worker, json.dumps(request).encode() + b"\n")
            return reply
        finally:
            # An interrupted worker would answer the next request with this request's verdict.
            self._idle.put_nowait(worker if reply else await self._end(worker))

    async def _start(self, *, again: bool = True) -> Popen[bytes]:
        """Start a worker; one that is killed during its start, such as for want of memory, is started again once."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        worker = Popen(  # here, and not in a thread: the kernel ends a worker with the thread that started it
            [sys.executable, "-m", WORKER],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # math-verify prints whole answers there
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C must reach only the environment, which stops the worker
        )
        self.running.add(worker)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                ready = await in_thread(_ask, worker)
        except BaseException:  # also a cancellation: nobody else knows the worker yet
            await self._end(worker)
            raise
        if ready:
            return worker
        was_closed = worker not in self.running  # `close` takes out those that it ends
        self.running.discard(worker)
        await in_thread(_finish, worker)
        if worker.returncode < 0 and again and not was_closed:
            return await self._start(again=False)
        raise RuntimeError(f"the judge ended with status {worker.returncode} during its start; try python -m {WORKER}")

    async def _end(self, worker: Popen[bytes] | None) -> None:
        if worker is not None:
            self.running.discard(worker)
            worker.kill()
            await in_thread(_finish, worker)

    async def close(self) -> None:
        for worker in list(self.running):
            await self._end(worker)


def _ask(worker: Popen[bytes], request: bytes = b"") -> bytes:
    """Return a worker's next line, after a request; nothing if it has ended."""
    assert worker.stdin is not None and worker.stdout is not None, "started with pipes"
    worker.stdin.write(request)
    worker.stdin.flush()
    return worker.stdout.readline()


def _finish(worker: Popen[bytes]) -> None:
    """Wait for the end of a worker that has closed its output or was killed, and close its pipes."""
    worker.wait()
    for pipe in filter(None, (worker.stdout, worker.stdin)):
        with suppress(OSError):  # a request that it has not read
            pipe.close()
