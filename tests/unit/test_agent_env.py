"""Agents: their calls become sequences, each sampled token is trained once; the front; functions and commands."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import httpx
import msgspec
import numpy as np
import openai
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from environments.agent.env import AgentConfig, AgentEnv
from environments.agent.episode import Agent, EpisodeFailed, load_command, load_function
from environments.agent.episode import _end_all as end_all
from environments.agent.episode import played as play
from environments.agent.front import CHAT, TEXT, Call, Front, Session, branches, episode
from environments.api import groups, wire
from environments.config import ConfigError
from environments.data_config import DataConfig, RewardConfig
from environments.demo_model.model import build_tokenizer
from environments.peers.http import Answer, PeerGone, PeerRefused
from environments.running.groups import unfit
from environments.trajectory import scored_group
from grpo_trainer.batch.batching import advantages_of
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.rollouts.filter import misfit
from grpo_trainer.rollouts.groups import to_group
from tests.processes import alive
from tests.stand_ins import after_setup

# calls, and what is trained ------------------------------------------------------------------------------------


def call(prompt: list[int], answer: list[int], **fields: Any) -> Call:
    return Call("c", prompt, answer, [-float(token) for token in answer], fields.pop("version", 3), **fields)


def test_a_call_that_continues_another_is_one_sequence_with_it_and_any_other_a_branch() -> None:
    calls = [call([1, 2], [3]), call([1, 2, 3, 4, 5], [6, 7]), call([9, 2, 3], [5]), call([1, 2, 8], [7])]
    first, edited, again = branches(calls)
    assert first.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert first.trained == [False, False, True, False, False, True, True]
    assert first.logprobs == [1.0, 1.0, -3.0, 1.0, 1.0, -6.0, -7.0]
    assert [edited.tokens, again.tokens] == [[9, 2, 3, 5], [1, 2, 8, 7]]


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)
STEPS = st.lists(st.tuples(st.integers(0, 8), st.booleans(), TOKENS, TOKENS), min_size=1, max_size=9)


@given(STEPS)
def test_each_sampled_token_is_trained_once_and_no_other(steps: list[tuple[int, bool, list[int], list[int]]]) -> None:
    """Over trees of calls: linear, branching at an older call, and with an edited history."""
    calls: list[Call] = []
    for number, (parent, edits, heard, answer) in enumerate(steps):
        before = calls[parent % len(calls)] if calls else call([], [])
        history = before.prompt_ids + before.token_ids
        prompt = (heard + history[1:] if edits else history + heard) or heard
        logprobs = [-(100.0 * number + place) for place in range(len(answer))]
        calls.append(Call(str(number), prompt, answer, logprobs, version=1))
    found = branches(calls)
    trained = [
        (token, logprob)
        for branch in found
        for token, logprob, own in zip(branch.tokens, branch.logprobs, branch.trained, strict=True)
        if own
    ]
    sampled = [pair for each in calls for pair in zip(each.token_ids, each.logprobs, strict=True)]
    assert sorted(trained, key=lambda pair: -pair[1]) == sorted(sampled, key=lambda pair: -pair[1])
    for branch in found:  # in the context in which it was sampled
        for each, end in branch.ends:
            assert branch.tokens[:end] == each.prompt_ids + each.token_ids


def test_branches_of_many_calls_take_no_time_that_grows_with_their_square() -> None:
    began = time.process_time()
    assert len(branches([call([number, 1], [2]) for number in range(30_000)])) == 30_000
    assert time.process_time() - began < 10  # each compared with each took 30 s


def test_an_episode_is_one_unit_whose_sequences_have_one_advantage() -> None:
    twice = episode([call([1], [2], version=5, truncated=True), call([8, 8], [4, 5])], 1.0, temperature=0.7)
    once = episode([call([1], [3])], 0.0, temperature=0.7)
    group = scored_group([twice, once])
    assert group.scores == [1.0, 0.0] and group.overrides == [{"truncated": True, "branches": [2, 4]}, {}]
    assert group.policy_versions == [3, 3]
    decoded = to_group(wire.pack(group))
    assert [each.tokens_T.tolist() for each in decoded.samples] == [[1, 2], [8, 8, 4, 5], [1, 3]]
    assert [each.positions.tolist() for each in decoded.samples] == [[1], [2, 3], [1]]
    assert [each.follows for each in decoded.samples] == [False, True, False]
    assert decoded.rewards == [1.0, 0.0] and misfit(decoded) is None
    config = TrainConfig(model_name="m", scale_rewards="none")
    assert advantages_of(decoded, config) == [0.5, 0.5, -0.5]


def test_a_calls_reward_is_that_of_its_own_sequence() -> None:
    """Rewards 1 (first call), 0 and 0 (ends): mean 1/3, deviation sqrt(2)/3; each end credits the whole episode."""
    rewarded = episode([call([1], [2], reward=1.0), call([8], [4])], 0.0, temperature=1.0)
    group = scored_group([rewarded, episode([call([1], [3])], 0.0, temperature=1.0)])
    assert group.scores == [1.0, 0.0] and group.advantages is not None
    first, end = 2 / 2**0.5, -1 / 2**0.5
    assert np.allclose(group.advantages[0], [0, first + end, 0, end]) and np.allclose(group.advantages[1], [0, end])


@pytest.mark.parametrize("lengths", [[1, 2], [2, 0, 2], [-1, 5], [True, 3], "4", {"a": 4}, [[4]]])
def test_lengths_that_do_not_fit_are_refused_and_nothing_is_trained_on_them(lengths: Any) -> None:
    ours = scored_group([episode([call([1], [2]), call([8], [4])], 1.0, temperature=1.0)])
    for place in (
        {"overrides": [{"branches": lengths}]},
        {"overrides": None, "group_overrides": {"branches": lengths}},
    ):
        wrong = wire.pack(msgspec.structs.replace(ours, **place))
        assert (reason := misfit(to_group(wrong))) is not None and "branches" in reason.field
        with pytest.raises(groups.InvalidGroup, match="branches"):
            groups.read(msgspec.msgpack.encode(wrong), wire.MSGPACK)


# the front -----------------------------------------------------------------------------------------------------


class Server:
    """Stands for `grpo serve`: what it was asked, and its answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fault: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        self.asked.append((path, body))
        await self.hold.wait()
        if self.fault is not None:
            raise self.fault
        number, count = len(self.asked), 2 if body.get("n") == 2 else 1
        tokens = [10 * number, 10 * number + 1]
        common = {"id": f"call-{number}", "created": 1, "model": "served", "usage": {"total_tokens": 4}}
        choice: dict[str, Any] = {"token_ids": tokens}
        if path == CHAT:
            answer = {**common, "object": "chat.completion", "prompt_token_ids": [1, 2]}
            message: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
            if body.get("tools"):
                function = {"name": "add", "arguments": '{"a": 1}'}
                message["tool_calls"] = [{"id": each, "type": "function", "function": function} for each in "pq"]
            choice |= {"message": message, "finish_reason": "stop"}
            choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}] * 2}
        else:
            answer = {**common, "object": "text_completion"}
            choice |= {"text": "xy", "prompt_token_ids": [3], "finish_reason": "length"}
            choice["logprobs"] = {"token_logprobs": [-0.5, -0.5], "tokens": ["x", "y"], "text_offset": [0, 1]}
        answer["choices"] = [{"index": place, **choice} for place in range(count)]
        return Answer(200, {"x-policy-version": "7"}, msgspec.json.encode(answer))


