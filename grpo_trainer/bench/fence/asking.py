"""Sends requests and writes down the answers, in a separate process: `python -m grpo_trainer.bench.fence.asking`.

Reads a line of JSON with the fields of `Case`; writes each answer as a line of JSON with the fields of `Answer`, until
its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from vllm_server.protocol import GENERATE_ROUTE, GenerateResponse


class Case(msgspec.Struct, frozen=True):
    """What is asked.

    Attributes:
        requests: in flight at one time.
        least: answers to each prompt that are waited for after the end of standard input.
    """

    url: str
    requests: int
    prompts: list[list[int]]
    least: int = 0


class Answer(msgspec.Struct, frozen=True):
    """One forward pass over a prompt.

    Attributes:
        prompt: its number.
        begun, ended: the policy versions at the answer's start and end.
        logprobs: of the prompt's tokens, but the first. The mean over many positions has less rounding than any single
            one.
    """

    prompt: int
    begun: int
    ended: int
    logprobs: list[float]


def request(prompt: Sequence[int]) -> dict[str, Any]:
    """Return a request for one forward pass over the prompt.

    A request for prompt logprobs does not use the prefix cache, so all logprobs are of one pass. Only a prompt that is
    split for lack of room (`max_num_batched_tokens`) would need two.
    """
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True, "seed": 0}
    return {"prompt": {"prompt_token_ids": list(prompt)}, **sampling}


def answer_of(body: bytes, number: int, prompt: Sequence[int]) -> Answer:
    """Return what the server's response says."""
    response = msgspec.json.decode(body, type=GenerateResponse)
    assert response.prompt_logprobs is not None, "asked with prompt_logprobs"
    later = zip(prompt[1:], response.prompt_logprobs[1:], strict=True)
    end = response.policy_version if response.policy_version_end is None else response.policy_version_end
    logprobs = [entry[token] for token, entry in later if entry is not None]
    return Answer(number, response.policy_version, end, logprobs)


async def ask(case: Case) -> None:
    """Send requests until standard input has ended and there are enough answers."""
    stop = asyncio.Event()
    answers = [0] * len(case.prompts)
    limits = httpx.Limits(max_connections=case.requests, max_keepalive_connections=case.requests)
    async with httpx.AsyncClient(base_url=case.url, timeout=300.0, limits=limits, trust_env=False) as http:

        async def keep_asking(index: int) -> None:
            while not (stop.is_set() and min(answers) >= case.least):
                index = (index + 1) % len(case.prompts)
                response = await http.post(GENERATE_ROUTE, json=request(case.prompts[index]))
                if response.status_code != 200:
                    raise httpx.HTTPError(f"{response.status_code}: {response.text[:500]}")
                answer = answer_of(response.content, index, case.prompts[index])
                answers[index] += 1
                print(msgspec.json.encode(answer).decode(), flush=True)

        async with asyncio.TaskGroup() as tasks:
            for index in range(case.requests):
                tasks.create_task(keep_asking(index))
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            stop.set()


if __name__ == "__main__":
    asyncio.run(ask(msgspec.json.decode(sys.stdin.readline(), type=Case)))
