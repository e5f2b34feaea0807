"""The server's contract: names, ranks, bodies, the flat layout of tensors, and NCCL where there is none."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.unit.factories import refusing
from vllm_server import protocol
from vllm_server.protocol import GenerateResponse, LoraLoadRequest, group
from vllm_server.protocol.flat import ITEM_SIZES, decode_header, encode_header, lay_out
from vllm_server.protocol.group import Communicator, NcclError, unique_id
from vllm_server.worker.channels import AdapterFiles
from vllm_server.worker.packed import DTYPES, layout_of


@given(st.text(min_size=1), st.integers(min_value=0, max_value=10**9))
def test_version_name_round_trips(lora_name: str, version: int) -> None:
    name = protocol.version_name(lora_name, version)
    assert protocol.parse_version(name, lora_name) == version


@pytest.mark.parametrize("name", ["policy", "policy-v", "policy-v03", "policy-v-1", "policy-v²", "other-v3", ""])
def test_other_names_have_no_version(name: str) -> None:
    assert protocol.parse_version(name, "policy") is None


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (24, 32), (129, 256), (512, 512)])
def test_servable_rank_is_the_next_legal_one(rank: int, served: int) -> None:
    assert protocol.servable_rank(rank) == served


@pytest.mark.parametrize("rank", [0, -1, 513])
def test_unservable_rank_names_the_legal_ones(rank: int) -> None:
    with pytest.raises(ValueError) as error:
        protocol.servable_rank(rank)
    numbers = [int(number) for number in re.findall(r"-?\d+", str(error.value))]
    assert numbers == [rank, 1, 512, *protocol.LEGAL_LORA_RANKS]


def test_logprobs_on_the_wire_are_keyed_by_text_and_keep_their_order() -> None:
    answer = GenerateResponse(
        text=["a"],
        prompt="q",
        finish_reasons=["stop"],
        policy_version=3,
        model="policy-v3",
        prompt_token_ids=[9],
        token_ids=[[7]],
        logprobs=[[[{7: -0.5, 3: -0.25}]]],
    )
    wire = msgspec.json.encode(answer)
    assert b'"logprobs":[[[{"7":-0.5,"3":-0.25}]]]' in wire
    assert b"prompt_logprobs" not in wire
    assert msgspec.json.decode(wire, type=GenerateResponse) == answer


def test_a_load_request_with_a_typo_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="`adapter_nmae`"):
        msgspec.json.decode(b'{"adapter_path": "/a", "adapter_nmae": "x"}', type=LoraLoadRequest)


names = st.text(min_size=1, max_size=30).filter(lambda name: name != "__metadata__" and name.isprintable())
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.dictionaries(names, shapes, min_size=1, max_size=6).map(lambda found: list(found.items()))
metadata = st.dictionaries(st.text(max_size=10), st.text(max_size=30), max_size=3)
dtypes = st.sampled_from(sorted(ITEM_SIZES))

GOOD = encode_header(lay_out([("a", (2, 3)), ("b", (4,))], "F32"), {"format": "pt"})


def as_header(value: object) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


@given(tensors, dtypes)
def test_safetensors_reads_what_we_lay_out(found: list[tuple[str, tuple[int, ...]]], dtype: str) -> None:
    spans = lay_out(found, dtype)
    values_E = torch.arange(spans[-1].end // ITEM_SIZES[dtype]).to(DTYPES[dtype])
    header = encode_header(spans, {"format": "pt"})
    assert len(header) % 64 == 0, "the data is aligned for any dtype"
    loaded = load(header + values_E.view(torch.uint8).numpy().tobytes())
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == dict(found)
    for span in spans:
        size = ITEM_SIZES[dtype]
        assert loaded[span.name].dtype == DTYPES[dtype]
        assert torch.equal(loaded[span.name].flatten(), values_E[span.start // size : span.end // size])


@given(tensors, dtypes)
def test_we_read_what_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, tuple[int, ...]]], dtype: str
) -> None:
    made = {name: torch.randn(shape).to(DTYPES[dtype]) for name, shape in found}
    file = tmp_path_factory.mktemp("flat") / "adapter.safetensors"
    file.write_bytes(save(made, metadata={"format": "pt"}))
    header = decode_header(file.read_bytes())
    assert header.size + header.nbytes == file.stat().st_size and header.size % 8 == 0
    assert header.metadata == {"format": "pt"}
    if header.nbytes == 0:
        return  # nothing to map
    read = AdapterFiles(torch.device("cpu")).read(file, "").tensors()
    assert read.keys() == made.keys()
    assert all(torch.equal(read[name], made[name]) for name in made)


@given(st.binary(max_size=200))
def test_no_bytes_are_anything_but_a_header_or_a_value_error(data: bytes) -> None:
    for damaged in (data, GOOD[: len(data)], struct.pack("<Q", len(data)) + data):
        try:
            decode_header(damaged)
        except ValueError as error:
            assert str(error)


@given(st.integers(8, len(GOOD) - 1), st.integers(0, 255))
def test_a_byte_that_changed_is_a_header_or_a_value_error(place: int, value: int) -> None:
    damaged = bytearray(GOOD)
    damaged[place] = value
    try:
        spans = decode_header(bytes(damaged)).spans
    except ValueError:
        return
    assert sum(span.end - span.start for span in spans) == max((span.end for span in spans), default=0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("F32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values})


@given(json_values | st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), json_values | entries, max_size=3))
def test_no_json_is_anything_but_a_header_or_a_value_error(value: object) -> None:
    try:
        header = decode_header(as_header(value))
        layout_of(as_header(value), "")
    except ValueError:
        return
    assert all(isinstance(labels, str) for labels in header.metadata.values())


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ({"a": entry(offsets=(0, 4))}, ["a ", " 4 ", "(2,)", "F32"]),
        ({"a": entry(offsets=(8, 0))}, ["a ", "8:0"]),
        ({"a": entry(offsets=(-8, 0))}, ["a ", "-8:0"]),
        ({"a": entry(shape=(True,), offsets=(0, 4))}, ["a ", "(True,)"]),
        ({"a": entry(shape=(-1, -2))}, ["a ", "(-1, -2)"]),
        ({"a": entry(shape=(0.5,))}, ["a ", "(0.5,)"]),
        ({"a": entry(dtype=["F32"])}, ["a ", "['F32']"]),
        ({"a": entry(), "b": entry()}, ["b ", " 0 ", " 8"]),  # the same bytes
        ({"a": entry(offsets=(8, 16))}, ["a ", " 8 ", " 0"]),  # a gap
        ({"a": entry(), "__metadata__": [1]}, ["__metadata__"]),
        ({"a": entry(), "__metadata__": {"adapter_config": {}}}, ["__metadata__"]),
    ],
)
def test_what_is_wrong_with_a_header_is_said(header: object, values: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        decode_header(as_header(header))
    assert str(error.value).startswith(values[0]) and all(value in str(error.value) for value in values)


def test_a_header_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        decode_header(struct.pack("<Q", 200_000) + b"[" * 200_000)
    assert isinstance(error.value.__cause__, RecursionError)


@pytest.mark.parametrize("found", [{"F32", "BF16"}, {"I64"}, {"F8_E4M3"}])
def test_an_adapter_has_one_dtype_of_floats(found: set[str]) -> None:
    header: dict[str, object] = {}
    for index, dtype in enumerate(sorted(found)):
        size = {"BF16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1}[dtype]
        start = 0 if index == 0 else 2
        header[dtype] = entry(dtype, (1,), (start, start + size))
    with pytest.raises(ValueError, match=rf"\b{', '.join(sorted(found))}, "):
        layout_of(as_header(header), "")


class StandInLibrary:
    """A library whose communicator never gets ready, and which notes what it was asked.

    `answers`: what calls by their names return at once; 7 is "in progress".
    """

    def __init__(self, state: int = 7) -> None:
        self.state = state
        self.answers = {"init": 7, "broadcast": 0}
        self.aborted: list[int | None] = []

    def ncclCommInitRankConfig(self, handle: Any, size: int, name: Any, rank: int, config: Any) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 17
        return self.answers["init"]

    def ncclCommGetAsyncError(self, handle: Any, status: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = self.state
        return 0

    def ncclBroadcast(self, *_: Any) -> int:
        return self.answers["broadcast"]

    def ncclCommAbort(self, handle: ctypes.c_void_p) -> int:
        self.aborted.append(handle.value)
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return b"status %d" % status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInLibrary]:
    made = StandInLibrary()
    monkeypatch.setattr(group, "library", lambda: made)
    yield made


def test_without_the_library_the_error_says_what_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    group.library.cache_clear()
    for use in (unique_id, lambda: Communicator(bytes(128), 0, 2)):
        with refusing(NcclError, "NCCL") as error:
            use()
        assert error.value.got.startswith("libnccl.so.2: ")
        assert "CUDA" in error.value.wanted and "torch" in error.value.wanted


def test_a_partner_who_never_comes_is_an_error_and_ends_the_communicator(
    library: StandInLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "INIT_TIMEOUT_S", 0.01)
    with refusing(NcclError, "NCCL rank 1 of 2") as error:
        Communicator(bytes(128), 1, 2)
    assert error.value.wanted.endswith(f" {group.INIT_TIMEOUT_S:.0f} s")
    assert library.aborted == [17]


def test_whoever_knows_that_nobody_comes_ends_the_wait(library: StandInLibrary) -> None:
    started = time.monotonic()
    with pytest.raises(InterruptedError):
        Communicator(bytes(128), 0, 2, Mock(side_effect=InterruptedError))
    assert time.monotonic() - started < group.INIT_TIMEOUT_S
    assert library.aborted == [17]


@pytest.mark.parametrize(("call", "doing"), [("init", "rank 0 of 2"), ("broadcast", "broadcast")])
def test_a_call_that_fails_at_once_ends_the_communicator(library: StandInLibrary, call: str, doing: str) -> None:
    """So that the other ranks need not wait for their time limits."""
    library.state = 0
    library.answers[call] = 3
    with refusing(NcclError, f"NCCL {doing}", got="status 3"):
        Communicator(bytes(128), 0, 2).broadcast(0, 4, root=0, stream=0)
    assert library.aborted == [17]


def test_a_communicator_that_failed_is_not_used_again(library: StandInLibrary) -> None:
    library.state = 0
    communicator = Communicator(bytes(128), 0, 2)
    communicator.broadcast(0, 4, root=0, stream=0)
    library.state = 2
    with refusing(NcclError, "NCCL broadcast", got="status 2") as error:
        communicator.wait(lambda: False)
    assert "NCCL_DEBUG=INFO" in error.value.fix
    assert library.aborted == [17]
    for again in (lambda: communicator.broadcast(0, 4, root=0, stream=0), lambda: communicator.wait(lambda: False)):
        with refusing(NcclError, "NCCL communicator", got=""):  # NCCL was not asked
            again()
    communicator.abort()
    assert library.aborted == [17]  # once
