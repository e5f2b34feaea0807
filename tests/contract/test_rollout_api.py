"""The rollout API over HTTP, line by line of the wire contract; requests that wait for a batch or for room."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from environments.api import wire
from tests.rollout_api import ServerProcess, running_server
from tests.stand_ins import registration

TRAINER = msgspec.to_builtins(registration(4, max_token_len=512, starting_step=3, num_steps=100))
ENV: dict[str, Any] = {"max_token_length": 512, "desired_name": "env", "weight": 1.0, "group_size": 2}
WAIT = "wait for trainer to start"
GROUP_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server("--max-body-mb", "8", log=tmp_path_factory.mktemp("api") / "log") as server:
        yield server


@pytest.fixture
def api(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, headers={"Content-Type": wire.JSON}) as client:
        client.get("/reset_data")
        yield client


def group(size: int = 2, length: int = 3, first: int = 1, **fields: Any) -> dict[str, Any]:
    rows = [[first + i] * length for i in range(size)]
    return {"tokens": rows, "masks": [[-100, *row[1:]] for row in rows], "scores": [0.5] * size, **fields}


def start_run(api: httpx.Client, **trainer: Any) -> None:
    assert api.post("/register", json=TRAINER | trainer).status_code == 200
    assert api.get("/batch").json() == {"batch": None}


@pytest.fixture
def run(api: httpx.Client) -> httpx.Client:
    """A client of an API whose trainer waits for its first batch."""
    start_run(api)
    return api


def test_before_a_trainer(api: httpx.Client):
    assert "message" in api.get("/").json()
    assert api.get("/wandb_info").json() == {"group": None, "project": None}
    assert api.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/latest_example").json()["tokens"] == []
    assert api.post("/register-env", json=ENV).json() == {"status": WAIT}
    unregistered = api.get("/batch").json()
    assert (unregistered["status"], unregistered["batch"]) == ("error", [])


def test_a_run_from_register_to_batch(api: httpx.Client):
    assert isinstance(api.post("/register", json=TRAINER).json()["uuid"], int)
    assert api.post("/register-env", json=ENV).json() == {"status": WAIT}
    assert api.get("/batch").json() == {"batch": None}
    assert api.post("/register-env", json=ENV).json() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "env_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 3,
        "num_steps": 100,
    }
    assert api.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert api.get("/info").json() == {"batch_size": 4, "max_token_len": 512}
    for first in (1, 5):
        assert api.post("/scored_data", json=group(first=first, env_id=0, unknown=1)).json() == {"status": "received"}
    status = api.get("/status").json()
    assert (status["current_step"], status["queue_size"]) == (3, 2)
    batch = api.get("/batch").json()["batch"]
    assert [each["tokens"][0][0] for each in batch] == [1, 5]
    assert all(set(each) == GROUP_KEYS for each in batch)
    assert api.get("/status").json()["current_step"] == 4
    assert api.get("/latest_example").json()["tokens"][0][0] == 5
    assert api.post("/disconnect-env", json={"env_id": 0}).json() == {"status": "success"}
    assert api.get("/reset_data").text == "Reset successful"
    assert api.get("/info").json()["batch_size"] == -1


def test_status_env_by_body_and_by_query(run: httpx.Client):
    run.post("/register-env", json=ENV)
    by_body, by_query = run.request("GET", "/status-env", json={"env_id": 0}), run.get("/status-env?env_id=0")
    assert by_body.json() == by_query.json() == {
        **{"current_step": 3, "queue_size": 0, "unallocated_fraction": 1.0},
        **{"self_queue_size": 0, "max_group_size": 1, "env_weight": 1.0},
    }  # fmt: skip


def test_all_fields_come_back_as_they_went(api: httpx.Client):
    start_run(api, batch_size=2)
    sent = group(
        advantages=[[0.1] * 3, [0.2] * 3],
        ref_logprobs=[[-0.1] * 3, [-0.2] * 3],
        inference_logprobs=[[1.0, -0.5, -1e-7], [1.0, -0.25, -3.3]],
        messages=[[{"role": "user", "content": "ü", "reward": None}], [{"role": "x", "content": [{"a": 1}]}]],
        generation_params={"temperature": 0.7},
        overrides=[{"sft": True}, {}],
        group_overrides={"group_size": 2},
        images=["data"],
        distill_token_ids=[[[], [1, 2], [3]], [[], [4], [5]]],
        distill_logprobs=[[[], [-0.1, -0.2], [-0.3]], [[], [-0.4], [-0.5]]],
    )
    assert api.post("/scored_data", json=sent).json() == {"status": "received"}
    (back,) = api.get("/batch").json()["batch"]
    assert back == sent | {"env_id": None}


def test_empty_means_absent_and_policy_versions_are_kept_where_they_are_sent(api: httpx.Client):
    start_run(api, batch_size=2)
    empty = {"messages": [], "overrides": [], "group_overrides": {}, "generation_params": {}, "ref_logprobs": []}
    sent = group(**empty, inference_logprobs=[[], []], policy_versions=[1, 2])
    assert api.post("/scored_data", json=sent).status_code == 200
    assert api.get("/status").json()["staleness"] == {"oldest_version": 1, "newest_version": 2, "behind": 2}
    (back,) = api.get("/batch").json()["batch"]
    assert {back[name] for name in ("messages", "overrides", "ref_logprobs", "inference_logprobs")} == {None}
    assert back["policy_versions"] == [1, 2]


@pytest.mark.parametrize("packed", [True, False])
def test_messagepack_both_ways(api: httpx.Client, packed: bool):
    start_run(api, batch_size=2)
    sent = wire.ScoredData(**group(inference_logprobs=[[1.0, -0.5, -0.1], [1.0, -0.25, -0.2]], policy_versions=[7, 7]))
    body = wire.encode_group(sent) if packed else wire.encode(sent, wire.MSGPACK)
    headers = {"Content-Type": wire.MSGPACK, "Accept": wire.MSGPACK}
    answer = api.post("/scored_data", content=body, headers=headers)
    assert wire.decode(answer.content, wire.ScoredDataResponse, wire.MSGPACK).status == "received"
    batch = api.get("/batch?lease=30", headers=headers)
    leased = wire.decode_batch(batch.content, batch.headers["content-type"])
    assert leased.batch == [sent]
    assert leased.batch_id is not None


def test_lease_acknowledge_extend_release(run: httpx.Client):
    for first in (1, 3, 5, 7):
        run.post("/scored_data", json=group(first=first))
    first = run.get("/batch?lease=30").json()
    assert first["current_step"] == 3
    assert 29 < first["expires_in_s"] <= 30
    again = run.get("/batch?lease=30&request=one").json()
    assert again["batch"] != first["batch"], "what is leased is not given out twice"
    assert run.get("/batch?lease=30&request=one").json()["batch_id"] == again["batch_id"]
    assert run.post(f"/batch/{first['batch_id']}/extend?lease=60").json() == {"status": "extended", "current_step": 3}
    assert run.post(f"/batch/{first['batch_id']}/ack").json() == {"status": "acknowledged", "current_step": 4}
    assert run.post(f"/batch/{first['batch_id']}/ack").json() == {"status": "acknowledged", "current_step": 4}
    assert run.post(f"/batch/{again['batch_id']}/release").json()["status"] == "released"
    third = run.get("/batch?lease=30").json()
    assert third["batch"] == again["batch"]
    for held, call, reason in ((again, "ack", "released"), (first, "extend?lease=9", "acknowledged")):
        refused = run.post(f"/batch/{held['batch_id']}/{call}")
        assert (refused.status_code, refused.json()["reason"]) == (409, reason)
    assert run.post(f"/batch/{third['batch_id']}/ack", json={"step": 9}).json()["current_step"] == 9
    assert {run.post(f"/batch/nothing/{what}").status_code for what in ("ack", "release", "extend?lease=9")} == {404}


def test_a_second_register_takes_over(run: httpx.Client):
    old = run.post("/register", json=TRAINER).json()["uuid"]
    for first in (1, 3):
        run.post("/scored_data", json=group(first=first))
    held = run.get(f"/batch?lease=1000&uuid={old}").json()
    new = run.post("/register", json=TRAINER | {"batch_size": 2, "starting_step": 8}).json()["uuid"]
    assert new != old
    assert (
        run.post("/register", json=TRAINER | {"batch_size": 2, "starting_step": 8, "uuid": new}).json()["uuid"] == new
    )
    assert run.get("/status").json()["current_step"] == 8
    for refused in (run.get(f"/batch?lease=1000&uuid={old}"), run.post(f"/batch/{held['batch_id']}/ack")):
        assert (refused.status_code, refused.json()["reason"]) == (409, "taken over")
    assert [each["tokens"][0][0] for each in run.get(f"/batch?uuid={new}").json()["batch"]] == [1]


def test_buffering_as_the_original_answers_it(run: httpx.Client):
    run.post("/register-env", json=ENV | {"group_size": 4})
    assert run.post("/scored_data", json=group(3, env_id=0)).json() == {"status": "buffered", "buffer_size": 3}
    answer = run.post("/scored_data_list", json=[group(1, env_id=0), group(4, env_id=0)]).json()
    assert answer == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 0}
    assert sum(len(each["tokens"]) for each in run.get("/batch").json()["batch"]) == 4


TEACHER = {"distill_token_ids": [[[], [1], [1]]] * 2, "distill_logprobs": [[[], [-1.0], [-1e39]]] * 2}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"scores": [float("nan"), 1.0]}, "scores[0]", "nan"),
    ({"scores": [1e308, 1e308]}, "scores[0]", "1e+308"),  # infinite in the trainer's float32, as their sum
    ({"scores": [1.0]}, "scores", "1 for 2 sequences"),
    ({"scores": None}, "scores", "`array`"),
    ({"inference_logprobs": [[1.0, -0.5, float("nan")], [1.0] * 3]}, "inference_logprobs[0][2]", "nan"),
    ({"inference_logprobs": [[1.0] * 3, [1.0, -1e39, 0.0]]}, "inference_logprobs[1][1]", "e+39"),
    ({"inference_logprobs": [[1.0] * 3, [1.0]]}, "inference_logprobs[1]", "1 entries, tokens[1] has 3"),
    ({"ref_logprobs": [[1.0] * 3]}, "ref_logprobs", "1 sequences"),
    ({"advantages": [[1.0] * 3, [0.0, -1e300, 0.0]]}, "advantages[1][1]", "-1e+300"),
    ({"advantages": [[1.0, 2.0], [1.0] * 3]}, "advantages[0]", "2 entries"),
    ({"masks": [[1, 1], [1, 1, 1]]}, "masks[0]", "2 entries, tokens[0] has 3"),
    ({"tokens": [], "masks": [], "scores": []}, "tokens", "empty"),
    ({"tokens": [[], []], "masks": [[], []]}, "tokens[0]", "empty"),
    ({"tokens": [[2**31, 1, 1], [1, 1, 1]]}, "tokens[0][0]", "<= 2147483647"),
    ({"tokens": [["a", 1, 1], [1, 1, 1]]}, "tokens[0][0]", "`str`"),
    ({"tokens": [[1, 1, 1], [1, -1, 1]]}, "tokens[1][1]", "-1, "),
    ({"messages": [[{"role": "user"}], []]}, "messages[0][0]", "no `content`, "),
    ({"policy_versions": [1]}, "policy_versions", "1 for 2 sequences"),
    ({"distill_token_ids": [[[1]] * 3, [[1]] * 3]}, "distill_logprobs", "0 sequences"),
    (TEACHER, "distill_logprobs[0][2][0]", "-1e+39"),
    ({"env_id": 99}, "env_id", "99"),
    ({"env_id": -1}, "env_id", ">= 0"),
    ({"overrides": [{}]}, "overrides", "1 for 2 sequences"),
    ({"generation_params": {"temperature": "hot"}}, "generation_params.temperature", "'hot'"),
    ({"group_overrides": {"temperature": -1.0}}, "group_overrides.temperature", "-1.0"),
    *(
        ({"overrides": [{"temperature": heat}, {}]}, "overrides[0].temperature", str(heat))
        for heat in (0, True, 1e39, 1e-06, {"a": 1})
    ),
    ({"overrides": [{}, {"sft": "false"}]}, "overrides[1].sft", "'false'"),
]


def forms(fields: dict[str, Any]) -> Iterator[tuple[bytes, str]]:
    """A group in each way in which it may be sent: JSON, MessagePack with lists, and packed if its rows can be."""
    yield json.dumps(fields).encode(), wire.JSON
    yield msgspec.msgpack.encode(fields), wire.MSGPACK
    with contextlib.suppress(msgspec.ValidationError):
        data = msgspec.convert(fields, wire.ScoredData)
        rows = (data.tokens, data.masks, data.inference_logprobs or data.tokens, data.advantages or data.tokens)
        if all([len(row) for row in each] == [3, 3] for each in (*rows, data.ref_logprobs or data.tokens)):
            yield wire.encode_group(data), wire.MSGPACK


@pytest.mark.parametrize(("fields", "place", "said"), BAD)
def test_a_bad_group_is_refused_by_its_place_and_good_ones_beside_it_are_taken(
    run: httpx.Client, fields: dict[str, Any], place: str, said: str
):
    bad, key = group(**fields), re.split(r"\W", place)[0]
    for body, content_type in forms(bad):
        refused = run.post("/scored_data", content=body, headers={"Content-Type": content_type})
        assert (refused.status_code, refused.json()["field"]) == (422, key), refused.text
        assert refused.json()["detail"].startswith(f"{place}: ") and said in refused.json()["detail"]
    mixed = run.post("/scored_data_list", content=json.dumps([group(first=1), bad, group(first=3)]))
    answer = mixed.json()
    assert (mixed.status_code, answer["status"], answer["groups_processed"]) == (422, "partial", 2)
    assert [(each["group"], each["field"]) for each in answer["rejected"]] == [(1, key)]
    assert [each["tokens"][0][0] for each in run.get("/batch").json()["batch"]] == [1, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_params": {"temperature": 0.7, "stop": ["x"]}},
        {"generation_params": {"temperature": None}},
        {"overrides": [{"sft": 1, "set_advantage_to_zero": False}, {"sft": None}]},
        {"scores": [3.4e38, -3.4e38], "advantages": [[1e-300] * 3] * 2},  # what is nothing in float32 is no harm
        {"distill_token_ids": [[[], [7], [-1]]] * 2, "distill_logprobs": [[[], [-1.0], [0.0]]] * 2},
    ],
)
def test_an_odd_group_that_can_be_trained_on_comes_back_as_it_went(api: httpx.Client, fields: dict[str, Any]):
    start_run(api, batch_size=2)
    for body, content_type in forms(group(**fields)):
        assert api.post("/scored_data", content=body, headers={"Content-Type": content_type}).is_success
        (back,) = api.get("/batch").json()["batch"]
        assert {name: back[name] for name in fields} == fields


GZIP = {"Content-Encoding": "gzip"}
WHOLE = gzip.compress(json.dumps(group()).encode())
LARGE = {"env_id": 0, "step": 0, "metrics": {f"{each:0512}": 1.0 for each in range(2100)}}  # 1.1 MB
REFUSED: list[tuple[str, str, int, str | None, dict[str, Any]]] = [
    *(
        ("POST", "/register-env", 422, name, {"json": ENV | {name: value}})
        for name, value in (
            ("weight", -1.0),
            ("group_size", 0),
            ("min_batch_allocation", 1.5),
            ("max_token_length", "x"),
        )
    ),
    ("GET", "/status-env", 404, "env_id", {"json": {"env_id": 5}}),
    ("GET", "/status-env?env_id=5", 404, "env_id", {}),
    ("GET", "/status-env?env_id=x", 422, "env_id", {}),
    ("GET", "/batch?lease=null", 422, "lease", {}),  # not a batch without a lease
    ("GET", "/batch?wait=61", 422, "wait", {}),
    ("GET", "/batch?wait=x", 422, "wait", {}),
    ("POST", "/evaluation", 413, None, {"content": msgspec.json.encode(LARGE)}),  # a message may have 1 MiB
    ("POST", "/scored_data", 415, "Content-Encoding", {"content": b"x", "headers": {"Content-Encoding": "br"}}),
    ("GET", "/nothing", 404, None, {}),
    ("GET", "/register", 405, None, {}),
    *(
        ("POST", "/scored_data", 400, "Content-Encoding", {"content": body, "headers": GZIP})
        for body in (
            b"not gzip at all",
            gzip.compress(b"{}" * 1000)[:-9],
            gzip.compress(b"{}") + b"rest",
            WHOLE[:-8] + bytes([WHOLE[-8] ^ 0xFF]) + WHOLE[-7:],  # the checksum
        )
    ),
]


@pytest.mark.parametrize(("method", "path", "status", "field", "sent"), REFUSED)
def test_what_is_refused_is_named(
    run: httpx.Client, method: str, path: str, status: int, field: str | None, sent: dict[str, Any]
):
    answer = run.request(method, path, **sent)
    assert (answer.status_code, answer.json().get("field")) == (status, field) and answer.json()["detail"]
    assert run.post("/disconnect-env", json={"env_id": 5}).json()["status"] == "failure"


def test_packed_groups_have_messages_that_the_page_shows(run: httpx.Client) -> None:
    messages = [[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]] * 2
    sent = wire.ScoredData(**group(messages=messages))
    packed = run.post("/scored_data", content=wire.encode_group(sent), headers={"Content-Type": wire.MSGPACK})
    assert packed.status_code == 200, packed.text
    assert [sample["texts"] for sample in run.get("/overview").json()["samples"]] == [["user: 2+2=\nassistant: 4"] * 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_evaluation_refuses_a_figure_that_is_not_finite(run: httpx.Client, value: float):
    """JSON has no such number: the trainer could read no evaluation of any environment."""
    env_id = run.post("/register-env", json=ENV).json()["env_id"]
    body = {"env_id": env_id, "step": 1, "metrics": {"accuracy": 0.5, "loss": value}}
    headers = {"Content-Type": wire.MSGPACK}
    refused = run.post("/evaluation", content=msgspec.msgpack.encode(body), headers=headers)
    assert refused.status_code == 422 and refused.json()["field"] == "metrics"
    kept = run.post("/evaluation", json={"env_id": env_id, "step": 1, "metrics": {"accuracy": 0.5}})
    assert kept.status_code == 200
    assert [each["metrics"] for each in run.get("/evaluations").json()["evaluations"]] == [{"accuracy": 0.5}]


def test_a_name_changes_nothing_but_its_place_in_the_log(run: httpx.Client, server: ServerProcess):
    name = "\x1b]0;evil\x07\nINFO \u202eforged"
    assert run.post("/register-env", json=ENV | {"desired_name": name}).status_code == 200
    said = server.log.read_text()
    assert "\\x1b]0;evil\\x07\\nINFO \\u202eforged" in said and "\x1b" not in said and "\nINFO" not in said


def test_gzip_both_ways(api: httpx.Client):
    start_run(api, batch_size=2)
    body = gzip.compress(json.dumps(group(length=500)).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert api.post("/scored_data", content=body, headers=headers).status_code == 200
    answer = api.get("/batch", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert len(answer.json()["batch"][0]["tokens"][0]) == 500
    assert "content-encoding" not in api.get("/info").headers
    body = json.dumps(group()).encode()
    members = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert api.post("/scored_data", content=members, headers=headers).status_code == 200
    assert "content-encoding" not in api.get("/latest_example", headers={"Accept-Encoding": "identity"}).headers


def test_a_gzip_bomb_is_refused_and_memory_stays_bounded(api: httpx.Client, server: ServerProcess):
    process = psutil.Process(server.process.pid)
    bomb = gzip.compress(bytes(400_000_000), 9)
    assert len(bomb) < 1 << 20
    before = process.memory_info().rss
    answer = api.post("/scored_data", content=bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 413
    assert process.memory_info().rss - before < 50e6
    assert api.post("/scored_data", content=bytes(5 << 20)).status_code == 413
    assert api.post("/scored_data", content=iter([bytes(1 << 20)] * 5)).status_code == 413


def test_a_body_of_json_may_be_a_quarter_of_one_of_messagepack(run: httpx.Client):
    long = wire.ScoredData(**group(2, 300_000))  # type: ignore[arg-type]
    body, packed = wire.encode(long), wire.encode_group(long)
    assert 2 << 20 < len(packed) < 8 << 20 and 2 << 20 < len(body) < 8 << 20
    refused = run.post("/scored_data", content=body)
    assert refused.status_code == 413 and "--max-body-mb" in refused.json()["detail"]
    assert run.post("/scored_data", content=packed, headers={"Content-Type": wire.MSGPACK}).status_code == 200


def test_a_long_group_comes_back_whole(api: httpx.Client):
    start_run(api, batch_size=8)
    long = group(8, 20_000, inference_logprobs=[[-0.1] * 20_000] * 8, advantages=[[2.0]] * 8)
    assert len(json.dumps(long)) > 1 << 20
    assert api.post("/scored_data", json=long).json() == {"status": "received"}
    (back,) = api.get("/batch").json()["batch"]
    assert back["tokens"] == long["tokens"]
    assert back["inference_logprobs"] == long["inference_logprobs"]
    assert back["advantages"] == [[2.0] * 20_000] * 8  # one number for the whole sequence is one per token
    ragged = long | {"inference_logprobs": [[-0.1] * 20_000] * 7 + [[-0.1]]}
    assert api.post("/scored_data", json=ragged).json()["field"] == "inference_logprobs"
    wrong = long | {"masks": [[1] * 19_999 + ["x"]] * 8}
    assert "masks[0]" in api.post("/scored_data", json=wrong).json()["detail"]


def test_a_repeated_post_with_its_key_counts_once(run: httpx.Client):
    for _ in range(2):
        assert run.post("/scored_data", json=group(), headers={"Idempotency-Key": "k"}).json() == {"status": "received"}
    assert run.get("/status").json()["queue_size"] == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_busy_port_and_no_key_end_it(server: ServerProcess, host: str):
    command = [sys.executable, "-m", "environments.api", "--host", host, "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert ("--api-key" if host == "0.0.0.0" else f"pid {server.process.pid}") in done.stderr


A_FAULT = """
import sys
from environments.api.__main__ import main
from environments.api.service import Service

