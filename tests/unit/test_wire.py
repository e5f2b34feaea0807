"""The wire contract in both formats; what the rollout API takes in and refuses; nobody waits for a long group."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.api import app, groups, http, wire
from environments.api.app import build_app
from environments.api.errors import ApiError
from environments.api.http import json_batch, json_group, packed_batch, prefers_msgpack
from environments.api.service import Service
from environments.api.settings import Settings
from tests.unit.factories import refusing

FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False, allow_infinity=False)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def scored_groups(draw: st.DrawFn) -> wire.ScoredData:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))

    def rows(elements: st.SearchStrategy) -> list:
        return [draw(st.lists(elements, min_size=length, max_size=length)) for length in lengths]

    def maybe(value: Any) -> Any:
        return value if draw(st.booleans()) else None

    return wire.ScoredData(
        tokens=rows(INT32),
        masks=rows(INT32),
        scores=draw(st.lists(FLOATS, min_size=len(lengths), max_size=len(lengths))),
        advantages=maybe(rows(FLOATS)),
        inference_logprobs=maybe(rows(st.floats(-50, 0, width=32))),
        ref_logprobs=maybe(rows(FLOATS)),
        messages=maybe([[{"role": draw(TEXT), "content": draw(TEXT), "x": 1}] for _ in lengths]),
        overrides=maybe([{"set_advantage_to_zero": True} for _ in lengths]),
        group_overrides=maybe({"group_size": len(lengths)}),
        generation_params=maybe({"temperature": draw(FLOATS)}),
        env_id=maybe(draw(st.integers(0, 2**53))),
        policy_versions=maybe([draw(st.integers(0, 99)) for _ in lengths]),
    )


@given(scored_groups(), st.sampled_from([wire.JSON, wire.MSGPACK]))
def test_a_group_survives_either_format_bit_by_bit(group, content_type):
    back = wire.decode_group(wire.encode_group(group, content_type), content_type)
    assert back == group
    assert repr(back) == repr(group)  # tells -0.0 from 0.0 and 1 from 1.0


@given(st.lists(scored_groups(), max_size=3), st.sampled_from([wire.JSON, wire.MSGPACK]))
def test_a_batch_survives_either_format(members, content_type):
    fields: dict[str, object] = {"batch_id": "b", "expires_in_s": 1.5, "current_step": 3}
    answer = packed_batch if content_type == wire.MSGPACK else json_batch
    body = b"".join(answer([wire.encode_group(group) for group in members], fields))
    assert wire.decode_batch(body, content_type) == wire.Batch(batch=members, **fields)  # type: ignore[arg-type]


def test_packed_numbers_are_little_endian_and_as_narrow_as_they_may_be():
    packed = wire.pack(
        wire.ScoredData(
            tokens=[[1], [258]],
            masks=[[-100], [258]],
            scores=[0.5, 1.0],
            inference_logprobs=[[1.0], [-0.5]],
            advantages=[[0.1], [0.2]],
        )
    )
    assert packed.lengths == [1, 1]
    assert packed.tokens == bytes([1, 0, 0, 0, 2, 1, 0, 0])  # 258 = 2 + 1 * 256
    assert packed.masks == bytes([0x9C, 0xFF, 0xFF, 0xFF, 2, 1, 0, 0])  # -100 = 2**32 - 100 = 0xFFFFFF9C
    assert packed.inference_logprobs == bytes.fromhex("0000803f000000bf")  # 1.0 and -0.5 are float32 numbers
    assert packed.advantages is not None
    assert len(packed.advantages) == 16  # 0.1 is none: float64


@pytest.mark.parametrize(
    ("accept", "msgpack"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("Application/X-MsgPack; q=1.0", True),
        ("application/json, application/msgpack;q=0.9", False),
        ("application/msgpack, application/json", True),
        ("text/html,,;;q=x", False),
    ],
)
def test_the_format_follows_the_accept_header(accept, msgpack):
    assert prefers_msgpack(accept) is msgpack


def group(**fields: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3, 4], [1, 2, 5, 6]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5, 6]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.5]] * 2,
        **fields,
    }


def read(body: bytes, content_type: str, of: Any = groups.read) -> Any:
    try:
        return of(body, content_type)
    except groups.REFUSED as error:
        raise groups.refusal(error, content_type) from None


def posted(service: Service, body: bytes, path: str = "/scored_data_list") -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.post(path, content=body, headers={"content-type": wire.JSON})

    return asyncio.run(post())


@pytest.mark.parametrize("value", [msgspec.msgpack.Ext(5, b"x"), {None: 1}, {(1, 2): 1}])
def test_what_messagepack_alone_can_hold_is_refused(value: Any) -> None:
    """A client that takes JSON would get half of the batch that has it."""
    message = {"role": "user", "content": value}
    for field, sent in {"images": value, "overrides": [{"x": value}, {}], "messages": [[message], []]}.items():
        for fields in (group(), msgspec.to_builtins(wire.pack(wire.ScoredData(**group())), builtin_types=[bytes])):
            with pytest.raises(ApiError) as refused:
                read(msgspec.msgpack.encode(fields | {field: sent}), wire.MSGPACK)
            assert (refused.value.status, refused.value.key) == (422, field)


@pytest.mark.parametrize("content_type", [wire.JSON, wire.MSGPACK])
@pytest.mark.parametrize("field", ["images", "messages"])
def test_a_group_nested_as_deeply_as_may_be_is_read_below_a_hundred_calls(field: str, content_type: str) -> None:
    def below(calls: int, payload: bytes) -> wire.ScoredData:
        return below(calls - 1, payload) if calls else wire.decode_group(payload)

    taken, refused = 0, 0
    for depth in range(500, 880, 10):
        value: Any = 1
        for _ in range(depth):
            value = [value]
        sent = [[{"role": "user", "content": value}], []] if field == "messages" else value
        try:
            payload = read(wire.encode(group(**{field: sent}), content_type), content_type).payload
        except ApiError as error:
            refused += error.key == field
        else:
            taken += 1
            assert below(100, payload).tokens == group()["tokens"]
    assert taken and refused


def test_json_of_a_long_group_comes_in_pieces_of_a_row() -> None:
    payload = wire.encode(long_group(1000, 64), wire.MSGPACK)
    pieces = [*json_group(payload)]
    assert max(map(len, pieces)) < 10_000 < len(b"".join(pieces))
    assert msgspec.json.decode(b"".join(pieces), type=wire.ScoredData) == wire.decode_group(payload)


def test_a_long_body_of_messagepack_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = msgspec.msgpack.encode(group())
    assert read(lists, wire.MSGPACK).group.lengths == [4, 4]
    monkeypatch.setattr(groups, "MOST_LISTS", len(lists) - 1)
    with pytest.raises(ApiError, match="MiB") as refused:
        read(lists, wire.MSGPACK)
    assert (refused.value.status, refused.value.key) == (422, "tokens")


def test_nan_of_a_long_body_is_named_by_its_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(group(scores=[0.0, float("nan")])).encode()
    monkeypatch.setattr(groups, "LONGEST_EXPLAINED", len(body) - 1)
    for of, sent in ((groups.read, body), (groups.split, b"[" + body + b"]")):
        with pytest.raises(ApiError, match=f"byte {sent.index(b'NaN')}") as refused:
            read(sent, wire.JSON, of)
        assert refused.value.status == 400


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
def test_a_long_body_is_read_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loop: list[bool] = []
    original = groups.read

    def read(*arguments: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return original(*arguments)

    monkeypatch.setattr(groups, "read", read)
    for length in (4, 1 << 14):
        group = wire.unpack(long_group(length, 8))
        body = msgspec.json.encode(group if path == "/scored_data" else [group])
        assert posted(Service(Settings()), body, path).status_code == 200
    assert on_the_loop == [True, False]


WRONG = b"{}"


def test_posted_list_explains_a_hundred_refusals_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """To explain one takes ten times as long as to find it."""
    explained: list[Exception] = []
    original = groups.refusal
    monkeypatch.setattr(groups, "refusal", lambda error, kind: explained.append(error) or original(error, kind))
    good = msgspec.json.encode(group())
    service = Service(Settings())
    body = b"[" + b",".join([*[WRONG] * 1000, good, *[WRONG] * 20, good]) + b"]"
    answer = wire.decode(posted(service, body).content, wire.ScoredDataListResponse)
    assert (answer.status, answer.groups_processed, len(service.queue.line)) == ("partial", 2, 2)
    assert answer.rejected is not None and [each.group for each in answer.rejected] == list(range(100))
    assert {each.field for each in answer.rejected} == {"tokens"} and answer.more_rejected == 920
    assert len(explained) == groups.NAMED_REFUSALS


TRICKY: list[Any] = [
    *({}, [], [3], [3, 4], [[], []], {}, {"a": 1}, "", "a,b", "[{,", '"', "\\", '\\"', "\\\\", "é]", 1, None),
    *({"a": [1, 2, {"b": "},{"}]}, [["\\", ","], "]"]),
]


def test_split_refuses_a_list_of_one_group_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgspec.json.encode(TRICKY)
    monkeypatch.setattr(groups, "MOST_GROUPS", len(TRICKY))
    assert len(groups.split(body, wire.JSON)[0]) == len(TRICKY)
    monkeypatch.setattr(groups, "MOST_GROUPS", len(TRICKY) - 1)
    with refusing(ApiError, "body", 413):
        groups.split(body, wire.JSON)
    with pytest.raises(ApiError, match="list"):
        groups.split(b"\xdd\xff\xff\xff\xff", wire.MSGPACK)


@dataclass
class Poster:
    """A client of the app that posts a list piece by piece.

    Attributes:
        pieces: of the body; an empty one never arrives.
        leaves: the client is gone once it has sent the body.
        goes_on: whether it sends more than the first piece yet.
        sent: how many pieces it has sent.
        status: of the answer.
        turns: how often another task ran between the last piece and the answer.
    """

    pieces: list[bytes]
    leaves: bool = False
    goes_on: Callable[[], bool] = lambda: True
    sent: int = 0
    status: int = 0
    turns: int = 0

    async def receive(self) -> Any:
        while self.sent == 1 and not self.goes_on():
            await asyncio.sleep(0)
        if self.sent < len(self.pieces):
            self.sent += 1
            if not self.pieces[self.sent - 1]:
                await asyncio.Event().wait()
            more = self.sent < len(self.pieces)
            return {"type": "http.request", "body": self.pieces[self.sent - 1], "more_body": more}
        if not self.leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)

    async def post(self, service: Service, served: Any = None) -> None:
        scope = {
            **{"type": "http", "method": "POST", "path": "/scored_data_list", "query_string": b"", "scheme": "http"},
            **{"http_version": "1.1", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1), "root_path": ""},
            "headers": [(b"host", b"127.0.0.1:8000"), (b"content-type", wire.JSON.encode())],
        }
        posting = asyncio.ensure_future((served or build_app(service))(scope, self.receive, self.send))
        while not posting.done():
            self.turns += self.sent == len(self.pieces)
            await asyncio.sleep(0)
        await posting


def test_scored_data_list_gives_others_their_turns_and_ends_when_the_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "TURN_S", 0.0)
    service = Service(Settings())
    poster = Poster([b"[" + b",".join([WRONG] * 40) + b"]"])
    asyncio.run(poster.post(service))
    assert poster.status == 422 and poster.turns >= 40 and service.history.refused == 40
    body = b"[" + b",".join([msgspec.json.encode(group())] * 40) + b"]"
    asyncio.run(Poster([body], leaves=True).post(service))
    assert len(service.queue.line) == 1


async def test_slow_large_bodies_give_their_places_to_others_that_never_fail_by_the_wait(monkeypatch: Any) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.5)
    begun = b"[" + b" " * http.LARGE_BODY
    slow = [Poster([begun, b""]) for _ in range(http.LARGE_BODIES_AT_ONCE)]
    # Its time begins before that of the others, so it would end before they give up their places.
    good = Poster(
        [b"[", begun[1:], msgspec.json.encode(group()) + b"]"], goes_on=lambda: all(each.sent == 2 for each in slow)
    )
    service = Service(Settings())
    served = build_app(service)
    posting = asyncio.create_task(good.post(service, served))
    while good.sent < 1:
        await asyncio.sleep(0)
    await asyncio.gather(posting, *(each.post(service, served) for each in slow))
    assert good.status == 200 and [each.status for each in slow] == [408] * len(slow)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", [b'\\"', b'\\\n"', b'"', b"{", b"[", b"-NaN,"])
@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_hostile_body_with_nan_is_refused_in_time_that_grows_with_its_length(part: bytes, end: bytes) -> None:
    body = b'{"tokens":NaN,"x":"' + part * (1_000_000 // len(part)) + end
    for of in (groups.read, groups.split):
        with pytest.raises(ApiError):
            read(body, wire.JSON, of)
