"""Whatever is sent, no answer is a 5xx, memory stays bounded, and sound groups are still accepted."""

from __future__ import annotations

import copy
import http.client
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

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


@pytest.mark.complete
def test_the_openapi_document_is_true(tmp_path: Path):
    pytest.importorskip("schemathesis", reason="needs schemathesis (extra `dev`)")
    tool = Path(sys.executable).with_name("schemathesis")
    # requests that wait are held for a third of the time-out
    with running_server("--max-body-mb", "4", "--env-timeout", "0.3", log=tmp_path / "log") as server:
        done = subprocess.run(
            [
                *(str(tool), "run", f"{server.url}/openapi.json", "--max-examples", "40", "--workers", "1"),
                # A schema cannot say that rows are as long as their tokens, nor do we read 1.0 as a whole number:
                # some bodies that fit it are refused.
                *("--exclude-checks", "positive_data_acceptance", "--no-color", "--seed", "1"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Traceback" not in (tmp_path / "log").read_text()
