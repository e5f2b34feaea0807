"""The client of inference servers: what kind answers, its ids and logprobs as it gives them, and several servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from environments.api import wire
from environments.api.groups import read
from environments.config import BaseEnvConfig, ConfigError, ServerConfig
from environments.from_verifiers import __main__ as verifiers_venv
from environments.from_verifiers.__main__ import main
from environments.from_verifiers.engine import Engine
from environments.peers import inference, roster
from environments.peers.http import PeerError, PeerGone, PeerRefused
from environments.peers.inference import Completion, GrpoServer, InferenceClient, Kind, Sampling, Teacher
from environments.peers.roster import ListedServers, servers
from environments.trajectory import Trajectory
from grpo_common.roster import MEMBERS_FILE, SERVED_FILE, Member, Served
from tests.stand_ins import Asked, Handle, Reply, answering, generated, then_closed
from tests.unit.factories import refusing

OURS: dict[str, Any] = {
    "text": ["46", "5"],
    "prompt": None,
    "finish_reasons": ["stop", "length"],
    "policy_version": 7,
    "model": "policy-v7",
    "prompt_token_ids": [3, 4],
    "token_ids": [[6, 8, 1], [7]],
    "logprobs": [[[{"6": -0.5, "9": -0.1}], [{"8": -0.25}], [{"1": 0.0}]], [[{"7": -2.0}]]],
}
CHOICES: list[dict[str, Any]] = [
    {
        "index": 0,
        "text": "46",
        "finish_reason": "stop",
        "logprobs": {"tokens": ["4", "6", "<e>"], "token_logprobs": [-0.5, -0.25, 0.0], "text_offset": [0, 1, 2]},
        "token_ids": [6, 8, 1],
        "prompt_token_ids": [3, 4],
    },
    {"text": "5", "finish_reason": "length", "logprobs": {"token_logprobs": [-2.0]}, "token_ids": [7]},
]
MODELS = {"object": "list", "data": [{"id": "Qwen", "object": "model", "owned_by": "vllm"}]}
SERVERS: dict[str, dict[str, Any]] = {
    "grpo": {"/bridge/info": {"boot_id": "b", "policy_version": 7}, "/generate": OURS, "/version": {"version": "0.25"}},
    "vllm": {"/version": {"version": "0.32.0"}, "/v1/models": MODELS, "/v1/completions": {"choices": CHOICES}},
    "openai": {
        "/v1/models": {"data": [{"id": "Qwen", "owned_by": "someone"}]},
        "/v1/completions": {"choices": CHOICES},
    },
}
NAMED = {"grpo": ("grpo", "7"), "vllm": ("vLLM", "0.32.0", "Qwen"), "openai": ("OpenAI", "Qwen")}
FIVE = Sampling(max_tokens=5)


def ask(
    routes: dict[str, Any], sampling: Sampling = FIVE, times: int = 1, **settings: Any
) -> tuple[list[Completion], list[Asked]]:
    """The last completions of a server that has these routes, and its requests. A route's list is answered in turn."""
    asked: list[Asked] = []

    def handle(request: Asked) -> Reply:
        before = sum(each.path == request.path for each in asked)
        asked.append(request)
        answer = routes.get(request.path)
        if isinstance(answer, list):
            answer = answer[before]
        return answer if isinstance(answer, Reply) else Reply(404) if answer is None else Reply(json=answer)

    async def generate(client: InferenceClient) -> list[Completion]:
        return [await client.generate([3, 4], 2, sampling) for _ in range(times)][-1]

    with answering(handle) as url:
        client = InferenceClient(ServerConfig(base_url=f"{url}/v1", **settings), patience=30.0)
        return then_closed(client, generate), asked


