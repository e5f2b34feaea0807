"""`/generate`, `/lora/…`, `/bridge/…` and /v1 of the real server against transformers; environments before it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from environments.api import wire
from environments.config import BaseEnvConfig, ServerConfig
from environments.conversation import Conversation
from environments.peers.inference import Completion, InferenceClient, Sampling, Teacher
from environments.trajectory import scored_group
from tests.integration.serving import (
    Serving,
    assert_ends_at_one_of_many_stop_ids,
    forward,
    sampled,
    serving,
    shared_server,
)
from tests.integration.streaming import paused
from tests.processes import wait_for
from vllm_server.protocol import GenerateResponse, LoraStatus

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

TOLERANCE = 1e-3  # float32 on both sides
SHORT = [21, 14, 21, 32]  # "2+2=": a newline is 2, a space 3, and so on by code point
MESSAGE = {"role": "user", "content": "2+2="}
SAMPLING: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
LONG = [2 + (7 * i) % 95 for i in range(300)]  # longer than two cache blocks of 128


@pytest.fixture
def server() -> Serving:
    return shared_server()


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    return Qwen2ForCausalLM.from_pretrained(shared_server().model_folder, dtype=torch.float32).eval()


def assert_made_by(model: torch.nn.Module, answer: GenerateResponse, temperature: float = 1.0) -> None:
    for out, tokens in enumerate(answer.token_ids):
        wanted = forward(model, answer.prompt_token_ids, tokens, temperature)
        torch.testing.assert_close(sampled(answer, out), wanted, atol=TOLERANCE, rtol=0)


def test_a_seed_gives_the_same_tokens_whatever_the_chunks_of_the_prompt(server: Serving, tmp_path: Path) -> None:
    """vLLM samples and discards a token for each chunk but the last."""
    asked = {"policy_version": 0, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True, "seed": 3}
    with serving(tmp_path, "--max-num-seqs", "8", "--max-num-batched-tokens", "128") as chunked:
        assert chunked.generate(LONG, **asked).token_ids == server.generate(LONG, **asked).token_ids


def test_servers_of_one_seed_repeat_each_other_and_those_of_two_seeds_differ(tmp_path: Path) -> None:
    """Requests without a seed, one at a time, of servers that have just started."""

    def answers(name: str, seed: str) -> list[list[list[int]]]:
        (tmp_path / name).mkdir()
        with serving(tmp_path / name, "--seed", seed) as server:
            asked = {"policy_version": 0, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            return [server.generate(SHORT, **asked).token_ids for _ in range(3)]

    first = answers("a", "7")
    assert answers("b", "7") == first
    assert not any(own == others for own, others in zip(answers("c", "8"), first, strict=True))
    assert first[0] != first[1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    server: Serving, base: torch.nn.Module, temperature: float
) -> None:
    answer = server.generate(SHORT, policy_version=0, n=3, max_tokens=8, temperature=temperature, logprobs=0, seed=1)
    assert answer.policy_version == 0
    assert len({tuple(tokens) for tokens in answer.token_ids}) > 1
    assert_made_by(base, answer, temperature)


def test_a_completion_ends_at_any_of_many_stop_ids(server: Serving) -> None:
    assert_ends_at_one_of_many_stop_ids(server)


def read_status(server: Serving) -> LoraStatus:
    return msgspec.json.decode(server.get("/lora/status").content, type=LoraStatus)


def test_unload_goes_back_to_the_version_before(server: Serving) -> None:
    model, kept = server.publish()
    _, withdrawn = server.publish()
    answer = server.post("/lora/unload", b"")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "success",
        "previous_adapter": withdrawn.adapter_path,
        "previous_name": withdrawn.adapter_name,
        "policy_version": kept.policy_version,
    }
    assert_made_by(model, server.generate(SHORT, max_tokens=4, logprobs=0))


def test_text_prompts_are_tokenised_and_stop_strings_end_them(server: Serving) -> None:
    answer = server.generate("2+2=", max_tokens=5)
    assert (answer.prompt, answer.prompt_token_ids) == ("2+2=", SHORT)
    assert answer.logprobs is None
    assert answer.finish_reasons == ["length"] or answer.token_ids[0][-1] == 1
    again = server.generate("2+2=", max_tokens=5, temperature=0.0, ignore_eos=True)
    stopped = server.generate("2+2=", max_tokens=5, temperature=0.0, ignore_eos=True, stop=[again.text[0][2]])
    assert stopped.finish_reasons == ["stop"]
    assert stopped.text[0] == again.text[0][: again.text[0].index(again.text[0][2])]


@pytest.mark.parametrize(
    ("body", "status", "field", "message"),
    [
        ({"prompt": "1", "max_token": 4}, 422, "max_token", "did you mean max_tokens?"),
        ({"prompt": "1", "polcy_version": 4}, 422, "polcy_version", "did you mean policy_version?"),
        ({"prompt": "1", "flat_logprobs": True}, 422, "flat_logprobs", "does not know"),
        ({"prompt": "1", "max_tokens": "four"}, 422, "max_tokens", "Expected `int | null`, got `str`"),
        ({"prompt": "1", "temperature": -1}, 422, "temperature", "non-negative"),
        ({"prompt": "1", "n": 0}, 422, "n", "at least 1"),
        ({"n": 1}, 422, "prompt or routing", "missing required field `prompt`"),
        ({"prompt": {"prompt_tokens": [1]}}, 422, "prompt or routing", "unknown field `prompt_tokens`"),
        ({"prompt": {"prompt_token_ids": []}}, 422, "request", "empty"),
        ({"prompt": {"prompt_token_ids": [10**6]}}, 422, "request", "out of vocabulary"),
        ({"prompt": {"prompt_token_ids": [5] * 600}}, 422, "request", "512"),
        ({"prompt": "1", "model": "someone-else"}, 404, "model", "wanted one of"),
        ({"prompt": "1", "policy_version": 10**6}, 404, "policy_version", "wanted one of"),
        ({"prompt": "1", "stream": True, "prompt_logprobs": 1}, 422, "prompt_logprobs", "without stream"),
        ({"prompt": "1", "stream": True, "max_tokens": -3}, 422, "max_tokens", "at least"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Serving, body: dict[str, object], status: int, field: str, message: str
) -> None:
    answer = server.post("/generate", body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == field
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_version(server: Serving, stream: bool) -> None:
    server.publish()
    body = {"prompt": {"prompt_token_ids": SHORT}, "max_tokens": 400, "stream": stream}
    with paused(server):  # so that it is the client who ends it
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/generate", json=body, timeout=httpx.Timeout(60, read=1.0), trust_env=False)
        wait_for("no request", lambda: all(v.in_flight == 0 for v in read_status(server).versions), server.log, 30)
    assert server.generate(SHORT, max_tokens=1).policy_version == read_status(server).policy_version


@pytest.fixture
def versions(server: Serving) -> Iterator[tuple[int, int]]:
    yield server.publish()[1].policy_version, server.publish()[1].policy_version


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/v1/completions", {"prompt": "2+2="}),
        ("/v1/chat/completions", {"messages": [MESSAGE]}),
        ("/v1/messages", {"messages": [MESSAGE]}),
        ("/v1/chat/completions/batch", {"messages": [[MESSAGE]]}),
    ],
)
def test_vllms_routes_go_to_the_newest_version_and_say_so(
    server: Serving, versions: tuple[int, int], route: str, asked: dict[str, object]
) -> None:
    older, newest = versions
    for model, version in ((str(server.model_folder), newest), ("policy", newest), (f"policy-v{older}", older)):
        answer = server.post(route, {**asked, **SAMPLING, "model": model})
        assert (answer.status_code, answer.headers["x-policy-version"]) == (200, str(version)), answer.text
        (said,) = server.generate("2+2=", policy_version=version, **SAMPLING).text
        assert json.dumps(said) in answer.text and f'"policy-v{version}"' in answer.text


def test_an_openai_request_without_a_model_of_another_or_as_a_stream(
    server: Serving, versions: tuple[int, int]
) -> None:
    asked = {"prompt": "2+2=", **SAMPLING}
    plain = server.post("/v1/completions", asked)
    assert (plain.json()["model"], plain.headers["x-policy-version"]) == (f"policy-v{versions[1]}", str(versions[1]))
    assert server.post("/v1/completions", {**asked, "model": "someone-else"}).status_code == 404
    streamed = server.post("/v1/completions", {**asked, "stream": True})
    assert streamed.headers["x-policy-version"] == str(versions[1])
    assert streamed.text.strip().endswith("data: [DONE]")
    assert all(v.in_flight == 0 for v in read_status(server).versions)


def test_a_route_without_versions_is_refused(server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "2+2="}]}
    assert server.post("/invocations", body).status_code == 404


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b'"\\ud83d"'])
def test_a_body_that_is_no_json_is_not_answered_by_the_base_model(server: Serving, value: bytes) -> None:
    server.publish()
    body = b'{"model": "%s", "prompt": "2+2=", "max_tokens": 1, "user": %s}' % (bytes(server.model_folder), value)
    assert server.post("/v1/completions", body).status_code == 422


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_that_a_penalty_makes_nan_are_refused(server: Serving, stream: bool) -> None:
    asked = {"prompt": "1+1=", "max_tokens": 3, "logprobs": 0, "repetition_penalty": 1e-44, "stream": stream}
    answer = server.post("/generate", asked)
    error = json.loads(answer.text.splitlines()[-1])["error"]
    assert (error["code"], error["param"]) == (422, "sampling")
    assert "null" not in answer.text and "NaN" not in answer.text
    assert server.get("/health").status_code == 200


# environments before it -------------------------------------------------------------------------------------------


def client(server: Serving, **settings: str) -> InferenceClient:
    return InferenceClient(ServerConfig(base_url=f"{server.url}/v1", api_key=server.key, **settings), patience=10.0)  # type: ignore[arg-type]


def completion_of(server: Serving, prompt: str, sampling: Sampling, **settings: str) -> Completion:
    tokenizer = AutoTokenizer.from_pretrained(server.model_folder)

    async def scene() -> Completion:
        asking = client(server, **settings)
        try:
            (completion,) = await asking.generate(tokenizer.encode(prompt), 1, sampling)
            return completion
        finally:
            await asking.close()

    return asyncio.run(scene())


def test_vllms_own_route_gives_the_same_ids_and_logprobs_as_ours(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    greedy = Sampling(max_tokens=12, temperature=0.0)
    with caplog.at_level(logging.INFO):
        ours = completion_of(server, "12+34=", greedy)
    assert server.url in caplog.text
    theirs = completion_of(server, "12+34=", greedy, server_type="openai", model_name=str(server.model_folder))
    assert theirs.token_ids == ours.token_ids and len(ours.token_ids) > 1
    assert theirs.prompt_token_ids == ours.prompt_token_ids
    assert theirs.rollout_logprobs == pytest.approx(ours.rollout_logprobs, abs=1e-4)
    assert theirs.policy_version == ours.policy_version  # ours says so in a header


def test_a_conversations_tokens_and_logprobs_are_what_the_server_reads_in_it(server: Serving) -> None:
    """Three turns: the server, reading all of it at once, gives each sampled token the logprob that it had."""
    tokenizer = AutoTokenizer.from_pretrained(server.model_folder)

    async def scene() -> tuple[Conversation, list[dict[int, float] | None]]:
        asking = client(server)
        try:
            talk = Conversation(tokenizer, [{"role": "user", "content": "Say a number. "}])
            for turn in range(3):
                (completion,) = await asking.generate(talk.tokens, 1, Sampling(max_tokens=6))
                talk.say(completion, str(tokenizer.decode(completion.token_ids)))
                if turn < 2:
                    talk.hear([{"role": "user", "content": " Another. "}])
            return talk, await asking.prompt_logprobs(talk.tokens, 1)
        finally:
            await asking.close()

    talk, read = asyncio.run(scene())
    assert sum(talk.trained) >= 3 and talk.turns == 3
    for token, trained, sampled_with, position in zip(
        talk.tokens, talk.trained, talk.rollout_logprobs, read, strict=True
    ):
        if trained:
            assert position is not None and position[token] == pytest.approx(sampled_with, abs=2e-3)
        else:
            assert sampled_with == wire.MASKED_LOGPROB


def test_a_teacher_reads_what_was_written(server: Serving) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.model_folder)

    async def scene() -> wire.ScoredData:
        config = BaseEnvConfig(
            tokenizer_name="m", teacher_url=server.url, teacher_api_key=server.key, teacher_top_k=3, retry_timeout=10.0
        )
        asking, teacher = client(server), Teacher.of(config)
        assert teacher is not None
        try:
            talk = Conversation(tokenizer, [{"role": "user", "content": "12+34="}])
            (completion,) = await asking.generate(talk.tokens, 1, Sampling(max_tokens=6, temperature=0.0))
            talk.say(completion, "")
            return await teacher.annotate(scored_group([talk.trajectory(1.0)]))
        finally:
            await asking.close()
            await teacher.close()

    group = asyncio.run(scene())
    assert group.distill_token_ids is not None and group.distill_logprobs is not None
    rows = zip(group.tokens[0], group.masks[0], group.distill_token_ids[0], group.distill_logprobs[0], strict=True)
    for token, mask, likeliest, logprobs in rows:
        assert len(likeliest) == len(logprobs) == (0 if mask == wire.IGNORED else 3)
        if likeliest:
            assert likeliest[0] == token  # the policy took the likeliest, and the teacher is the same model
            assert logprobs == sorted(logprobs, reverse=True)