@asynccontextmanager
async def fronted(**options: Any) -> AsyncIterator[tuple[Server, Front, str]]:
    server = Server()
    front = Front(
        server.ask, sampling={"temperature": 0.8, "top_p": 1.0}, names=frozenset({"m"}), **{"longest": 99, **options}
    )
    url = await front.start()
    try:
        yield server, front, url
    finally:
        await front.close()


SAY: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def client(url: str, own: Session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=own.key, max_retries=0)


async def test_front_records_calls_and_answers_as_openai() -> None:
    async with fronted(max_tokens=30) as (server, front, url):
        own = front.open()
        said = await client(url, own).chat.completions.create(**SAY, temperature=0.1, seed=3, max_tokens=50, top_p=1.0)
        assert said.choices[0].message.content == "answer 1" and said.choices[0].logprobs is None
        path, body = server.asked[0]
        assert path == CHAT and body["return_token_ids"] and (body["temperature"], body["max_tokens"]) == (0.8, 30)
        assert not {"seed", "model", "stream"} & {*body}
        text = await client(url, own).completions.create(model="m", prompt="1+1=", logprobs=0)
        assert text.choices[0].logprobs is not None and text.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
        assert [(each.id, each.prompt_ids, each.token_ids, each.version, each.truncated) for each in own.calls] == [
            ("call-1", [1, 2], [10, 11], 7, False), ("call-2", [3], [20, 21], 7, True),
        ]  # fmt: skip
        own.reward(1.0, said)
        own.reward(0.5)
        with pytest.raises(ValueError):
            own.reward(float("nan"))
        assert [each.reward for each in own.calls] == [1.0, 0.5]