@pytest.mark.parametrize("kind", SERVERS)
def test_client_detects_the_server_and_reads_ids(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        completions, asked = ask(SERVERS[kind], Sampling(max_tokens=5, temperature=1.0, stop=("\n",)), times=2)
    (message,) = [record.message for record in caplog.records if record.name == "environments.peers.inference"]
    assert all(part in message for part in NAMED[kind])
    version = 7 if kind == "grpo" else None
    assert completions == [
        Completion([3, 4], [6, 8, 1], [-0.5, -0.25, 0.0], "46", "stop", version),
        Completion([3, 4], [7], [-2.0], "5", "length", version),
    ]
    assert [each.path for each in asked].count("/bridge/info") == 1  # once, not with every request
    first, second = [each.json() for each in asked if each.method == "POST"]
    prompt = {"prompt": {"prompt_token_ids": [3, 4]}, "detokenize": True}
    others = {"prompt": [3, 4], "model": "Qwen", "return_token_ids": True}
    plain = {"n": 2, "logprobs": 0, "max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": ["\n"]}
    assert first == second == plain | (prompt if kind == "grpo" else others)


def test_client_sends_the_model_and_the_key() -> None:
    _, asked = ask(SERVERS["grpo"], server_type="vllm", model_name="policy", api_key="key")
    (request,) = asked  # a kind that is named is not detected
    assert request.headers["authorization"] == "Bearer key" and request.json()["model"] == "policy"
    _, asked = ask(SERVERS["openai"], server_type="openai", model_name="Qwen")
    assert [each.path for each in asked] == ["/v1/completions"]
    with refusing(ConfigError, "--openai.model_name", words=["--openai.server_type openai"]):
        ask(SERVERS["openai"], server_type="openai")


@pytest.mark.parametrize("kind", SERVERS)
def test_client_notes_parameters_that_leave_out_tokens(kind: str) -> None:
    (completion, _), asked = ask(SERVERS[kind], Sampling(max_tokens=5, top_k=3, top_p=0.9))
    body = asked[-1].json()
    assert (body["top_k"], body["top_p"]) == (3, 0.9) and not {"min_p", "stop"} & body.keys()
    assert completion.cuts == {"top_p": 0.9, "top_k": 3}


def test_client_asks_again_for_completions_that_a_stopping_server_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.peers.inference.ASK_AGAIN_S", 0.0)
    answers = [{**OURS, "finish_reasons": ["stop", "abort"]}, {**OURS, "policy_version": 8}]
    completions, _ = ask({**SERVERS["grpo"], "/generate": answers})
    assert [completion.policy_version for completion in completions] == [8, 8]


def test_client_warns_once_of_raw_logprobs(caplog: pytest.LogCaptureFixture) -> None:
    """Also of requests that agents send."""
    ask(SERVERS["vllm"], times=2)
    assert not caplog.text
    ask(SERVERS["vllm"], Sampling(max_tokens=5, temperature=0.5), times=3)
    assert caplog.text.count("--logprobs-mode processed_logprobs") == 1
    routes = SERVERS["vllm"]
    with answering(lambda request: Reply(json=routes[request.path]) if request.path in routes else Reply(404)) as url:
        client = InferenceClient(ServerConfig(base_url=url), patience=30.0)
        then_closed(client, lambda client: client.ask("/v1/completions", {"prompt": "x", "temperature": 0.5}))
    assert caplog.text.count("--logprobs-mode processed_logprobs") == 2


def test_client_text_without_ids_is_enough_to_evaluate_and_not_to_train() -> None:
    choice = {"index": 0, "text": "46", "finish_reason": "stop", "logprobs": None}
    (completion, _), _ = ask({**SERVERS["openai"], "/v1/completions": {"choices": [choice] * 2}})
    assert (completion.text, completion.token_ids) == ("46", [])
    with pytest.raises(PeerError) as error:
        Trajectory.of(completion, 1.0)
    assert error.value.wanted == "token_ids"


@pytest.mark.parametrize(
    ("kind", "change", "parts"),
    [
        ("grpo", {"logprobs": None}, {"got": "no logprobs", "wanted": "2 completions"}),
        ("grpo", {"token_ids": [[6]], "logprobs": [[[{"6": 0.0}]]]}, {"got": "1 completions", "wanted": "2"}),
        ("grpo", {"logprobs": [[[{"6": -0.5}]], [[{"7": -2.0}]]]}, {"got": "other logprobs"}),
        ("grpo", {"logprobs": [OURS["logprobs"][0], [[{"8": -2.0}]]]}, {"got": "other logprobs"}),
        ("grpo", {"policy_version": None}, {"got": "$.policy_version", "fix": "`grpo serve`"}),
        ("vllm", {"choices": []}, {"got": "0 completions", "wanted": "2"}),
        ("vllm", {"choices": [{**CHOICES[0], "logprobs": None}, CHOICES[1]]}, {"got": "other logprobs"}),
        ("vllm", {"choices": None, "error": "x"}, {"got": "`$.choices`"}),
    ],
)
def test_client_refuses_an_answer_that_is_not_sound(kind: str, change: dict[str, Any], parts: dict[str, str]) -> None:
    route = "/generate" if kind == "grpo" else "/v1/completions"
    with pytest.raises(PeerError) as caught:
        ask({**SERVERS[kind], route: SERVERS[kind][route] | change})
    assert caught.value.field.endswith(route)
    assert all(part in getattr(caught.value, name) for name, part in parts.items())


def test_client_refuses_another_kind_of_server_and_a_wrong_key() -> None:
    with pytest.raises(PeerError) as error:
        ask({"/": {"message": "the rollout API"}})
    assert error.value.field.startswith("--openai.base_url http://")
    assert all(route in error.value.wanted for route in ("/bridge/info", "/v1/models"))
    with pytest.raises(PeerRefused) as refused:
        ask({"/bridge/info": Reply(401, {"error": {"message": "Unauthorized"}})})
    assert refused.value.status == 401 and "Unauthorized" in refused.value.got


A, B = "http://127.0.0.1:9001", "http://127.0.0.1:9002"
ONE = Sampling(max_tokens=1)


class Server:
    """Answers when it is let."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[int] = []
        self.given_up = 0
        self.let = asyncio.Event()
        self.closed = False

    async def detected(self) -> Kind:
        return GrpoServer("m")

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append(n)
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return [Completion(prompt_token_ids, [1], [0.0], self.url, "stop", 0)] * n

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        return [None, {len(token_ids): float(top_k)}]

    async def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.made: dict[str, list[Server]] = {}
        config = ServerConfig(roster=folder, server_type="vllm", model_name="m")
        self.servers = ListedServers(config, patience=patience)

    def connect(self, config: ServerConfig, *, patience: float) -> Server:
        url = config.base_url.removesuffix("/v1")
        self.made.setdefault(url, []).append(server := Server(url))
        return server

    def list(self, **boots: int) -> None:
        """The servers that run and have the weights, such as A=1."""
        urls = {"A": A, "B": B}
        members = [Member(name, urls[name], "here", "running", boot) for name, boot in boots.items()]
        (self.folder / MEMBERS_FILE).write_bytes(msgspec.json.encode(members))
        served = {urls[name]: Served(boot, 3) for name, boot in boots.items()}
        (self.folder / SERVED_FILE).write_bytes(msgspec.json.encode(served))


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Servers that join and leave; the parameter is the client's patience."""
    made = Scene(tmp_path, getattr(request, "param", 60.0))
    monkeypatch.setattr(roster, "InferenceClient", made.connect)
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "POLL_S", 0.01)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.005)


