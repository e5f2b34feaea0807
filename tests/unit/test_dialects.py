"""What kind of server answers, and its token ids and logprobs as it gives them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from environments.config import ConfigError, ServerConfig
from environments.peers.http import PeerError, PeerRefused
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.trajectory import Trajectory
from tests.stand_ins import Asked, Reply, answering

OURS = {
    "text": ["46"],
    "prompt": None,
    "finish_reasons": ["stop"],
    "policy_version": 7,
    "model": "policy-v7",
    "prompt_token_ids": [3, 4],
    "token_ids": [[6, 1]],
    "logprobs": [[[{"6": -0.5}], [{"1": -0.25}]]],
}
VLLM_CHOICE = {
    "index": 0,
    "text": "46",
    "finish_reason": "length",
    "logprobs": {"tokens": ["46", "<e>"], "token_logprobs": [-0.5, -0.25], "text_offset": [0, 2]},
    "token_ids": [6, 1],
    "prompt_token_ids": [3, 4],
}
MODELS = {"object": "list", "data": [{"id": "Qwen", "object": "model", "owned_by": "vllm"}]}
SERVERS: dict[str, dict[str, Any]] = {
    "grpo": {"/bridge/info": {"boot_id": "b", "policy_version": 7}, "/generate": OURS, "/version": {"version": "0.25"}},
    "vllm": {"/version": {"version": "0.32.0"}, "/v1/models": MODELS, "/v1/completions": {"choices": [VLLM_CHOICE]}},
    "openai": {
        "/v1/models": {"data": [{"id": "Qwen", "owned_by": "someone"}]},
        "/v1/completions": {"choices": [VLLM_CHOICE]},
    },
}
FOUND = {
    "grpo": ("grpo", "7"),
    "vllm": ("vLLM", "0.32.0", "Qwen"),
    "openai": ("OpenAI", "Qwen"),
}


def ask(
    routes: dict[str, Any], sampling: Sampling | None = None, times: int = 1, **settings: Any
) -> tuple[list[Completion], list[tuple[str, Any]]]:
    """The completions of a server that has these routes, and what it was asked."""
    asked: list[tuple[str, Any]] = []

    def handle(request: Asked) -> Reply:
        asked.append((request.path, request.json() if request.content else None))
        answer = routes.get(request.path)
        return Reply(404) if answer is None else Reply(json=answer)

    async def scene(url: str) -> list[Completion]:
        client = InferenceClient(ServerConfig(base_url=url, **settings), patience=1.0)
        try:
            for _ in range(times - 1):
                await client.generate([3, 4], 1, sampling or Sampling(max_tokens=5))
            return await client.generate([3, 4], 1, sampling or Sampling(max_tokens=5))
        finally:
            await client.close()

    with answering(handle) as url:
        return asyncio.run(scene(url)), asked


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_is_known_by_what_it_answers_and_asked_for_ids(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        (completion,), asked = ask(SERVERS[kind], times=2)
    (said,) = [record.message for record in caplog.records if record.name == "environments.peers.inference"]
    assert all(part in said for part in FOUND[kind])
    assert (completion.token_ids, completion.rollout_logprobs) == ([6, 1], [-0.5, -0.25])
    assert completion.policy_version == (7 if kind == "grpo" else None)
    assert completion.finish_reason == ("length" if kind in ("vllm", "openai") else "stop")
    assert [path for path, body in asked if body is None].count("/bridge/info") == 1  # once, not with every request
    bodies = [body for _, body in asked if body is not None]
    assert len(bodies) == 2 and bodies[0] == bodies[1]


def test_vllm_is_asked_for_the_plain_distribution() -> None:
    _, asked = ask(SERVERS["vllm"], Sampling(max_tokens=5, temperature=0.5, stop=("\n",)))
    body = asked[-1][1]
    assert (body["model"], body["prompt"], body["return_token_ids"]) == ("Qwen", [3, 4], True)
    assert (body["n"], body["temperature"], body["top_p"], body["top_k"]) == (1, 0.5, 1.0, -1)
    assert (body["stop"], body["max_tokens"]) == (["\n"], 5)


@pytest.mark.parametrize("kind", SERVERS)
def test_what_leaves_out_tokens_is_asked_for_and_noted(kind: str) -> None:
    (completion,), asked = ask(SERVERS[kind], Sampling(max_tokens=5, top_k=3, top_p=0.9))
    body = asked[-1][1]
    assert (body["top_k"], body["top_p"]) == (3, 0.9) and "min_p" not in body
    assert completion.cuts == {"top_p": 0.9, "top_k": 3}


@pytest.mark.parametrize(("kind", "server_type"), [("grpo", "vllm"), ("openai", "openai")])
def test_a_kind_that_was_named_is_not_asked_about(kind: str, server_type: str) -> None:
    _, asked = ask(SERVERS[kind], server_type=server_type, model_name="Qwen")
    assert [body is None for _, body in asked] == [False]


def test_an_openai_compatible_server_needs_a_models_name() -> None:
    with pytest.raises(ConfigError) as error:
        ask(SERVERS["openai"], server_type="openai")
    assert error.value.field == "--openai.model_name" and "--openai.server_type openai" in error.value.summary


def test_vllms_raw_logprobs_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ask(SERVERS["vllm"], Sampling(max_tokens=5, temperature=0.5), times=3)
    assert caplog.text.count("--logprobs-mode processed_logprobs") == 1
    caplog.clear()
    ask(SERVERS["vllm"], times=3)
    assert not caplog.text


def test_text_without_ids_is_enough_to_evaluate_and_not_to_train() -> None:
    choice = {"index": 0, "text": "46", "finish_reason": "stop", "logprobs": None}
    (completion,), _ = ask({**SERVERS["openai"], "/v1/completions": {"choices": [choice]}})
    assert (completion.text, completion.token_ids) == ("46", [])
    with pytest.raises(PeerError) as error:
        Trajectory.of(completion, 1.0)
    assert error.value.wanted == "token_ids"


@pytest.mark.parametrize(
    ("kind", "route", "answer", "parts"),
    [
        ("vllm", "/v1/completions", {"choices": []}, {"got": "0 completions", "wanted": "1"}),
        ("vllm", "/v1/completions", {"choices": [{**VLLM_CHOICE, "logprobs": None}]}, {"got": "0 logprobs"}),
        ("vllm", "/v1/completions", {"error": "x"}, {"got": "`choices`"}),
    ],
)
def test_an_answer_that_is_not_sound_is_refused(kind: str, route: str, answer: Any, parts: dict[str, str]) -> None:
    with pytest.raises(PeerError) as caught:
        ask({**SERVERS[kind], route: answer})
    assert caught.value.field.endswith(route)
    assert all(part in getattr(caught.value, name) for name, part in parts.items())


def test_what_is_no_inference_server_is_told_with_all_that_was_asked() -> None:
    with pytest.raises(PeerError) as error:
        ask({"/": {"message": "the rollout API"}})
    assert error.value.field.startswith("--openai.base_url http://")
    assert all(route in error.value.wanted for route in ("/bridge/info", "/v1/models"))


def test_a_wrong_key_is_told_as_such() -> None:
    async def scene(url: str) -> None:
        client = InferenceClient(ServerConfig(base_url=url), patience=1.0)
        try:
            await client.generate([1], 1, Sampling(1))
        finally:
            await client.close()

    refusal = Reply(401, {"error": {"message": "Unauthorized"}})
    with answering(lambda _: refusal) as url, pytest.raises(PeerRefused) as error:
        asyncio.run(scene(url))
    assert error.value.status == 401 and "Unauthorized" in error.value.got
