"""What comes in at the rollout API's door: what is refused and how, and that nobody waits for a long group."""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import Any

import httpx
import msgspec
import pytest

from environments.api import intake, wire
from environments.api.answers import json_group
from environments.api.app import build_app
from environments.api.records import ApiError
from environments.api.service import Service
from environments.api.settings import Settings


def group(**fields: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3, 4], [1, 2, 5, 6]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5, 6]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.5]] * 2,
        **fields,
    }


def taken(service: Service, body: bytes, content_type: str) -> wire.ScoredDataResponse:
    return intake.take_one(service, intake.read_one(body, content_type), None)


def bodies(fields: dict[str, Any]) -> list[tuple[bytes, str]]:
    """A group in each way in which it may be sent, short and long."""
    long = fields | {"images": "x" * (1 << 20)}
    sent = [(msgspec.json.encode(each), wire.JSON) for each in (fields, long)]
    sent.append((msgspec.msgpack.encode(fields), wire.MSGPACK))
    return [*sent, (wire.encode(wire.pack(wire.ScoredData(**fields)), wire.MSGPACK), wire.MSGPACK)]


POISON = [
    (group(tokens=[[1, 2, 3, 4], [1, 2, -1, 6]]), "tokens[1][2]", "-1"),
    (group(generation_params={"temperature": "hot"}), "generation_params.temperature", "'hot'"),
    (group(overrides=[{}, {"temperature": {"a": 1}}]), "overrides[1].temperature", "{'a': 1}"),
    (group(group_overrides={"temperature": -1.0}), "group_overrides.temperature", "-1.0"),
    (group(overrides=[{"temperature": 0}, {}]), "overrides[0].temperature", "0"),
    (group(overrides=[{"temperature": True}, {}]), "overrides[0].temperature", "True"),
    (group(overrides=[{"temperature": 1e39}, {}]), "overrides[0].temperature", "1e+39"),
    (group(overrides=[{"temperature": 1e-6}, {}]), "overrides[0].temperature", "1e-06"),
    (group(overrides=[{"sft": "false"}, {}]), "overrides[0].sft", "'false'"),
    (group(scores=[0.0, 1e308]), "scores[1]", "1e+308"),
    (group(advantages=[[1.0] * 4, [0.0, -1e300, 0.0, 0.0]]), "advantages[1][1]", "-1e+300"),
    (group(inference_logprobs=[[1.0] * 4, [1.0, 1.0, -1e39, 0.0]]), "inference_logprobs[1][2]", None),
    (
        group(distill_token_ids=[[[], [1], [1], [1]]] * 2, distill_logprobs=[[[], [-1.0], [-1e39], [-1.0]]] * 2),
        "distill_logprobs[0][2][0]",
        "-1e+39",
    ),
]


@pytest.mark.parametrize(("bad", "place", "got"), POISON)
def test_what_no_trainer_could_train_on_is_refused_and_harms_nobody(
    bad: dict[str, Any], place: str, got: str | None
) -> None:
    service = Service(Settings())
    key = place.partition("[")[0].partition(".")[0]
    for body, content_type in bodies(bad):
        with pytest.raises(ApiError) as refused:
            taken(service, body, content_type)
        assert (refused.value.status, refused.value.key, refused.value.field) == (422, key, place)
        assert got is None or refused.value.summary.startswith(f"{got}, ")
        assert not service.queue.line.groups
    mixed = msgspec.json.encode([group(), bad, group()])
    answer = intake.take_list(service, intake.read_list(mixed, wire.JSON), None)
    assert answer.groups_processed == 2 and answer.rejected is not None
    assert [(each.group, each.field) for each in answer.rejected] == [(1, key)]


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_params": {"temperature": 0.7, "stop": ["x"]}},
        {"generation_params": {"temperature": None}},
        {"overrides": [{"sft": 1, "set_advantage_to_zero": False}, {"sft": None}]},
        {"scores": [3.4e38, -3.4e38], "advantages": [[1e-300] * 4] * 2},  # what is nothing in float32 is no harm
        {"distill_token_ids": [[[], [7], [-1], []]] * 2, "distill_logprobs": [[[], [-1.0], [0.0], []]] * 2},
    ],
)
def test_what_can_be_trained_on_is_taken_and_comes_back(fields: dict[str, Any]) -> None:
    for body, content_type in bodies(group(**fields)):
        service = Service(Settings())
        assert taken(service, body, content_type).status == "received"
        assert service.latest is not None
        back = wire.decode_group(service.latest)
        for name, value in fields.items():
            assert getattr(back, name) == value
        shown = msgspec.json.decode(b"".join(json_group(service.latest)))
        assert {name: shown[name] for name in fields} == fields


def long_group(length: int, sequences: int) -> wire.PackedGroup:
    total = length * sequences
    numbers = array("f", [-0.5]) * total
    return wire.PackedGroup(
        lengths=[length] * sequences,
        tokens=(array("i", [7]) * total).tobytes(),
        masks=(array("i", [7]) * total).tobytes(),
        scores=[0.0] * sequences,
        advantages=numbers.tobytes(),
        inference_logprobs=numbers.tobytes(),
    )


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_a_long_body_is_read_in_a_thread_and_row_by_row(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, bool]] = []

    def decode(body: Any, **options: Any) -> Any:
        decoded.append((len(body), threading.current_thread() is threading.main_thread()))
        return msgspec.json.decode(body, **options)

    async def post(group: wire.ScoredData) -> list[tuple[int, bool]]:
        decoded.clear()
        body = msgspec.json.encode(group if path == "/scored_data" else [group])
        transport = httpx.ASGITransport(build_app(Service(Settings())))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            answer = await client.post(path, content=body, headers={"content-type": wire.JSON})
        assert answer.status_code == 200
        return decoded[:]

    monkeypatch.setattr(intake, "json_decode", decode)
    assert [on_the_loop for _, on_the_loop in asyncio.run(post(wire.unpack(long_group(4, 2))))] == [True]
    (whole, _), *rows = asyncio.run(post(wire.unpack(long_group(1 << 14, 8))))
    assert len(rows) == 4 * 8  # four fields of eight rows
    assert max(size for size, _ in rows) < whole / 20
    assert not any(on_the_loop for _, on_the_loop in rows)


def test_the_newest_group_is_shown_in_pieces() -> None:
    packed = long_group(1000, 16)
    pieces = list(json_group(wire.encode(packed, wire.MSGPACK)))
    assert max(map(len, pieces)) < 1000 * 6  # no more than a row at a time
    assert msgspec.json.decode(b"".join(pieces))["tokens"] == [[7] * 1000] * 16
