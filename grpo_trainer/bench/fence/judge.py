"""Sends requests and judges the answers, in a separate process: `python -m grpo_trainer.bench.fence.judge`.

Reads one line of JSON with the fields of `Case`; asks, and prints a line once it has an answer; goes on until its
standard input ends; then prints what it found: `Verdicts`, or the answers themselves if it was told of no patterns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import httpx
import msgspec

from grpo_trainer.bench.fence.patterns import Answer, Heard, References, Verdicts, answer_of, patterns_of, request
from vllm_server.protocol import GENERATE_ROUTE

LEAST = 4
"""Answers to each prompt, where they are what is wanted."""


class Case(msgspec.Struct, frozen=True):
    """What is asked, and what may come back.

    Attributes:
        references: what the patterns answer; None: that is to be found out.
        even: the pattern of versions of even number; None: versions say nothing, writes are not announced.
    """

    url: str
    requests: int
    prompts: list[list[int]]
    references: References | None = None
    even: int | None = None


async def ask(case: Case, take: Callable[[int, Answer, int, int], None], enough: Callable[[], bool]) -> None:
    """Send requests until standard input has ended and there are enough answers.

    Args:
        take: receives a prompt's number, an answer to it, and the versions at the answer's start and end.
    """
    stop, said = asyncio.Event(), False
    limits = httpx.Limits(max_connections=case.requests, max_keepalive_connections=case.requests)
    async with httpx.AsyncClient(base_url=case.url, timeout=300.0, limits=limits, trust_env=False) as http:

        async def keep_asking(index: int) -> None:
            nonlocal said
            while not (stop.is_set() and enough()):
                index = (index + 1) % len(case.prompts)
                response = await http.post(GENERATE_ROUTE, json=request(case.prompts[index]))
                if response.status_code != 200:
                    raise httpx.HTTPError(f"{response.status_code}: {response.text[:500]}")
                take(index, *answer_of(response.content, case.prompts[index]))
                if not said:
                    said = True
                    print("judging", flush=True)

        async with asyncio.TaskGroup() as tasks:
            for index in range(case.requests):
                tasks.create_task(keep_asking(index))
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            stop.set()


def listen(case: Case) -> Heard:
    """Collect all answers, with a minimum for each prompt."""
    heard: Heard = [[] for _ in case.prompts]
    asyncio.run(
        ask(
            case,
            take=lambda prompt, answer, begun, ended: heard[prompt].append(answer),
            enough=lambda: min(map(len, heard)) >= LEAST,
        )
    )
    return heard


def judge(case: Case, references: References) -> Verdicts:
    """Compare all answers with those of the patterns."""
    verdicts = Verdicts()

    def take(prompt: int, answer: Answer, begun: int, ended: int) -> None:
        verdicts.judge(references, prompt, answer, patterns_of(begun, ended, case.even))

    asyncio.run(ask(case, take, enough=lambda: True))
    return verdicts


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.readline(), type=Case)
    found = listen(given) if given.references is None else judge(given, given.references)
    print(msgspec.json.encode(found).decode(), flush=True)
