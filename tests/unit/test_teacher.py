"""A teacher's likeliest tokens in groups, read from both kinds of servers that tell them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from environments.api import wire
from environments.api.groups import read
from environments.config import BaseEnvConfig
from environments.peers.teacher import Teacher
from tests.stand_ins import Asked, Reply, answering

GROUP = wire.ScoredData(
    tokens=[[5, 6, 7, 8], [5, 6, 9]],
    masks=[[-100, -100, 7, 8], [-100, -100, 9]],
    scores=[1.0, 0.0],
)


def position(token: int) -> dict[int, float]:
    """What the teacher thinks in the place of a token: the one after it is likelier, two after it less so."""
    return {token: -1.0, token + 1: -0.5, token + 2: -3.0}


def routes(kind: str) -> dict[str, Any]:
    if kind == "grpo":
        return {"/bridge/info": {"boot_id": "b", "policy_version": 0}}
    return {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "big", "owned_by": "vllm"}]}}


async def annotated(url: str, group: wire.ScoredData, **changes: Any) -> wire.ScoredData:
    settings = {"tokenizer_name": "m", "teacher_url": url, "retry_timeout": 30.0}
    teacher = Teacher.of(BaseEnvConfig(**(settings | changes)))
    assert teacher is not None
    try:
        return await teacher.annotate(group)
    finally:
        await teacher.close()


def annotate(kind: str, group: wire.ScoredData = GROUP, **changes: Any) -> tuple[wire.ScoredData, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def handle(request: Asked) -> Reply:
        if request.method == "GET":
            known = routes(kind).get(request.path)
            return Reply(json=known) if known else Reply(404)
        body = request.json()
        asked.append(body)
        prompt = body["prompt"]
        tokens = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        likely = [None, *(position(token) for token in tokens[1:])]
        if kind == "grpo":
            answer = {"text": [""], "prompt": None, "finish_reasons": ["length"], "policy_version": 0, "model": "big"}
            answer |= {"prompt_token_ids": tokens, "token_ids": [[1]], "prompt_logprobs": likely}
            return Reply(json=answer)
        spelt = [
            p and {str(t): {"logprob": lp, "rank": 1, "decoded_token": "x"} for t, lp in p.items()} for p in likely
        ]
        choice = {"text": "", "finish_reason": "length", "prompt_logprobs": spelt}
        return Reply(json={"choices": [choice]})

    with answering(handle) as url:
        return asyncio.run(annotated(url, group, **({"teacher_top_k": 2} | changes))), asked


@pytest.mark.parametrize("kind", ["grpo", "vllm"])
def test_the_likeliest_tokens_stand_where_the_policy_spoke(kind: str) -> None:
    group, asked = annotate(kind)
    assert group.distill_token_ids == [[[], [], [8, 7], [9, 8]], [[], [], [10, 9]]]
    assert group.distill_logprobs == [[[], [], [-0.5, -1.0], [-0.5, -1.0]], [[], [], [-0.5, -1.0]]]
    assert (group.tokens, group.scores) == (GROUP.tokens, GROUP.scores)
    assert {body["prompt_logprobs"] for body in asked} == {2} and len(asked) == 2
    assert wire.unpack(read(wire.encode(group), wire.JSON).group) == group  # as the rollout API takes it


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [({"teacher_top_k": 1}, 1), ({"skip_teacher_top_k": True}, None), ({"teacher_top_k": 0}, None)],
)
def test_a_group_may_say_otherwise(overrides: dict[str, Any], kept: int | None) -> None:
    group, _ = annotate("grpo", msgspec.structs.replace(GROUP, group_overrides=overrides))
    assert (group.distill_token_ids and len(group.distill_token_ids[0][2])) == kept


def test_without_a_teacher_there_is_none() -> None:
    assert Teacher.of(BaseEnvConfig(tokenizer_name="m")) is None