async def test_front_streams_with_tools() -> None:
    async with fronted() as (server, front, url):
        own = front.open()
        tools: Any = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": {}}}]
        found: list[Any] = []
        async with client(url, own).chat.completions.stream(
            **SAY, tools=tools, stream_options={"include_usage": True}
        ) as stream:
            async for event in stream:
                found.append(event.type)
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls is not None and [each.function.arguments for each in calls] == ['{"a": 1}'] * 2
        assert final.usage is not None and final.usage.total_tokens == 4
        assert "strict" not in server.asked[0][1]["tools"][0]["function"], "it would force the form on the policy"
        assert len(own.calls) == 1 and own.messages[-1]["content"] == 'answer 1\n[add {"a": 1}]\n[add {"a": 1}]'
        pieces = [each.choices[0].text async for each in await client(url, own).completions.create(
            model="policy", prompt="x", stream=True)]  # fmt: skip
        assert pieces == ["xy"]


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("options", "longest", "not_trained"),
    [({"n": 2}, 99, 2), ({"tool_choice": "required", "tools": TOOLS}, 99, 1),
     ({"response_format": {"type": "json_object"}}, 99, 1), ({}, 3, 1)],
)  # fmt: skip
async def test_front_serves_what_is_not_the_policys_own_choice_or_too_long_and_does_not_train_it(
    options: dict[str, Any], longest: int, not_trained: int
) -> None:
    async with fronted(longest=longest) as (_, front, url):
        own = front.open()
        await client(url, own).chat.completions.create(**SAY, **options)
        assert (own.calls, own.not_trained) == ([], not_trained)
        with pytest.raises(ValueError):
            own.reward(1.0)


@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        ({"top_p": 0.9}, 400, "top_p"),
        ({"extra_body": {"min_tokens": 3}}, 400, "min_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"model": "gpt-4o"}, 404, "policy"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "text"),
    ],
)
async def test_front_refuses_what_would_change_the_distribution(
    options: dict[str, Any], status: int, word: str
) -> None:
    async with fronted() as (server, front, url):
        with pytest.raises(openai.APIStatusError) as refused:
            await client(url, front.open()).chat.completions.create(**{**SAY, **options})
        assert refused.value.status_code == status and word in refused.value.message
        assert not server.asked


async def test_front_keys_open_one_episode_until_it_ends_and_completions_alone() -> None:
    async with fronted() as (server, front, url):
        one, two = front.open(), front.open()
        await client(url, one).chat.completions.create(**SAY)
        assert (len(one.calls), len(two.calls)) == (1, 0)
        server.hold.clear()
        under_way = asyncio.create_task(client(url, one).chat.completions.create(**SAY))
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        front.end(one)
        for late in (under_way, client(url, one).chat.completions.create(**SAY), client(url, one).models.list()):
            with pytest.raises(openai.AuthenticationError):
                await late
        assert len(one.calls) == 1
        for path in ("/responses", "/embeddings", "/../bridge/pause", "/load_lora_adapter"):
            with pytest.raises(openai.NotFoundError):
                await client(url, two).post(path, body={}, cast_to=object)
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=url, api_key="sk-other").models.list()
        assert {each.id async for each in client(url, two).models.list()} == {"m", "policy"}


async def test_front_passes_refusals_on_and_keeps_the_fault_of_a_server_that_is_away() -> None:
    async with fronted() as (server, front, url):
        own = front.open()
        server.fault = PeerRefused("refused", 400, got="400: the maximum context length is 5")
        with pytest.raises(openai.BadRequestError) as refused:
            await client(url, own).chat.completions.create(**SAY)
        assert refused.value.code == "context_length_exceeded" and not own.faults
        server.fault = PeerGone("away", field="the server")
        with pytest.raises(openai.InternalServerError):
            await client(url, own).chat.completions.create(**SAY)
        assert list(own.faults.values()) == [server.fault] and not own.calls
        server.fault = None
        await client(url, own).chat.completions.create(**SAY)
        assert not own.faults and len(own.calls) == 1, "a later try was answered"