def trainer(self):
    raise ValueError("what a request\\x1b[31m said")

Service.trainer = property(trainer)
sys.exit(main(sys.argv[1:]))
"""


def test_the_traceback_of_a_fault_is_printable(tmp_path: Path):
    server = ServerProcess(log=tmp_path / "log", program=("-c", A_FAULT))
    server.start()
    try:
        assert httpx.get(f"{server.url}/info").status_code == 500
    finally:
        server.stop()
    log = (tmp_path / "log").read_text()
    assert log.count("ValueError: what a request\\x1b[31m said\n") == 1 and "\x1b" not in log


LONG = 15  # seconds, of which nothing here takes as much
SIX = {"current_step", "queue_size", "unallocated_fraction", "self_queue_size", "max_group_size", "env_weight"}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def waiting(threads: ThreadPoolExecutor, run: httpx.Client, path: str) -> Future[Any]:
    """A request for which the server waits: it has answered one that was sent later."""
    sent = threading.Event()

    def note(event: str, _: object) -> None:
        if event == "http11.send_request_body.complete":
            sent.set()

    future = threads.submit(lambda: run.get(path, extensions={"trace": note}).json())
    assert sent.wait(60)
    run.get("/info")
    assert not future.done()
    return future


def register(run: httpx.Client) -> int:
    return run.post("/register-env", json=ENV).json()["env_id"]


def post(run: httpx.Client, env_id: int) -> None:
    assert run.post("/scored_data", json=group(env_id=env_id)).status_code == 200


def test_a_batch_is_answered_when_it_is_complete(run: httpx.Client, threads: ThreadPoolExecutor) -> None:
    env_id = register(run)
    future = waiting(threads, run, f"/batch?lease=60&wait={LONG}")
    post(run, env_id)
    assert not future.done()
    post(run, env_id)
    assert len(future.result(LONG / 2)["batch"]) == 2


def test_a_trainer_that_waits_hears_that_another_has_taken_over(run: httpx.Client, threads: ThreadPoolExecutor) -> None:
    uuid = run.post("/register", json=TRAINER).json()["uuid"]
    future = waiting(threads, run, f"/batch?lease=60&uuid={uuid}&wait={LONG}")
    run.post("/register", json=TRAINER)
    assert future.result(LONG / 2)["reason"] == "taken over"


def test_no_batch_is_leased_to_a_client_that_has_gone(run: httpx.Client, server: ServerProcess) -> None:
    env_id = register(run)
    limits = httpx.Timeout(60, read=0.3)
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=limits) as impatient:
        impatient.get(f"/batch?lease=60&wait={LONG}")
    post(run, env_id)
    post(run, env_id)
    assert not run.get("/status").json()["leases"]
    assert len(run.get("/batch").json()["batch"]) == 2


def test_room_is_told_when_a_batch_leaves_and_when_the_step_moves(
    run: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    env_id = register(run)
    known = run.get(f"/status-env?env_id={env_id}&wait=0").json()
    assert known.keys() == SIX | {"leased", "seen", "trainer"} and known["leased"] == 0
    future = waiting(threads, run, f"/status-env?env_id={env_id}&wait={LONG}&seen={known['seen']}")
    post(run, env_id)
    post(run, env_id)
    assert not future.done()  # groups that arrive leave no more room
    batch_id = run.get("/batch?lease=60").json()["batch_id"]
    leased = future.result(LONG / 2)
    assert (leased["queue_size"], leased["leased"]) == (0, 2)
    future = waiting(threads, run, f"/status-env?env_id={env_id}&wait={LONG}&seen={leased['seen']}")
    run.post(f"/batch/{batch_id}/extend?lease=60&step=4").raise_for_status()
    trained = future.result(LONG / 2)
    assert (trained["current_step"], trained["leased"]) == (4, 0)  # it is kept for a checkpoint only
    assert run.get(f"/status-env?env_id={env_id}").json().keys() == SIX


def test_who_has_seen_something_else_is_answered_at_once(run: httpx.Client) -> None:
    env_id = register(run)
    known = run.get(f"/status-env?env_id={env_id}&wait={LONG}&seen=").json()
    assert run.get(f"/status-env?env_id={env_id}&wait={LONG}&seen=another").json() == known
    assert run.get(f"/status-env?env_id={env_id}&wait=0.2&seen={known['seen']}").json() == known
    assert run.get("/batch?wait=0.2").json() == {"batch": None}
    run.post("/register", json=TRAINER | {"num_steps": 9})
    assert run.get(f"/status-env?env_id={env_id}&wait=0").json()["seen"] != known["seen"]


def test_an_environment_that_is_forgotten_hears_of_it(run: httpx.Client, threads: ThreadPoolExecutor) -> None:
    env_id = register(run)
    known = run.get(f"/status-env?env_id={env_id}&wait=0").json()
    future = waiting(threads, run, f"/status-env?env_id={env_id}&wait={LONG}&seen={known['seen']}")
    run.post("/reset_data")
    assert future.result(LONG / 2)["field"] == "env_id"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_on_which_requests_wait(threads: ThreadPoolExecutor, number: signal.Signals) -> None:
    with running_server("--api-key", "secret") as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/status").status_code == 401  # and the connection stays open
        client.headers["Authorization"] = "Bearer secret"
        client.post("/register", json=TRAINER)
        client.get("/batch")
        env_id = register(client)
        seen = client.get(f"/status-env?env_id={env_id}&wait=0").json()["seen"]
        news = waiting(threads, client, f"/status-env?env_id={env_id}&wait={LONG}&seen={seen}")
        batch = waiting(threads, client, f"/batch?wait={LONG}")
        os.kill(server.process.pid, number)
        assert server.process.wait(timeout=30) == 0
        assert news.result(60)["seen"] == seen and batch.result(60) == {"batch": None}
