"""Judges mathematical answers in processes of their own, so that no answer can hang the environment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from environments.config import ConfigError
from environments.maths.answer_form import AnswerForm

WORKER = "environments.maths.judge_worker"
START_LIMIT_S = 120.0
LONGEST_ANSWER = 20_000
"""Characters: of a longer answer only the end is judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of one answer.

    Attributes:
        strict: It is right, in the form that was asked for.
        lenient: It is right for a reader who looks for it anywhere.
        judged: A judge came to an end with it; without one it counts as wrong.
    """

    strict: bool
    lenient: bool
    judged: bool = True


UNJUDGED = Verdict(strict=False, lenient=False, judged=False)


class MathJudge:
    """A few worker processes (`environments.maths.judge_worker`), each with one answer at a time.

    Attributes:
        limit_s: seconds after which a worker is ended and its answer stays unjudged.
        running: the workers that run.
    """

    def __init__(self, workers: int = 2, limit_s: float = 10.0) -> None:
        """Starts nothing yet.

        Raises:
            ConfigError: math-verify is not installed.
        """
        if find_spec("math_verify") is None:
            raise ConfigError(
                "judges the answers, but is not installed", field="math-verify", fix="pip install 'math-verify>=0.8'"
            )
        self.limit_s = limit_s
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        for _ in range(workers):
            self._idle.put_nowait(None)
        self.running: set[asyncio.subprocess.Process] = set()

    async def judge(self, gold: str, answer: str, form: AnswerForm) -> Verdict:
        """The verdict on one answer; waits for a free worker, but not for ever for what it says."""
        worker = await self._idle.get()
        request = {"gold": gold, "answer": answer[-LONGEST_ANSWER:], "form": form}
        reply = b""
        try:
            worker = worker or await self._start()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limit_s):
                    reply = await self._ask(worker, request)
        finally:
            # One that was interrupted would answer the next request with this one's verdict.
            self._idle.put_nowait(worker if reply else await self._end(worker))
        return Verdict(**json.loads(reply)) if reply else UNJUDGED

    async def close(self) -> None:
        """Ends the workers."""
        for worker in list(self.running):
            await self._end(worker)

    async def _ask(self, worker: asyncio.subprocess.Process, request: dict[str, str]) -> bytes:
        """A line of answer, or nothing if the worker has ended."""
        assert worker.stdin is not None and worker.stdout is not None, "started with pipes"
        worker.stdin.write(json.dumps(request).encode() + b"\n")
        with suppress(ConnectionError):  # it ended meanwhile: then there is nothing to read either
            await worker.stdin.drain()
        return await worker.stdout.readline()

    async def _start(self) -> asyncio.subprocess.Process:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            WORKER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # math-verify repeats whole answers there
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is for us: we end it
        )
        self.running.add(worker)
        assert worker.stdout is not None, "started with a pipe"
        async with asyncio.timeout(START_LIMIT_S):
            ready = await worker.stdout.readline()
        if not ready:
            status = await worker.wait()
            raise RuntimeError(f"the judge ended with status {status} as it started; try python -m {WORKER}")
        return worker

    async def _end(self, worker: asyncio.subprocess.Process | None) -> None:
        if worker is None:
            return
        self.running.discard(worker)
        with suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()