KEYS = st.sampled_from(["model", "messages", "content", "role", "tools", "function", "stream", "n", "stop", "prompt"])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 2, "policy", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(st.binary(max_size=60) | st.dictionaries(KEYS, VALUES).map(lambda body: json.dumps(body).encode()))
def test_front_answers_any_body(body: bytes) -> None:
    async def work() -> None:
        front = Front(Server().ask, sampling={}, names=frozenset(), longest=9)
        headers = {"Authorization": f"Bearer {front.open().key}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front.app), base_url="http://front") as http:
            for path in (CHAT, TEXT):
                response = await http.post(path, content=body, headers=headers)
                assert response.status_code in (200, 400, 404), response.text

    asyncio.run(work())


# functions and commands ------------------------------------------------------------------------------------------

AGENTS = """
import asyncio, os, subprocess, sys, time
async def chat(task, client):
    said = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task["q"]}])
    client.reward(0.25, said)
    return said.choices[0].message.content
def plain(task, client):
    client.completions.create(model="policy", prompt=task["q"])
    return True
def leaves(task, client):
    sys.exit(3)
async def odd(task, client):
    return [1]
async def raises(task, client):
    raise ValueError("mine")
async def exits(task, client):
    sys.exit(3)
async def panics(task, client):
    raise type("Panic", (BaseException,), {})
async def cancels(task, client):
    raise asyncio.CancelledError
def stops(task, client):
    return next(iter([]))
async def clings(task, client):
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)
async def three(task, client, more):
    pass
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    (tmp_path / "agents_here.py").write_text(AGENTS)
    return tmp_path / "agents_here.py"


async def played(load: Callable[[str], Agent], task: Mapping[str, Any], seconds: float = 60.0) -> tuple[Any, Session]:
    async with fronted() as (_, front, url):
        own = front.open()
        return await play(load(url), task, own, seconds), own


async def test_functions_and_commands_reach_the_policy_past_a_proxy(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a client of its kind. A command's last line is its answer."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    answer, own = await played(lambda url: load_function(f"{agents}:chat", url), {"q": "?"})
    assert answer == "answer 1" and own.calls[0].reward == 0.25
    reward, own = await played(lambda url: load_function(f"{agents}:plain", url), {"q": "?"})
    assert reward is True and len(own.calls) == 1
    answer, own = await played(command(CURL + "print(0.5)", "{task_file}"), {"q": "hi"})
    assert answer == "0.5" and own.messages[0] == {"role": "user", "content": "hi"}
    assert (await played(command("print('x' * 10**6); print(7)"), {}))[0] == "7"


@pytest.mark.parametrize(
    ("name", "error"),
    [("leaves", RuntimeError), ("raises", ValueError), ("exits", RuntimeError), ("panics", RuntimeError),
     ("cancels", EpisodeFailed), ("stops", RuntimeError), ("clings", EpisodeFailed)],
)  # fmt: skip
async def test_functions_that_fail_lose_their_episode_alone(
    agents: Path, name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("environments.scoring.GRACE_S", 0.2)
    with pytest.raises(error):
        await played(
            lambda url: load_function(f"{agents}:{name}", url), {"q": "?"}, seconds=2.0 if name == "clings" else 60
        )


@pytest.mark.parametrize("name", ["missing", "three", ""])
def test_functions_that_are_none_are_named_before_the_run(agents: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--agent"):
        load_function(f"{agents}:{name}" if name else "solve", "http://x/v1")
    with pytest.raises(ConfigError, match=r"--env\.command"):
        load_command("'", "http://x/v1")  # a quote that is open


CURL = """
import json, os, sys, urllib.request
task = json.load(open(sys.argv[1]))
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["q"]}]}).encode()
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def command(code: str, *words: str) -> Callable[[str], Agent]:
    return lambda url: load_command(shlex.join([sys.executable, "-c", code, *words]), url)


@pytest.mark.parametrize("leaves_group", [False, True])
async def test_a_command_whose_child_stays_behind_has_ended_and_so_has_its_child(leaves_group: bool) -> None:
    child = f"import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session={leaves_group}).pid)"
    assert not alive([int((await played(command(child), {}, seconds=60.0))[0])])


async def test_a_command_that_has_ended_ends_no_process_that_has_got_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = subprocess.Popen

    class Reused:
        def __init__(self, process: Any, pid: int) -> None:
            self._process, self.pid = process, pid

        def __getattr__(self, name: str) -> Any:
            return getattr(self._process, name)

    another = subprocess.Popen(["sleep", "300"], start_new_session=True)

    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: Reused(start(*words, **options), another.pid))
    try:
        assert (await played(command("print(7)"), {}, seconds=60.0))[0] == "7"
        with pytest.raises(subprocess.TimeoutExpired):
            another.wait(1.0)
    finally:
        another.kill()
        another.wait()