async def test_a_request_under_way_is_asked_again_where_a_server_is_left(run: Scene) -> None:
    run.list(A=1, B=1)
    asked = [asyncio.create_task(run.servers.generate([3], 2, ONE)) for _ in range(2)]
    await until(lambda: sum(len(each[0].asked) for each in run.made.values()) == 2)
    assert [each[0].asked for each in run.made.values()] == [[2], [2]], "the one with the fewest in flight is asked"
    run.list(B=1)
    await until(lambda: len(run.made[B][0].asked) == 2)
    run.made[B][0].let.set()
    answers = await asyncio.gather(*asked)
    assert [[each.text for each in answer] for answer in answers] == [[B, B], [B, B]]
    assert run.made[A][0].given_up == 1 and run.made[A][0].closed


async def test_requests_wait_while_no_server_is_left(run: Scene) -> None:
    asked = asyncio.create_task(run.servers.generate([3], 1, ONE))
    await asyncio.sleep(0.1)
    assert not run.made and not asked.done()
    run.list(B=1)
    await until(lambda: B in run.made and len(run.made[B][0].asked) == 1)
    run.made[B][0].let.set()
    assert (await asked)[0].text == B


async def test_a_request_that_comes_as_the_detection_ends_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InferenceClient(ServerConfig(base_url=A), patience=30.0)
    found = GrpoServer("m")
    later: list[asyncio.Task[Kind]] = []

    async def detect(*_: object) -> Kind:
        later.append(asyncio.create_task(client.detected()))  # it runs before the tasks that wait for the end
        return found

    monkeypatch.setattr(inference, "detect", detect)
    assert await client.detected() is found and await later[0] is found and len(later) == 1
    await client.close()


