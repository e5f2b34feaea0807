"""The client of the inference server's `/generate`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from environments.config import ServerConfig
from environments.peers.http import PeerError
from environments.peers.inference import Completion, InferenceClient, Sampling
from tests.stand_ins import Asked, Reply, answering

ANSWER: dict[str, Any] = {
    "text": ["46", "5"],
    "prompt": None,
    "finish_reasons": ["stop", "length"],
    "policy_version": 7,
    "model": "policy-v7",
    "prompt_token_ids": [3, 4],
    "token_ids": [[6, 8, 1], [7]],
    "logprobs": [[[{"6": -0.5, "9": -0.1}], [{"8": -0.25}], [{"1": 0.0}]], [[{"7": -2.0}]]],
}


def generate(answers: Sequence[dict[str, Any]], sampling: Sampling, **settings: Any) -> tuple[list[Completion], Asked]:
    """The completions of a server of ours that gives these answers one after another, and its first request."""
    asked: list[Asked] = []

    def handle(request: Asked) -> Reply:
        asked.append(request)
        return Reply(json=answers[len(asked) - 1])

    async def ask(url: str) -> list[Completion]:
        config = ServerConfig(server_type="vllm", base_url=f"{url}/v1", **settings)
        client = InferenceClient(config, patience=1.0)
        try:
            return await client.generate([3, 4], 2, sampling)
        finally:
            await client.close()

    with answering(handle) as url:
        return asyncio.run(ask(url)), asked[0]


def test_completions_that_a_stopping_server_cut_short_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.peers.inference.ASK_AGAIN_S", 0.0)
    answers = [{**ANSWER, "finish_reasons": ["stop", "abort"]}, {**ANSWER, "policy_version": 8}]
    completions, _ = generate(answers, Sampling(max_tokens=5))
    assert [completion.policy_version for completion in completions] == [8, 8]


def test_the_request_names_the_distribution_and_the_completions_are_the_servers() -> None:
    sampling = Sampling(max_tokens=5, temperature=0.7, stop=("\n",))
    completions, request = generate([ANSWER], sampling, model_name="policy", api_key="key")
    assert request.path == "/generate" and request.headers["authorization"] == "Bearer key"
    assert request.json() == {
        "prompt": {"prompt_token_ids": [3, 4]},
        "model": "policy",
        "n": 2,
        "logprobs": 0,
        "detokenize": True,
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "stop": ["\n"],
    }
    assert completions == [
        Completion([3, 4], [6, 8, 1], [-0.5, -0.25, 0.0], "46", "stop", 7, 0.7),
        Completion([3, 4], [7], [-2.0], "5", "length", 7, 0.7),
    ]


def test_nothing_that_was_not_set_is_sent() -> None:
    _, request = generate([ANSWER], Sampling(max_tokens=1))
    assert not {"model", "stop", "stream"} & request.json().keys()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"logprobs": None}, {"got": "no logprobs", "wanted": "2 completions"}),
        (
            {"token_ids": [[6]], "logprobs": [[[{"6": 0.0}]]]},
            {"got": "1 completions", "wanted": "2 completions"},
        ),
        ({"logprobs": [[[{"6": -0.5}]], [[{"7": -2.0}]]]}, {"got": "1 logprobs", "wanted": "3 sampled tokens"}),
        ({"logprobs": [ANSWER["logprobs"][0], [[{"8": -2.0}]]]}, {"got": "1 logprobs", "wanted": "1 sampled tokens"}),
        ({"policy_version": None}, {"got": "$.policy_version", "fix": "`grpo serve`"}),
    ],
)
def test_an_answer_that_is_not_sound_is_refused(change: dict[str, Any], parts: dict[str, str]) -> None:
    with pytest.raises(PeerError) as caught:
        generate([ANSWER | change], Sampling(max_tokens=1))
    assert caught.value.field.endswith("/generate")
    assert all(part in getattr(caught.value, name) for name, part in parts.items())