async def test_a_command_over_its_time_limit_is_ended_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EpisodeFailed):
        await played(command("import time; time.sleep(600)"), {}, seconds=5.0)
    assert not caplog.records, "a thread that stays behind would be one"


HOLDER = "import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session=True, env={}).pid)"


async def test_a_command_whose_output_is_held_by_another_process_leaves_no_thread() -> None:
    """One that has none of the episode's variables is not ended, as one of another user."""
    before = {*threading.enumerate()}
    holder = psutil.Process(int((await played(command(HOLDER), {}, seconds=60.0))[0]))
    try:
        until = time.monotonic() + 60.0
        while {each for each in threading.enumerate() if "keep_last" in each.name} - before:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
        assert holder.is_running()
    finally:
        holder.kill()


async def test_a_command_that_fails_has_no_answer() -> None:
    with pytest.raises(EpisodeFailed) as failed:
        await played(command("import sys; sys.stderr.write('\\x1b[2Jno'); sys.exit(4)"), {})
    assert "4" in failed.value.got and "\x1b" not in failed.value.got
    with pytest.raises(EpisodeFailed):
        await played(lambda url: load_command("/no/such/program", url), {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["while it starts", "while it runs"])
async def test_a_command_that_is_given_up_leaves_no_process(when: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    starts = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '300'])"
    code = f"{starts}; open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(300)"

    async with fronted() as (_, front, url):
        own = front.open()
        before = {*psutil.Process().children()}
        episode = asyncio.ensure_future(command(code, str(note))(url)({}, own))
        while not {*psutil.Process().children()} - before:
            assert not episode.done(), episode
            await asyncio.sleep(0)
        while not (note.exists() and note.read_text()):
            assert not episode.done(), episode
            if when == "while it starts":
                time.sleep(0.02)  # the loop stands: the process is faster than its own start
            else:
                await asyncio.sleep(0.02)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
    assert not alive([int(note.read_text())])


