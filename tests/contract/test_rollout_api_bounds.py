"""What the rollout API takes no more of: groups that nobody trains on, connections, and bodies of any kind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from msgspec.structs import replace

from environments.api import wire
from environments.config import BaseEnvConfig
from environments.peers.rollout_api import RolloutApi
from tests.contract.test_rollout_api import ENV, TRAINER, start_run
from tests.foreign import mangled
from tests.processes import answers, free_port, running, wait_for
from tests.rollout_api import running_server
from tests.stand_ins import then_closed

TOKENS = 8192
GROUP = wire.ScoredData(tokens=[[7] * TOKENS] * 2, masks=[[7] * TOKENS] * 2, scores=[0.0, 1.0])
BODY = wire.encode_group(GROUP)  # 131 kB: four bytes for a token and four for its mask
MIB = 1 << 20
DESCRIPTORS = 256
ENVIRONMENTS = 200
MSGPACK = {"Content-Type": wire.MSGPACK}
LIMITED = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
runpy.run_module("environments.api", run_name="__main__")
"""


def post(api: httpx.Client, path: str = "/scored_data", body: bytes = BODY) -> httpx.Response:
    return api.post(path, content=body, headers=MSGPACK)


def fill(api: httpx.Client, body: bytes = BODY) -> int:
    """Post until it is refused; how many groups were taken."""
    taken = 0
    while (answer := post(api, body=body)).status_code == 200:
        taken += 1
        assert taken < 100
    assert answer.status_code == 429
    return taken


def warnings_of(log: Path) -> int:
    return log.read_text().count(" WARNING ")


@contextlib.contextmanager
def small_api(tmp_path: Path, *arguments: str) -> Iterator[httpx.Client]:
    log = tmp_path / "log"
    with running_server("--max-queued-mb", "1", *arguments, log=log) as server, httpx.Client() as client:
        client.base_url, client.headers["Content-Type"] = httpx.URL(server.url), wire.JSON
        yield client


@pytest.mark.parametrize("where", ["memory", "store"])
def test_a_full_queue_refuses_posts_until_a_batch_is_taken(tmp_path: Path, where: str) -> None:
    with small_api(tmp_path, *(["--store", str(tmp_path / "s")] if where == "store" else [])) as api:
        start_run(api, batch_size=2)
        taken = fill(api)
        status = api.get("/status").json()
        assert status["max_queued_bytes"] == MIB
        assert MIB <= status["queued_bytes"] < MIB + len(BODY) + 100
        assert (status["queue_size"], len(status["warnings"])) == (taken, 1)
        refused = post(api)
        assert (refused.status_code, int(refused.headers["retry-after"])) == (429, 5)
        assert all(part in refused.json()["detail"] for part in ("--max-queued-mb", "1 MiB"))
        as_list = json.dumps([{"tokens": [[1]], "masks": [[1]], "scores": [0.5]}]).encode()
        assert api.post("/scored_data_list", content=as_list).status_code == 429
        wait_for("full", lambda: warnings_of(tmp_path / "log") == 1, tmp_path / "log", 20)
        for _ in range(3):  # the trainer takes one, a poster fills up
            assert api.get("/batch?lease=60").json()["batch_id"]
            assert fill(api) == 1
        assert warnings_of(tmp_path / "log") == 1
        api.post("/reset_data")
        assert post(api).status_code == 200
        start_run(api, batch_size=1000)  # of which more must wait
        assert 2 * taken - 2 <= fill(api) <= 2 * taken


@pytest.mark.parametrize(("groups", "status"), [(50_000, 422), (2_000_000, 413), (21_000_000, 413)])
def test_scored_data_list_of_wrong_groups_takes_no_memory(groups: int, status: int) -> None:
    body = b"[" + b"{}," * (groups - 1) + b"{}]"
    with running_server() as server, httpx.Client(base_url=server.url) as api:
        process = psutil.Process(server.process.pid)
        assert api.get("/status").status_code == 200
        before = process.memory_info().rss
        answer = api.post("/scored_data_list", content=body, headers={"Content-Type": wire.JSON})
        assert answer.status_code == status and len(answer.content) < 20_000
        assert process.memory_info().rss - before < 50e6
        assert api.get("/status").json()["queue_size"] == 0


