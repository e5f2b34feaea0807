"""The wire contract: what goes in comes out, in both formats, and imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.api import wire
from environments.api.answers import json_batch, packed_batch

FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False, allow_infinity=False)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def groups(draw: st.DrawFn) -> wire.ScoredData:
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


@given(groups(), st.sampled_from([wire.JSON, wire.MSGPACK]))
def test_a_group_survives_either_format_bit_by_bit(group, content_type):
    back = wire.decode_group(wire.encode_group(group, content_type), content_type)
    assert back == group
    assert repr(back) == repr(group)  # tells -0.0 from 0.0 and 1 from 1.0


@given(st.lists(groups(), max_size=3), st.sampled_from([wire.JSON, wire.MSGPACK]))
def test_a_batch_survives_either_format(members, content_type):
    fields: dict[str, object] = {"batch_id": "b", "expires_in_s": 1.5, "current_step": 3}
    answer = packed_batch if content_type == wire.MSGPACK else json_batch
    body = b"".join(answer([wire.encode_group(group) for group in members], fields))
    assert wire.decode_batch(body, content_type) == wire.Batch(batch=members, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("content_type", [wire.JSON, wire.MSGPACK])
def test_no_batch_is_no_batch(content_type):
    assert wire.decode_batch(wire.encode({"batch": None}, content_type), content_type).batch is None


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


def test_the_json_of_the_original_protocol_is_read():
    body = b"""{"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1], "messages": [], "overrides": [],
        "group_overrides": {}, "images": null, "ref_logprobs": [], "something_new": 1}"""
    group = wire.decode_group(body, wire.JSON)
    assert (group.tokens, group.masks, group.scores) == ([[1, 2]], [[-100, 2]], [1.0])


@pytest.mark.parametrize(
    ("accept", "msgpack"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("Application/X-MsgPack; q=1.0", True),
        ("application/json, application/msgpack;q=0.9", False),
        ("application/json;q=0.5, application/msgpack", True),
        ("application/msgpack;q=0", False),
        ("text/html,,;;q=x", False),
    ],
)
def test_the_format_follows_the_accept_header(accept, msgpack):
    assert wire.prefers_msgpack(accept) is msgpack


def test_the_contract_imports_neither_torch_nor_a_web_framework():
    code = (
        "import sys, environments.api.wire;"
        "heavy = {'torch', 'vllm', 'numpy', 'starlette', 'uvicorn', 'transformers', 'httpx'} & set(sys.modules);"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