@pytest.mark.parametrize("fault", ["its number was used before", "its variables are not shown yet"])
def test_a_process_that_the_first_look_misses_is_ended(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil refuses to kill what has the number of a process that it knew; Linux shows variables after exec only."""
    process = subprocess.Popen(["sleep", "60"], env={"OPENAI_API_KEY": "key-of-this-episode"})
    try:
        first, present = psutil.Process(process.pid), psutil.Process(process.pid)
        while not present.environ():
            time.sleep(0.001)
        if fault.startswith("its number"):
            monkeypatch.setattr(first, "_ident", (process.pid, 1.0))
        else:
            monkeypatch.setattr(first, "environ", dict)
        looks = chain([[first], [present]], repeat([]))
        monkeypatch.setattr(psutil, "process_iter", lambda: next(looks))
        end_all("key-of-this-episode", first.create_time())
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_an_older_process_without_variables_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = SimpleNamespace(pid=1, environ=dict, create_time=lambda: 100.0)
    looks = iter([[hidden]])  # a second look has none left
    monkeypatch.setattr(psutil, "process_iter", lambda: next(looks))
    end_all("key-of-this-episode", 102.0)


# the environment ---------------------------------------------------------------------------------------------------

TASKED = """
import asyncio
async def solve(task, client):
    kind = task["do"].pop(0) if task["do"] else "1"
    if kind == "raise":
        raise ValueError("mine")
    if kind == "hang":
        await asyncio.sleep(3600)
    said = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    if kind == "twice":
        await client.completions.create(model="policy", prompt="x")
    if kind == "call":
        client.reward(0.5)
        return None
    return {"text": said.choices[0].message.content, "none": None, "odd": [1]}.get(kind, kind)
async def silent(task, client):
    return 1.0
def exact(completions, answer, log_extra, **kwargs):
    log_extra("right", answer)
    return [float(completion == right) for completion, right in zip(completions, answer)]
"""


def env_of(tmp_path: Path, do: Sequence[str], *rewards: str, **settings: Any) -> AgentEnv:
    """An environment of one task: its episodes do one thing each."""
    (tmp_path / "tasked.py").write_text(TASKED.replace('task["do"]', "DO") + f"\nDO = {[*do]!r}\n")
    sys.modules.pop("tasked", None)
    (tmp_path / "tasks.jsonl").write_text('{"answer": "answer 1"}\n{"answer": "other"}\n')
    agent = {} if "command" in settings else {"agent": f"{tmp_path}/tasked.py:{settings.pop('function', 'solve')}"}
    config = AgentConfig(**{"tokenizer_name": "demo", "group_size": len(do), **agent, **settings})
    env = AgentEnv(config, cast("Any", Server()), build_tokenizer())
    env.data = DataConfig(path=str(tmp_path / "tasks.jsonl"))
    env.rewards = tuple(RewardConfig.model_validate(each) for each in rewards)
    return env


def group(env: AgentEnv) -> tuple[wire.ScoredData | None, dict[str, float]]:
    return after_setup(env, lambda: env.scored(0)), env.measures.take()


def unscored(found: wire.ScoredData) -> list[bool]:
    return [bool(each.get(wire.UNSCORED)) for each in found.overrides or [{} for _ in found.tokens]]


def test_env_scores_episodes_and_loses_those_that_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do = ["1", "raise", "0.5", "hang", "odd", "twice"]
    begun = iter(do)

    async def one_is_short(agent: Any, task: Any, own: Any, seconds: float) -> Any:
        assert seconds == 60.0
        return await play(agent, task, own, 1.0 if next(begun) == "hang" else seconds)

    monkeypatch.setattr("environments.agent.env.played", one_is_short)
    env = env_of(tmp_path, do, episode_timeout=60.0)
    found, measures = group(env)
    assert found is not None and unscored(found) == [False, True, False, True, True, True]
    assert found.scores == [1.0, 0.0, 0.5, 0.0, 0.0, 0.0] and measures["failed"] == 4 / 6
    assert found.overrides is not None and found.overrides[5]["branches"] == [4, 3]
    assert [sum(entry != wire.IGNORED for entry in mask) for mask in found.masks] == [2, 0, 2, 0, 0, 0]
    assert unfit(found, env.config, max_token_len=4) is None and unfit(found, env.config, max_token_len=3) is not None


def test_env_reward_functions_score_what_the_agent_returns_or_what_the_policy_said_last(tmp_path: Path) -> None:
    env = env_of(tmp_path, ["text", "none", "wrong", "raise"], f"{tmp_path}/tasked.py:exact")
    found, measures = group(env)
    assert found is not None and unscored(found) == [False, False, False, True]
    assert sorted(found.scores[:2]) == [0.0, 1.0], "the answers are numbered in the order of the calls"
    assert found.scores[2] == 0.0 and measures["reward_exact"] == 1 / 3
    assert found.messages is not None, "they show what functions log"
    assert [each[-1].get("extra") if each else None for each in found.messages] == [{"right": "answer 1"}] * 3 + [None]


def test_env_refuses_a_number_with_reward_functions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reward"):
        group(env_of(tmp_path, ["0.5", "0.5"], f"{tmp_path}/tasked.py:exact", function="silent"))


def test_env_without_a_call_or_a_sound_episode_has_no_group(tmp_path: Path) -> None:
    assert group(env_of(tmp_path, ["1", "1"], function="silent"))[0] is None
    with pytest.raises(ValueError, match="mine"):
        group(env_of(tmp_path, ["raise", "raise"]))


def test_env_raises_what_the_server_is_to_blame_for(tmp_path: Path) -> None:
    env = env_of(tmp_path, ["1", "1"])
    cast("Any", env.server).fault = PeerGone("away", field="the server")
    with pytest.raises(PeerGone):
        group(env)


def test_env_evaluates_tasks(tmp_path: Path) -> None:
    env = env_of(tmp_path, ["1", "call"], eval_samples=1, temperature=0.8, eval_temperature=0.2)
    metrics = after_setup(env, env.evaluate)
    assert metrics["reward"] == 0.75 and metrics["rows"] == 2 and metrics["calls"] == 1
    assert {body["temperature"] for _, body in cast("Any", env.server).asked} == {0.2}
    assert not env.measures.take(), "the metrics of training"


@pytest.mark.parametrize(
    "settings",
    [{}, {"agent": "a.py:f", "command": "x"}, {"agent": "a.py:f", "system_prompt": "x"},
     {"command": "x", "teacher_url": "http://h:1"}],
)  # fmt: skip
def test_settings_of_an_agent(settings: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValidationError)):
        AgentConfig(tokenizer_name="demo", **settings)


async def test_a_command_ends_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*psutil.Process().children()}
    agent = command("import time; time.sleep(300)")("http://127.0.0.1:9")
    own: Any = SimpleNamespace(key="a key of one episode")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="new thread"):
            await agent({}, own)
    assert {*psutil.Process().children()} == before