def test_a_queue_that_was_full_is_full_after_a_restart(tmp_path: Path) -> None:
    with small_api(tmp_path, "--store", str(tmp_path / "s")) as api:
        fill(api)
    with small_api(tmp_path, "--store", str(tmp_path / "s")) as api:
        assert post(api).status_code == 429
    with running_server("--store", str(tmp_path / "s"), "--max-queued-mb", "2") as server:
        assert httpx.get(f"{server.url}/status").json()["max_queued_bytes"] == 2 * MIB


def test_groups_that_are_buffered_count(tmp_path: Path) -> None:
    with small_api(tmp_path) as api:
        start_run(api)
        assert api.post("/register-env", json=ENV | {"group_size": 1000}).json()["env_id"] == 0
        taken = fill(api, wire.encode_group(replace(GROUP, env_id=0)))
        assert api.get("/status").json()["buffered_groups"] == taken


def test_our_environment_waits_for_room(tmp_path: Path) -> None:
    async def run(environment: RolloutApi) -> None:
        posting = asyncio.create_task(environment.post(GROUP))
        before = api.get("/status").json()["queue_size"]
        done, _ = await asyncio.wait([posting], timeout=0.3)
        assert not done
        assert api.get("/batch").json()["batch"]
        await posting
        assert api.get("/status").json()["queue_size"] == before

    with small_api(tmp_path) as api:
        start_run(api, batch_size=2)
        fill(api)
        url = str(api.base_url)
        then_closed(RolloutApi(BaseEnvConfig(tokenizer_name="m", group_size=2, rollout_server_url=url)), run)


def status_of_new_connection(port: int) -> int:
    """0: the connection was reset, as those are for which there is no descriptor."""
    with (
        contextlib.suppress(ConnectionError),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection,
    ):
        connection.request("GET", "/status")
        return connection.getresponse().status
    return 0


