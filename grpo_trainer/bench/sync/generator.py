"""Keeps a server busy from a separate process, with a fixed number of in-flight sequences, until it is killed.

`python -m grpo_trainer.bench.sync.generator JSON` with the fields of `Demand`. It asks for 8 completions a request, so
that its own work is small: 32 connections hold 256 sequences.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import httpx
import msgspec

from vllm_server.protocol import GENERATE_ROUTE

GROUP = 8


class Demand(msgspec.Struct, frozen=True):
    """The load on the server at `url`.

    Attributes:
        sequences: number of in-flight sequences, a multiple of 8.
        vocab: token ids of the prompts are below this.
        routing: which version answers.
    """

    url: str
    sequences: int
    prompt_len: int
    completion_len: int
    vocab: int
    routing: dict[str, Any]


async def keep_busy(demand: Demand) -> None:
    """Never returns.

    Raises:
        httpx.HTTPError: the server refused, or is gone.
    """
    connections = demand.sequences // GROUP
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with (
        httpx.AsyncClient(base_url=demand.url, timeout=600.0, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for index in range(connections):
            tasks.create_task(_ask_for_ever(http, demand, index, connections))


async def _ask_for_ever(http: httpx.AsyncClient, demand: Demand, index: int, connections: int) -> None:
    draw = random.Random(index)
    # The first completions end one after the other: else all requests would end, and start, at the same time.
    length = max(1, demand.completion_len * (index + 1) // connections)
    while True:
        prompt = draw.choices(range(2, demand.vocab), k=demand.prompt_len)
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "n": GROUP,
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 1.0,
            **demand.routing,
        }
        answer = await http.post(GENERATE_ROUTE, json=body)
        if answer.status_code != 200:
            raise httpx.HTTPError(f"{answer.status_code}: {answer.text[:500]}")
        length = demand.completion_len


if __name__ == "__main__":
    asyncio.run(keep_busy(msgspec.json.decode(sys.argv[1], type=Demand)))
