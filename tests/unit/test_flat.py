"""The flat layout is safetensors' own: what one writes the other reads. Damage is a ValueError, never another one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from vllm_server.protocol.flat import HEADER_LIMIT, ITEM_SIZES, decode_header, encode_header, header_size, lay_out
from vllm_server.worker.packed import DTYPES, layout_of
from vllm_server.worker.transports import FileReader

names = st.text(min_size=1, max_size=30).filter(lambda name: name != "__metadata__" and name.isprintable())
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.dictionaries(names, shapes, min_size=1, max_size=6).map(lambda found: list(found.items()))
metadata = st.dictionaries(st.text(max_size=10), st.text(max_size=30), max_size=3)
dtypes = st.sampled_from(sorted(ITEM_SIZES))

GOOD = encode_header(lay_out([("a", (2, 3)), ("b", (4,))], "F32"), {"format": "pt"})


@given(tensors, dtypes, metadata)
def test_a_header_decodes_to_what_was_encoded(
    found: list[tuple[str, tuple[int, ...]]], dtype: str, labels: dict[str, str]
) -> None:
    spans = lay_out(found, dtype)
    header = encode_header(spans, labels)
    decoded = decode_header(header + b"data")
    assert decoded.spans == spans
    assert decoded.metadata == labels
    assert decoded.size == len(header) == header_size(header[:8])
    assert decoded.size % 64 == 0  # the data is aligned for any dtype
    assert decoded.nbytes == sum(torch.Size(shape).numel() for _, shape in found) * ITEM_SIZES[dtype]


@given(tensors, dtypes)
def test_safetensors_reads_what_we_lay_out(found: list[tuple[str, tuple[int, ...]]], dtype: str) -> None:
    spans = lay_out(found, dtype)
    values_E = torch.arange(spans[-1].end // ITEM_SIZES[dtype]).to(DTYPES[dtype])
    loaded = load(encode_header(spans, {"format": "pt"}) + values_E.view(torch.uint8).numpy().tobytes())
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
    assert header.size + header.nbytes == file.stat().st_size
    assert header.metadata == {"format": "pt"}
    if header.nbytes == 0:
        return  # nothing to map
    read = FileReader(torch.device("cpu")).read(file, "").tensors()
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
    text = json.dumps(value).encode()
    try:
        header = decode_header(struct.pack("<Q", len(text)) + text)
        layout_of(struct.pack("<Q", len(text)) + text, "")
    except ValueError:
        return
    assert all(isinstance(labels, str) for labels in header.metadata.values())


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "cause"),
    [
        ([], TypeError),
        ({"a": 1}, TypeError),
        ({"a": {"dtype": "F32", "shape": [2]}}, KeyError),
        ({"a": entry(offsets=(0, 8, 9))}, TypeError),
    ],
)
def test_a_header_of_another_shape_is_refused(header: object, cause: type[Exception]) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ValueError) as error:
        decode_header(struct.pack("<Q", len(text)) + text)
    assert isinstance(error.value.__cause__, cause)
    assert str(error.value.__cause__) in str(error.value)


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
    text = json.dumps(header).encode()
    with pytest.raises(ValueError) as error:
        decode_header(struct.pack("<Q", len(text)) + text)
    assert str(error.value).startswith(values[0]) and all(value in str(error.value) for value in values)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (struct.pack("<Q", HEADER_LIMIT + 1), f"{HEADER_LIMIT + 1} bytes"),
        (GOOD[:-1], f"{len(GOOD) - 1} of {len(GOOD)} bytes"),
    ],
)
def test_a_header_of_another_size_is_refused(data: bytes, size: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{size}"):
        decode_header(data)


def test_what_is_no_json_is_no_header() -> None:
    with pytest.raises(ValueError) as error:
        decode_header(struct.pack("<Q", 200_000) + b"[" * 200_000)
    assert isinstance(error.value.__cause__, RecursionError)
    with pytest.raises((UnicodeDecodeError, json.JSONDecodeError)):
        decode_header(struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc")


@pytest.mark.parametrize("found", [{"F32", "BF16"}, {"I64"}, {"F8_E4M3"}])
def test_an_adapter_has_one_dtype_of_floats(found: set[str]) -> None:
    header: dict[str, object] = {}
    for index, dtype in enumerate(sorted(found)):
        size = {"BF16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1}[dtype]
        start = 0 if index == 0 else 2
        header[dtype] = entry(dtype, (1,), (start, start + size))
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=rf"\b{', '.join(sorted(found))}, "):
        layout_of(struct.pack("<Q", len(text)) + text, "")


def test_a_file_that_became_shorter_is_a_value_error(tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(save({"a": torch.ones(4)})[:-4])
    with pytest.raises(ValueError):
        FileReader(torch.device("cpu")).read(file, "")
