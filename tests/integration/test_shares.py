"""A large request to the real server takes its share and no more, whichever route it comes by."""

from __future__ import annotations

import re
from contextlib import closing
from http.client import HTTPConnection

import httpx
import msgspec
import pytest

from tests.integration.serving import Serving, shared_server
from tests.processes import wait_for
from vllm_server.shares import FULL_LENGTHS, LEAST_PLACES

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

MODEL_LENGTH = 512
MANY = 3 * LEAST_PLACES  # more than a request may have in the engine: half of the CPU build's 128 places
MORE = 2 * FULL_LENGTHS  # completions of full length: more than a request may ask for


@pytest.fixture
def server() -> Serving:
    return shared_server()


def counted(server: Serving, metric: str) -> float:
    (value,) = re.findall(rf"^vllm:{metric}{{.*}} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(value)


def test_all_completions_of_a_large_request_come_and_each_with_its_own_seed(server: Serving) -> None:
    asked = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True, "seed": 5, "logprobs": 0}
    whole = server.generate("1+1=", n=MANY, **asked)
    assert len(whole.token_ids) == MANY and {len(tokens) for tokens in whole.token_ids} == {4}
    assert len(whole.text) == len(whole.finish_reasons) == MANY and len(whole.logprobs or []) == MANY
    group = server.generate("1+1=", n=LEAST_PLACES, **asked)
    assert whole.token_ids[:LEAST_PLACES] == group.token_ids


def test_a_large_request_can_be_streamed(server: Serving) -> None:
    body = {"prompt": "1+1=", "n": MANY, "max_tokens": 3, "ignore_eos": True, "stream": True}
    lines = [msgspec.json.decode(line) for line in server.post("/generate", body).text.splitlines()]
    tokens = dict.fromkeys(range(MANY), 0)
    for line in lines:
        tokens[line["index"]] += len(line["token_ids"])
    assert set(tokens.values()) == {3}
    assert sum(line.get("finish_reason") == "length" for line in lines) == MANY


def test_a_list_of_prompts_is_answered_whole(server: Serving) -> None:
    body = {"model": "policy", "prompt": ["1+1="] * MANY, "n": 2, "max_tokens": 2, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * MANY))
    assert answer["usage"]["completion_tokens"] == 4 * MANY


def test_a_small_request_does_not_wait_for_a_large_one(server: Serving) -> None:
    completions, length = 1000, 500  # minutes of generation: the client leaves long before its end
    body = {"prompt": "1+1=", "n": completions, "max_tokens": length, "ignore_eos": True}
    before = counted(server, "generation_tokens_total")
    with closing(HTTPConnection(server.url.removeprefix("http://"))) as large:
        large.request("POST", "/generate", msgspec.json.encode(body), {"content-type": "application/json"})
        wait_for("the large request runs", lambda: counted(server, "num_requests_running") >= LEAST_PLACES, server.log)
        assert counted(server, "num_requests_waiting") == 0, "the rest of it does not stand before others"
        for _ in range(3):
            assert server.generate("2+2=", n=8, max_tokens=4).token_ids
        made = counted(server, "generation_tokens_total") - before
    assert made < completions * length / 2


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"prompt": "1", "n": MORE}),
        ("/v1/completions", {"model": "policy", "prompt": "1", "n": MORE}),
        ("/v1/completions", {"model": "policy", "prompt": ["1"] * FULL_LENGTHS, "n": 2}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "1"}], "n": MORE}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_route_generates_without_bound(server: Serving, route: str, body: dict[str, object], stream: bool) -> None:
    answer = server.post(route, {**body, "max_tokens": MODEL_LENGTH - 1, "stream": stream})
    assert answer.status_code == 422, answer.text[:500]
    error = answer.json()["error"]
    assert error["param"] == "n x max_tokens" and error["code"] == 422
    assert str(FULL_LENGTHS * MODEL_LENGTH) in error["wanted"] and error["got"] and error["fix"]


def test_what_a_client_leaves_behind_is_ended(server: Serving) -> None:
    body = {"prompt": "1+1=", "n": 1000, "max_tokens": 200, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/generate", json=body, timeout=2, trust_env=False)

    def idle() -> bool:
        assert server.get("/health_generate").status_code == 200  # a step, after which the gauge is set
        return counted(server, "num_requests_running") == 0

    wait_for("nothing runs", idle, server.log, 60)
