"""Whatever is sent, no answer is a 5xx, memory stays bounded, and sound groups are still accepted."""

from __future__ import annotations

import copy
import http.client
import json
import random
from collections import Counter
from pathlib import Path

import psutil

from environments.api import wire
from tests.rollout_api import running_server

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
ODD: list[object] = [
    *(None, True, -1, 2**31, 2**63, 10**400, 1.5, 1e308, float("nan"), float("-inf"), "", "x", "\ud800", [], {}, [[]]),
    *([[[]]], {"a": {}}, [None], [[None]], [{}], ["x"], "9" * 5000),
]
TRAINER = {
    **{"wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 64, "num_steps": 9},
    **{"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0},
}
QUERIES = {
    "/batch": ("lease", "request", "uuid", "wait"),
    "/status-env": ("env_id", "wait", "seen"),
    "/evaluations": ("after",),
}
VALUES = ("", "x", "-1", "0", "0.01", "1.5", "1e308", "nan", "inf", "9" * 400, "%00", "%ff", "true", "null", "[]")
PATHS = ("/scored_data", "/scored_data_list", "/register", "/register-env", "/disconnect-env", "/batch/x/ack")


def mangled(draw: random.Random) -> bytes:
    """A good group with a field replaced, dropped or bent; or bytes that are no JSON any more; or just bytes."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return draw.choice(
            [b"[" * 50_000, b'{"a":' * 50_000, b"\x93" * 300, b"\xdf\xff\xff\xff\xff", b'"' + b"\\" * 999]
        )
    group = json.loads(json.dumps(GOOD))
    for _ in range(draw.randrange(1, 3)):
        field = draw.choice([*GOOD, "advantages", "env_id", "images", "distill_token_ids", "policy_versions", "z"])
        if draw.random() < 0.2:
            group.pop(field, None)
        elif draw.random() < 0.5 and isinstance(group.get(field), list) and group[field]:
            group[field][draw.randrange(len(group[field]))] = copy.deepcopy(draw.choice(ODD))
        else:
            group[field] = copy.deepcopy(draw.choice(ODD))
    body = json.dumps([group] if kind == 2 else group).encode()
    if kind == 3:
        at = draw.randrange(len(body))
        return body[:at] + draw.randbytes(draw.randrange(1, 4)) + body[at + draw.randrange(3) :]
    if kind == 4:
        return body[: draw.randrange(len(body))]
    return body


def odd_query(draw: random.Random) -> str:
    path = draw.choice([*QUERIES])
    return (
        path + "?" + "&".join(f"{draw.choice(QUERIES[path])}={draw.choice(VALUES)}" for _ in range(draw.randrange(4)))
    )


def test_ten_thousand_malformed_bodies(tmp_path: Path):
    draw = random.Random(20240711)
    statuses: Counter[int] = Counter()
    with running_server("--max-body-mb", "4", log=tmp_path / "log") as server:
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        sizes = []
        for number in range(BODIES):
            path = draw.choice(PATHS) if draw.random() < 0.3 else "/scored_data"
            headers = {"Content-Type": draw.choice([wire.JSON, wire.JSON, wire.MSGPACK, "text/plain"])}
            if draw.random() < 0.1:
                headers["Content-Encoding"] = draw.choice(["gzip", "br", ""])
            connection.request("POST", path, mangled(draw), headers)
            answer = connection.getresponse()
            content = answer.read()
            statuses[answer.status] += 1
            assert answer.status < 500, (path, headers, (tmp_path / "log").read_text()[-3000:])
            if answer.status >= 400:
                refusal = json.loads(content)
                assert refusal.get("detail") or refusal.get("rejected"), content
            if number % 1000 == 999:
                sizes.append(process.memory_info().rss)
        connection.request("GET", "/reset_data")
        connection.getresponse().read()
        connection.request("POST", "/scored_data", json.dumps(GOOD).encode(), {"Content-Type": wire.JSON})
        assert json.loads(connection.getresponse().read()) == {"status": "received"}
    assert statuses[422] > BODIES / 10
    assert statuses[400] > BODIES / 10
    assert sizes[-1] - sizes[0] < 50e6, f"memory grew: {sizes}"


def test_odd_queries(tmp_path: Path):
    draw = random.Random(20240712)
    statuses: Counter[int] = Counter()
    # Requests that wait are held for a third of the time-out.
    with running_server("--env-timeout", "0.03", log=tmp_path / "log") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

        def ask(method: str, path: str, body: object = None) -> int:
            connection.request(
                method, path, json.dumps(body) if body is not None else None, {"Content-Type": wire.JSON}
            )
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] += 1
            assert answer.status < 500, (path, (tmp_path / "log").read_text()[-3000:])
            return answer.status

        assert ask("POST", "/register", TRAINER) == 200
        for number in range(1_000):
            if number % 10 == 0:
                assert ask("POST", "/scored_data", GOOD) == 200
            ask("GET", odd_query(draw))
            ask("POST", f"/batch/x/extend?lease={draw.choice(VALUES)}&step={draw.choice(VALUES)}")
        assert ask("GET", "/status") == 200
    assert statuses[422] > 200
    assert statuses[200] > 200