@pytest.mark.parametrize("run", [0.05], indirect=True)
async def test_a_list_that_stays_empty_is_an_error(run: Scene) -> None:
    with pytest.raises(PeerGone) as gone:
        await run.servers.generate([3], 1, ONE)
    assert str(run.folder) in gone.value.field


def named(servers: Sequence[Server], monkeypatch: pytest.MonkeyPatch) -> ListedServers:
    """The client of servers that are named with commas."""
    by_url = {server.url: server for server in servers}
    config = ServerConfig(base_url=",".join(by_url))
    monkeypatch.setattr(roster, "InferenceClient", lambda config, *, patience: by_url[config.base_url])
    return ListedServers(config, patience=30.0)


async def test_requests_go_to_the_server_with_the_fewest_completions_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = every = [Server(url) for url in (A, B, "http://127.0.0.1:9003")]
    several = named(every, monkeypatch)
    waiting = []

    async def ask(n: int) -> None:
        waiting.append(asyncio.create_task(several.generate([1], n, ONE)))
        await until(lambda: sum(len(server.asked) for server in every) == len(waiting))

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


async def test_requests_to_a_server_that_does_not_answer_go_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(Server):
        async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
            self.asked.append(n)
            if self.let.is_set():
                return [Completion(prompt_token_ids, [1], [0.0], self.url, "stop", 0)] * n
            raise PeerGone("not done within 0 s", field=self.url, got="refused")

    dead, good = Dead(A), Server(B)
    good.let.set()
    several = named([dead, good], monkeypatch)
    for n in (1, 2, 3):
        assert (await several.generate([1], n, ONE))[0].text == B
    assert (dead.asked, good.asked) == ([1], [1, 2, 3]), "it is asked once until AWAY_S have passed"
    monkeypatch.setattr(roster, "AWAY_S", 0.01)
    await several.close()
    alone = named([dead], monkeypatch)
    asked = asyncio.create_task(alone.generate([1], 4, ONE))
    await until(lambda: len(dead.asked) >= 3)
    dead.let.set()
    assert (await asked)[0].text == A
    dead.let.clear()
    monkeypatch.setattr(alone, "_patience", 0.0)
    with pytest.raises(PeerGone, match="within 0 s"):
        await alone.generate([1], 1, ONE)
    await alone.close()


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that takes connections and never answers: its URL, and the first lines that it got."""
    asked: list[bytes] = []

    async def take(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    server.close()


async def test_servers_of_unknown_kinds_are_asked_at_once() -> None:
    """A request waits for none of those that are silent, each for its whole time limit."""
    routes = SERVERS["grpo"]
    with answering(lambda request: Reply(json=routes[request.path])) as good:
        async with silent() as one, silent() as two, asyncio.timeout(60):
            several = ListedServers(ServerConfig(base_url=f"{one[0]},{two[0]},{good}", timeout=600.0), patience=600.0)
            for _ in range(3):
                assert (await several.generate([3, 4], 2, FIVE))[0].policy_version == 7
            await several.close()
    assert [each[1] for each in (one, two)] == [[b"GET /bridge/info HTTP/1.1\r\n"]] * 2


async def test_requests_to_servers_that_are_all_silent_are_reported_and_end_with_the_patience(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(roster, "SAY_AFTER_S", 0.0)
    async with silent() as one, silent() as two, asyncio.timeout(60):
        urls = f"{one[0]},{two[0]}"
        several = ListedServers(ServerConfig(base_url=urls, timeout=600.0), patience=600.0)
        with caplog.at_level(logging.INFO, roster.__name__), pytest.raises(PeerGone) as gone:
            request = asyncio.create_task(several.generate([3], 1, ONE))
            await until(lambda: urls in caplog.text)
            monkeypatch.setattr(several, "_patience", 0.0)
            await request
        await several.close()
    assert urls in gone.value.field and caplog.text.count(urls) == 1


async def test_servers_that_stay_silent_are_asked_again_until_the_patience_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "AWAY_S", 0.05)
    async with silent() as one, silent() as two:
        several = ListedServers(ServerConfig(base_url=f"{one[0]},{two[0]}", timeout=0.05), patience=600.0)
        request = asyncio.create_task(several.generate([3], 1, ONE))
        await until(lambda: min(len(one[1]), len(two[1])) > 2)
        monkeypatch.setattr(several, "_patience", 0.0)
        with pytest.raises(PeerGone, match="within 0 s"):
            await request
        await several.close()


async def test_requests_share_the_detection_of_a_server_and_its_error() -> None:
    async with silent() as (url, asked):
        client = InferenceClient(ServerConfig(base_url=url, timeout=0.2), patience=0.0)
        requests = [asyncio.create_task(client.generate([3], 1, ONE)) for _ in range(9)]
        await until(lambda: bool(asked))
        requests[0].cancel()
        _, *found = await asyncio.gather(*requests, return_exceptions=True)
        await client.close()
    assert {type(each) for each in found} == {PeerGone} and len(asked) == 1


def test_several_servers_are_named_with_commas() -> None:
    config = ServerConfig(base_url="http://a:9001/v1/, http://b:9002/v1", model_name="m")
    assert config.base_url == "http://a:9001/v1,http://b:9002/v1"
    assert isinstance(servers(config, patience=30.0), ListedServers)
    assert isinstance(servers(ServerConfig(base_url="http://a:9001/v1"), patience=30.0), InferenceClient)
    with pytest.raises(ValidationError, match="base_url"):
        ServerConfig(base_url="http://a:9001/v1,b:9002")


# teachers ------------------------------------------------------------------------------------------------------------


GROUP = wire.ScoredData(
    tokens=[[5, 6, 7, 8], [5, 6, 9]],
    masks=[[-100, -100, 7, 8], [-100, -100, 9]],
    scores=[1.0, 0.0],
)


def annotate(kind: str, group: wire.ScoredData = GROUP, **changes: Any) -> tuple[wire.ScoredData, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def handle(request: Asked) -> Reply:
        if request.method == "GET":
            known = SERVERS[kind].get(request.path)
            return Reply(json=known) if known else Reply(404)
        body = request.json()
        asked.append(body)
        prompt = body["prompt"]
        tokens = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        likely = [None, *({token: -1.0, token + 1: -0.5, token + 2: -3.0} for token in tokens[1:])]
        if kind == "grpo":
            return Reply(json=generated(body, [1], prompt_logprobs=likely))
        spelt = [
            p and {str(t): {"logprob": lp, "rank": 1, "decoded_token": "x"} for t, lp in p.items()} for p in likely
        ]
        choice = {"text": "", "finish_reason": "length", "prompt_logprobs": spelt}
        return Reply(json={"choices": [choice]})

    with answering(handle) as url:
        settings: dict[str, Any] = {"tokenizer_name": "m", "teacher_url": url, "teacher_top_k": 2, **changes}
        teacher = Teacher.of(BaseEnvConfig(**settings))
        return then_closed(teacher, lambda teacher: teacher.annotate(group)), asked


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


# the engine of verifiers ---------------------------------------------------------------------------------------------


COMMAND = "grpo env verifiers"


def upstream(asked: list[dict[str, Any]]) -> Handle:
    """A server of ours that answers 46, each time as the next version; it refuses prompts that begin with 9."""

    def handle(request: Asked) -> Reply:
        body = request.json()
        asked.append(body)
        if body["prompt"]["prompt_token_ids"][0] == 9:
            return Reply(422, {"error": {"message": "not that one"}})
        return Reply(json=generated(body, [6, 1], version=len(asked), text=["46"]))

    return handle


def ask_engine(
    *requests: tuple[str, dict[str, Any]], max_length: int = 10
) -> tuple[list[httpx.Response], Engine, list[dict[str, Any]]]:
    """What the engine answers to `(trace id, body)`s, and what it asked our server."""
    asked: list[dict[str, Any]] = []

    async def scene(client: InferenceClient) -> tuple[list[httpx.Response], Engine]:
        engine = Engine(client, max_length)
        url = await engine.start()
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                route = url.removesuffix("/v1") + "/inference/v1/generate"
                answers = [
                    await http.post(route, json=body, headers={"X-Session-ID": trace}) for trace, body in requests
                ]
                answers.append(await http.get(f"{url}/models"))
            return answers, engine
        finally:
            await engine.close()

    with answering(upstream(asked)) as server:
        client = InferenceClient(ServerConfig(server_type="vllm", base_url=server), patience=30.0)
        return (*then_closed(client, scene), asked)


def body(*tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": tokens, "sampling_params": sampling}


def test_a_turn_is_answered_as_vllm_would_with_the_servers_ids_and_logprobs() -> None:
    (answer, models), engine, (asked,) = ask_engine(
        ("t", body(3, 4, temperature=0.7, max_tokens=50, stop_token_ids=[1], logprobs=1, skip_special_tokens=False))
    )
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == [6, 1] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:6", "logprob": -0.5},
        {"token": "token_id:1", "logprob": -0.5},
    ]
    assert asked["prompt"] == {"prompt_token_ids": [3, 4]} and asked["stop_token_ids"] == [1]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.7, 1.0, 8)  # 10, less the prompt
    assert models.json()["data"][0]["max_model_len"] == 9
    (turn,) = engine.turns["t"]
    assert (turn.policy_version, turn.temperature) == (1, 0.7)


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        (body(*range(10)), 400, "maximum context length is 10 tokens, the prompt has 10"),
        (body(9), 422, "not that one"),
        ({"model": "policy"}, 422, "missing required field `token_ids`"),
    ],
)
def test_what_can_not_be_answered_is_said(asked: dict[str, Any], status: int, says: str) -> None:
    (answer, _), *_ = ask_engine(("t", asked))
    assert answer.status_code == status and says in answer.json()["error"]["message"]


def test_help_needs_no_installation_and_other_commands_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(verifiers_venv.FOLDER_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert f"{COMMAND} install [PACKAGE" in capsys.readouterr().out and not (tmp_path / "none").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--env.env_id", "x"])
    assert f"`{COMMAND} install`" in capsys.readouterr().err


def test_this_package_is_linked_into_the_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verifiers_venv.FOLDER_VARIABLE, str(tmp_path))
    site = tmp_path / "lib" / "python3" / "site-packages"
    (site / "environments").mkdir(parents=True)  # of an older way to install it
    verifiers_venv.link(tmp_path)
    verifiers_venv.link(tmp_path)
    assert (site / "environments" / "from_verifiers" / "env.py").is_file() and (
        site / "vllm_server" / "protocol"
    ).is_dir()
    assert (site / "grpo_common" / "errors.py").is_file()
    with refusing(ConfigError, f"verifiers {verifiers_venv.VERSION}", words=[f"`{COMMAND} install`"]):
        verifiers_venv.become("environments.from_verifiers", [])
