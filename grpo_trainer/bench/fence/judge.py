"""Asks and judges, in a process of its own: `python -m grpo_trainer.bench.fence.judge`.

Reads one line of JSON with the fields of `Case`; asks, and prints a line once it has an answer; goes on until its
standard input ends; then prints what it found.
"""

from __future__ import annotations

import asyncio
import sys

import httpx
import msgspec

from grpo_trainer.bench.fence.patterns import Answer, References, Verdicts, answer_of, patterns_of, request
from vllm_server.protocol import GENERATE_ROUTE


class Case(msgspec.Struct, frozen=True):
    """What is asked, and what may come back.

    Attributes:
        answers: of each pattern to each prompt, as in `References`.
        even: the pattern of versions of even number; None: versions say nothing, writes are not announced.
    """

    url: str
    requests: int
    prompts: list[list[int]]
    answers: tuple[list[list[Answer]], list[list[Answer]]]
    even: int | None


async def judge(case: Case) -> Verdicts:
    """Until standard input ends."""
    references, verdicts, stop = References(case.answers), Verdicts(), asyncio.Event()
    limits = httpx.Limits(max_connections=case.requests, max_keepalive_connections=case.requests)
    async with httpx.AsyncClient(base_url=case.url, timeout=300.0, limits=limits, trust_env=False) as http:

        async def keep_asking(index: int) -> None:
            while not stop.is_set():
                index = (index + 1) % len(case.prompts)
                response = await http.post(GENERATE_ROUTE, json=request(case.prompts[index]))
                if response.status_code != 200:
                    raise httpx.HTTPError(f"{response.status_code}: {response.text[:500]}")
                answer, begun, ended = answer_of(response.content)
                verdicts.judge(references, index, answer, patterns_of(begun, ended, case.even))
                if verdicts.answers == 1:
                    print("judging", flush=True)

        async with asyncio.TaskGroup() as tasks:
            for index in range(case.requests):
                tasks.create_task(keep_asking(index))
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            stop.set()
    return verdicts


if __name__ == "__main__":
    found = asyncio.run(judge(msgspec.json.decode(sys.stdin.readline(), type=Case)))
    print(msgspec.json.encode(found.as_dict()).decode(), flush=True)
