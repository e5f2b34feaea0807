"""The client of the inference server's `/generate`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from environments.config import ServerConfig
from environments.peers.http import PeerError, PeerRefused
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.peers.roster import ListedServers, servers
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


class Server:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.let = asyncio.Event()
        self.closed = False

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append(n)
        await self.let.wait()
        return []

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        return [None, {len(token_ids): float(top_k)}]

    async def close(self) -> None:
        self.closed = True


def named(servers: Sequence[Server]) -> ListedServers:
    """The client of servers that are named with commas."""
    urls = [f"http://127.0.0.1:{9001 + place}/v1" for place in range(len(servers))]
    by_url = dict(zip(urls, servers, strict=True))
    return ListedServers(
        ServerConfig(base_url=",".join(urls)), patience=1.0, connect=lambda config: by_url[config.base_url]
    )


def test_requests_go_to_the_server_with_the_fewest_completions_under_way() -> None:
    async def scenario() -> None:
        first, second, third = every = [Server(), Server(), Server()]
        several = named(every)
        waiting = []

        async def ask(n: int) -> None:
            waiting.append(asyncio.create_task(several.generate([1], n, Sampling(max_tokens=1))))
            await asyncio.sleep(0.001)

        for n in (8, 2, 4, 1, 3):  # under way afterwards: 8, 2 + 1 + 3, 4
            await ask(n)
        assert (first.asked, second.asked, third.asked) == ([8], [2, 1, 3], [4])
        await ask(1)
        assert third.asked == [4, 1]
        first.let.set()
        await waiting[0]
        await ask(2)  # the first has nothing under way now
        assert first.asked == [8, 2]
        for server in every:
            server.let.set()
        await asyncio.gather(*waiting)
        assert await several.prompt_logprobs([1, 2], 3) == [None, {2: 3.0}]
        await several.close()
        assert all(server.closed for server in every)

    asyncio.run(scenario())


def test_one_that_fails_is_not_counted_as_busy() -> None:
    class Refusing(Server):
        async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
            raise PeerRefused("no", 400)

    async def scenario() -> None:
        refusing, good = Refusing(), Server()
        good.let.set()
        several = named([refusing, good])
        for _ in range(2):
            with pytest.raises(PeerRefused):
                await several.generate([1], 8, Sampling(max_tokens=1))
        assert good.asked == []

    asyncio.run(scenario())


def test_several_servers_are_named_with_commas() -> None:
    config = ServerConfig(base_url="http://a:9001/v1/, http://b:9002/v1", model_name="m")
    assert config.urls == ["http://a:9001/v1", "http://b:9002/v1"]
    assert isinstance(servers(config, patience=1.0), ListedServers)
    assert isinstance(servers(ServerConfig(base_url="http://a:9001/v1"), patience=1.0), InferenceClient)
    with pytest.raises(ValidationError, match="base_url"):
        ServerConfig(base_url="http://a:9001/v1,b:9002")
