"""Environments before a real inference server: the same ids and logprobs by every route, also over several turns."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from environments.api import wire
from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ServerConfig
from environments.conversation import Conversation
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.peers.teacher import Teacher
from environments.tokenizers import load_tokenizer
from environments.trajectory import scored_group
from tests.integration.serving import Serving, serving, shared_server

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def server() -> Serving:
    return shared_server()


def client(server: Serving, **settings: str) -> InferenceClient:
    return InferenceClient(ServerConfig(base_url=f"{server.url}/v1", api_key=server.key, **settings), patience=10.0)  # type: ignore[arg-type]


def generate(server: Serving, prompt: str, sampling: Sampling, **settings: str) -> Completion:
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
        ours = generate(server, "12+34=", greedy)
    assert server.url in caplog.text
    theirs = generate(server, "12+34=", greedy, server_type="openai", model_name=str(server.model_folder))
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


def test_answers_with_ids_of_the_padded_vocabulary_are_left_out_and_counted(tmp_path: Path) -> None:
    class Letters(BaseEnv[str]):
        def prompt(self, item: str) -> str:
            return item

        def score(self, item: str, answer: str) -> float:
            return 1.0

    async def scene(server: Serving) -> tuple[Letters, wire.ScoredData]:
        name = str(server.model_folder)
        config = BaseEnvConfig(tokenizer_name=name, group_size=32, max_tokens=2, max_token_length=64)
        asking = client(server)
        env = Letters(config, asking, load_tokenizer(name))
        try:
            group = await env.scored("12+34=")
        finally:
            await asking.close()
        assert group is not None
        return env, group

    with serving(tmp_path, padded_rows=59) as server:
        env, group = asyncio.run(scene(server))
    known = len(env.tokenizer)
    padded = [max(tokens) >= known for tokens in group.tokens]
    assert 0 < sum(padded) < 32  # 59 of 156 ids
    assert [bool(own.get(wire.UNSCORED)) for own in group.overrides or []] == padded
    assert [any(id != wire.IGNORED for id in mask) for mask in group.masks] == [not own for own in padded]
    assert len(wire.counted_scores(group)) == 32 - sum(padded)
    assert env.measures.take()["unknown_tokens"] == sum(padded) / 32