def test_connections_beyond_the_limit_are_refused_until_others_leave(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    with running("-c", LIMITED, "--port", str(port), "--store", str(tmp_path / "s"), log=log) as process:
        wait_for("the API", lambda: answers(f"http://127.0.0.1:{port}/info"), log, 60)
        with contextlib.ExitStack() as held:
            for _ in range(DESCRIPTORS * 3 // 4):
                half = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                half.sendall(b"GET /status HTTP/1.1\r\n")
            wait_for("a refusal", lambda: status_of_new_connection(port) == 503, log, 30)
            for _ in range(DESCRIPTORS):  # more than the process has descriptors: the rest is closed or waits
                held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        wait_for("an answer", lambda: status_of_new_connection(port) == 200, log, 30)
        assert process.poll() is None


def test_two_hundred_environments_never_meet_the_limit_of_connections(tmp_path: Path) -> None:
    """Each has three long polls and posts, and the trainer acknowledges batches, all at once."""

    async def environment(client: httpx.AsyncClient, number: int) -> list[int]:
        news = await client.get(f"/status-env?env_id={number}&wait=0")
        poll = f"/status-env?env_id={number}&wait=2&seen={news.json()['seen']}"
        answers = [news, *await asyncio.gather(*[client.get(poll) for _ in range(3)], post_group(client))]
        answers += [await post_group(client) for _ in range(3)]
        return [each.status_code for each in answers]

    async def post_group(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/scored_data", content=small, headers=MSGPACK)

    async def trainer(client: httpx.AsyncClient) -> list[int]:
        statuses = []
        for step in range(20):
            while "batch_id" not in (taken := await client.get("/batch?lease=60&wait=10")).json():
                statuses.append(taken.status_code)  # a busy machine delays the posts
            done = await client.post(f"/batch/{taken.json()['batch_id']}/ack", json={"step": step + 1})
            statuses += [taken.status_code, done.status_code]
        return statuses

    async def run(url: str) -> list[int]:
        async with contextlib.AsyncExitStack() as held:
            opening = [httpx.AsyncClient(base_url=url, timeout=60, verify=False) for _ in range(ENVIRONMENTS + 1)]
            clients = [await held.enter_async_context(each) for each in opening]
            asking = [environment(client, number) for number, client in enumerate(clients[:-1])]
            return [status for each in await asyncio.gather(*asking, trainer(clients[-1])) for status in each]

    small = wire.encode_group(wire.ScoredData(tokens=[[7]] * 2, masks=[[7]] * 2, scores=[0.0, 1.0]))
    with running_server(log=tmp_path / "log") as server, httpx.Client(base_url=server.url) as api:
        start_run(api, batch_size=8)
        for number in range(ENVIRONMENTS):
            assert api.post("/register-env", json=ENV | {"desired_name": f"e{number}"}).json()["env_id"] == number
        assert set(asyncio.run(run(server.url))) == {200}
        assert warnings_of(tmp_path / "log") == 0


BODIES = 10_000
GOOD = {
    "tokens": [[1, 2, 3], [4, 5, 6]],
    "masks": [[-100, 2, 3], [-100, 5, 6]],
    "scores": [0.5, -1.5],
    "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.1, -0.2]],
    "messages": [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]],
    "overrides": [{"sft": True}, {}],
    "group_overrides": {"group_size": 2},
}
OTHERS = ("advantages", "env_id", "images", "distill_token_ids", "policy_versions", "z")
QUERIES = {
    "/batch": ("lease", "request", "uuid", "wait"),
    "/status-env": ("env_id", "wait", "seen"),
    "/evaluations": ("after",),
}
VALUES = ("", "x", "-1", "0", "0.01", "1.5", "1e308", "nan", "inf", "9" * 400, "%00", "%ff", "true", "null", "[]")
PATHS = ("/scored_data", "/scored_data_list", "/register", "/register-env", "/disconnect-env", "/batch/x/ack")


def odd_query(draw: random.Random) -> str:
    path = draw.choice([*QUERIES])
    return (
        path + "?" + "&".join(f"{draw.choice(QUERIES[path])}={draw.choice(VALUES)}" for _ in range(draw.randrange(4)))
    )


class Client:
    """Sends anything to a server, and finds an answer to all of it that is no failure of the server's."""

    def __init__(self, port: int, log: Path) -> None:
        self.connection, self.log = http.client.HTTPConnection("127.0.0.1", port, timeout=60), log
        self.statuses: Counter[int] = Counter()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        sent = {"Content-Type": wire.JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
        self.connection.request(method, path, body, sent)
        answer = self.connection.getresponse()
        content = answer.read()
        self.statuses[answer.status] += 1
        assert answer.status < 500, (path, sent, self.log.read_text()[-3000:])
        if answer.status >= 400:
            refusal = json.loads(content)
            assert refusal.get("detail") or refusal.get("rejected"), content
        return content


def test_ten_thousand_malformed_bodies(tmp_path: Path) -> None:
    draw = random.Random(20240711)
    with running_server("--max-body-mb", "4", log=tmp_path / "log") as server:
        process = psutil.Process(server.process.pid)
        client, sizes = Client(server.port, server.log), []
        for number in range(BODIES):
            path = draw.choice(PATHS) if draw.random() < 0.3 else "/scored_data"
            headers = {"Content_Type": draw.choice([wire.JSON, wire.JSON, wire.MSGPACK, "text/plain"])}
            if draw.random() < 0.1:
                headers["Content_Encoding"] = draw.choice(["gzip", "br", ""])
            client.ask("POST", path, mangled(draw, GOOD, OTHERS), **headers)
            if number % 1000 == 999:
                sizes.append(process.memory_info().rss)
        client.ask("GET", "/reset_data")
        assert json.loads(client.ask("POST", "/scored_data", json.dumps(GOOD).encode())) == {"status": "received"}
    assert client.statuses[422] > BODIES / 10
    assert client.statuses[400] > BODIES / 10
    assert sizes[-1] - sizes[0] < 50e6, f"memory grew: {sizes}"


def test_odd_queries(tmp_path: Path) -> None:
    draw = random.Random(20240712)
    # Requests that wait are held for a third of the time-out.
    with running_server("--env-timeout", "0.03", log=tmp_path / "log") as server:
        client = Client(server.port, server.log)
        assert b"uuid" in client.ask("POST", "/register", json.dumps(TRAINER | {"batch_size": 2}).encode())
        for number in range(1_000):
            if number % 10 == 0:
                assert b'"received"' in client.ask("POST", "/scored_data", json.dumps(GOOD).encode())
            client.ask("GET", odd_query(draw))
            client.ask("POST", f"/batch/x/extend?lease={draw.choice(VALUES)}&step={draw.choice(VALUES)}")
        assert b"current_step" in client.ask("GET", "/status")
    assert client.statuses[422] > 200
    assert client.statuses[200] > 200
