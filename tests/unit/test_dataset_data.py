"""Reading data sets: kinds of files, columns, and the error of each broken file."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig
from environments.dataset import data as reading
from environments.dataset.columns import Columns
from environments.dataset.data import Data, read_data
from tests.stand_ins import Asked, Reply, answering

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of `datasets` outside the folder with the data."""
    folder = tmp_path / "cache of datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


def opened(path: Path, **options: Any) -> Data:
    return read_data(DataConfig(path=str(path), **options))[0]


def rows_of(data: Data) -> list[dict[str, Any]]:
    return [data.rows[number] for number in range(len(data.rows))]


def table(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


FILES: dict[str, bytes] = {
    "plain.jsonl": LINES.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "crlf.jsonl": LINES.replace("\n", "\r\n").encode(),
    "blank.jsonl": b"\n" + LINES.replace("\n", "\n  \n").encode(),
    "noend.ndjson": LINES.strip().encode(),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "a*b[c]?::d.jsonl": LINES.encode(),
    "lines.json": LINES.encode(),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "packed.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "field.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "table.csv": b"prompt,answer\na,1\nb,2\n",
    "crlf.csv": b"\xef\xbb\xbfprompt,answer\r\na,1\r\nb,2\r\n",
    "table.tsv": b"prompt\tanswer\na\t1\nb\t2\n",
}


@pytest.mark.parametrize("name", FILES)
def test_data_files_of_every_kind_have_the_same_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    data = opened(tmp_path / name)
    assert [{key: str(value) for key, value in row.items()} for row in rows_of(data)] == ROWS
    assert data.rows.columns == ("prompt", "answer") and data.whole and data.split is None


def test_data_of_a_folder_has_splits_and_the_cache_is_elsewhere(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "folder"
    table(folder / "train.parquet")
    table(folder / "test.parquet", ROWS[:1])
    assert rows_of(opened(folder / "train.parquet")) == rows_of(opened(folder)) == ROWS
    train, held_out = read_data(DataConfig(path=str(folder), held_out_split="test"))
    assert rows_of(train) == ROWS and held_out is not None and rows_of(held_out) == ROWS[:1]
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"] and cache.is_dir()


def test_data_json_text_stays_text_and_a_missing_key_is_none(tmp_path: Path) -> None:
    """The library `datasets` makes a timestamp of a date."""
    rows = [{"question": "2024-01-01", "answer": "2024-01-01T10:00:00Z"}, {"question": "x", "n": 2**60}]
    (tmp_path / "data").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "data" / f"train-{number}.jsonl").write_text(f"\n{json.dumps(row)}\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    data = opened(tmp_path)
    assert rows_of(data) == [{**rows[0], "n": None}, {**rows[1], "answer": None}]
    assert data.rows.place(1) == "data/train-1.jsonl, line 2" and data.split == "train"
    assert rows_of(opened(tmp_path, split="test")) == [rows[0]]
    (tmp_path / "cells.csv").write_text("prompt,answer\nNA,null\n,x\n")
    cells = [{"prompt": "NA", "answer": "null"}, {"prompt": None, "answer": "x"}]
    assert rows_of(opened(tmp_path / "cells.csv")) == cells


@pytest.mark.parametrize(
    ("name", "content", "place", "got"),
    [
        ("broken.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', ", line 3", '{"prompt":'),
        ("number.jsonl", b'{"prompt": "a"}\n7\n', ", line 2", "7"),
        ("array.jsonl", b'[{"prompt": "a"}]\n', ", line 1", '[{"prompt": "a"}]'),
        ("latin.jsonl", '{"prompt": "caf\xe9"}\n'.encode("latin-1"), ", line 1", "utf-8"),
        ("escape.jsonl", b"\x1b[31mred\n", ", line 1", "\\x1b[31mred"),
        ("half.jsonl", b'{"prompt": "a"}\n{"prompt": "1+\\ud83d"}\n', ", line 2", "surrogates"),
        ("deep.json", b'{"prompt": "a"}\n{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ", line 2", "recursion"),
        ("broken.json", b'[{"prompt": "a"},\n{"prompt": }]', ", line 2", ""),
        ("numbers.json", b'[{"prompt": "a"}, 7]', ", row 2", "7"),
        ("wide.jsonl", LINES.encode("utf-16"), ", line 1", "utf-8"),
        ("empty.jsonl", b"", "", "no rows"),
        ("blank.jsonl", b"\n\n", "", "no rows"),
        ("none.json", b"[]", "", "no rows"),
        ("stray.jsonl.gz", b"no gzip", "", ""),
        ("cut.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "", ""),
        ("cells.csv", b"prompt,answer\na,1\nb,2,3\n", "", "2 fields in line 3, saw 3"),
        ("latin.csv", "prompt,answer\na,1\ncaf\xe9,2\n".encode("latin-1"), ", line 3", "UTF8"),
        ("header.csv", b"prompt,answer\n", "", "no data"),
        ("text.parquet", b"not parquet at all", "", "Parquet"),
        ("a[1].csv", b"prompt,answer\na,1\n", "", "a path with one of * ? [ ::"),
        ("notes.txt", b"hello\n", "", "the ending .txt"),
    ],
)
def test_data_broken_files_are_named_with_the_line(
    tmp_path: Path, name: str, content: bytes, place: str, got: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        opened(file)
    assert caught.value.field == f"--data {file}{place}"
    assert got in caught.value.got and "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "field", "fix"),
    [
        ("rows.jsonl", {}, "--data FILE", "rows.json?"),
        ("rows.json", {"split": "test"}, "--data.split test", "omit"),
        ("rows.json", {"subset": "main"}, "--data.subset main", "omit"),
        ("rows.json", {"held_out_split": "test"}, "--data.held_out_split test", "name a file"),
        ("rows.json", {"held_out_split": "train"}, "--data.held_out_split train", "held_out N"),
        ("rows.json", {"held_out_split": "copy.json"}, "--data.held_out_split copy.json", "held_out N"),
        ("tables", {"split": "tst"}, "--data.split tst", "test"),
        ("tables", {"held_out_split": "train"}, "--data.held_out_split train", "held_out N"),
        ("two", {}, "--data.split", "validation"),
        ("nothing", {}, "--data FILE", ""),
    ],
)
def test_data_that_is_missing_or_trained_on_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, str], field: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("rows.json", "copy.json"):
        (tmp_path / file).write_text(json.dumps(ROWS))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "two").mkdir()
    for file in ("dev.jsonl", "test.jsonl"):
        (tmp_path / "two" / file).write_text(LINES)
    table(tmp_path / "tables" / "train.parquet")
    table(tmp_path / "tables" / "test.parquet")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / name, **options)
    assert caught.value.field == field.replace("FILE", str(tmp_path / name)) and fix in caught.value.fix


@pytest.mark.parametrize("name", ["", " ", "~nobody-of-this-name/rows.jsonl"])
def test_data_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_data(DataConfig(path=name))
    assert caught.value.field == f"--data {name}"


def test_data_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, second, folder, saved = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "folder", "saved"))
    first.write_text(LINES)
    second.write_text(LINES)
    assert opened(first).fingerprint == opened(second).fingerprint
    second.write_text(LINES.replace("2", "3"))
    assert opened(first).fingerprint != opened(second).fingerprint
    folder.mkdir()
    (folder / "one.jsonl").write_text(LINES)
    datasets.Dataset.from_list(ROWS).save_to_disk(str(saved))
    assert rows_of(opened(saved)) == ROWS
    before = opened(folder).fingerprint, opened(saved).fingerprint
    for name in ("README.md", "make.py", ".hidden.jsonl"):
        (folder / name).write_text("x")
    for name in ("cache-1a2b.arrow", ".hidden"):
        (saved / name).write_bytes(b"x")
    assert (opened(folder).fingerprint, opened(saved).fingerprint) == before
    (folder / "two.jsonl").write_text(LINES)
    assert opened(folder).fingerprint != before[0]


def test_data_larger_files_are_checked_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHECKED_WHOLE", 10)
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 2)
    (tmp_path / "rows.jsonl").write_text(LINES + "\n{broken\n" + LINES)
    data = opened(tmp_path / "rows.jsonl")
    assert not data.whole and list(data.checked()) == [0, 1] and len(data.rows) == 5
    assert data.rows[3] == ROWS[0]
    with pytest.raises(UnusableRow) as caught:
        data.rows[2]
    assert caught.value.field.endswith("line 4")


# ---------------------------------------------------------------- columns


def columns(path: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[Columns, Data]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = DataConfig(path=str(path), **options)
    data = read_data(config)[0]
    return Columns.of(config, data), data


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "options", "prompt", "answer"),
    [
        ({"prompt": "p", "question": "q", "answer": "1"}, {}, "p", "1"),
        ({"problem": "x", "question": "q", "solution": "2", "label": "3"}, {}, "q", "2"),
        ({"problem": "x", "label": 3}, {}, "x", "3"),
        ({"text": "t", "gold": 4.0}, {"prompt_column": "text", "answer_column": "gold"}, "t", "4"),
        ({"question": "q", "n": 2, "answer": "a #### 1,234"}, {"prompt_template": "{n} {question}:"}, "2 q:", "1234"),
        ({"prompt": "p", "answer": "so\n#### $18"}, {}, "p", "18"),
        ({"prompt": "p", "answer": "so\n#### x, y"}, {}, "p", "x, y"),
        ({"prompt": "p", "answer": "#### Proof\nso 18"}, {}, "p", "#### Proof\nso 18"),
        ({"prompt": "p", "answer": "print('####') is a line"}, {}, "p", "print('####') is a line"),
        ({"prompt": "p", "answer": "so\n####"}, {}, "p", "so\n####"),
        ({"prompt": "p", "answer": " \n"}, {}, "p", None),
        ({"prompt": "p", "answer": None}, {}, "p", None),
        ({"prompt": "p"}, {}, "p", None),
        ({"messages": [{**USER, "name": None}, {"role": "assistant", "content": "no"}]}, {}, [USER], None),
        ({"prompt": "{braces}"}, {"prompt_template": "{prompt}"}, "{braces}", None),
    ],
)
def test_columns_prompt_and_answer_are_found(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], prompt: Any, answer: str | None
) -> None:
    found, data = columns(tmp_path / "rows.jsonl", [row], **options)
    assert (found.prompt_of(data.rows[0]), found.answer_of(data.rows[0])) == (prompt, answer)


@pytest.mark.parametrize(
    ("row", "options", "field", "part"),
    [
        ({"text": "t"}, {}, "--data.prompt_column", "name the column"),
        ({"prompt": "p"}, {"prompt_column": "promt"}, "--data.prompt_column promt", "prompt?"),
        ({"prompt": "p", "answer": 1}, {"answer_column": "anser"}, "--data.answer_column anser", "answer?"),
        ({"question": "p"}, {"prompt_template": "{qestion}"}, "--data.prompt_template qestion", "question?"),
        ({f"\x1b[31m{n}": 1 for n in range(50)}, {}, "--data.prompt_column", "\\x1b[31m19, and 30 more"),
    ],
)
def test_columns_that_are_missing_are_named(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], field: str, part: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        columns(tmp_path / "rows.jsonl", [row], **options)
    assert caught.value.field == field and part in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "got"),
    [
        ("text", 5, "5 (int)"),
        ("text", None, "None (NoneType)"),
        ("text", " ", "' ' (str)"),
        ("text", [USER], "[{'role': 'user', 'content': 'hi'}] (list)"),
        ([USER], "text", "'text' (str): Expected `array`"),
        ([USER], [], "no message"),
        ([USER], [USER, "x"], "(list): Expected `object`, got `str` - at `$[1]`"),
        ([USER], [{"role": "user"}], "a message of user without content"),
        ([USER], [{"role": "assistant", "content": "hi"}], "no message, or only an answer"),
    ],
)
def test_columns_a_prompt_of_another_kind_than_the_first_is_named(
    tmp_path: Path, first: Any, second: Any, got: str
) -> None:
    found, data = columns(tmp_path / "rows.jsonl", [{"prompt": first}, {"prompt": second}])
    found.prompt_of(data.rows[0])
    with pytest.raises(UnusableRow) as caught:
        found.prompt_of(data.rows[1])
    assert caught.value.field == "prompt" and got in caught.value.got


# ---------------------------------------------------------------- the hub

CODE = """
from environments.config import ConfigError
from environments.data_config import DataConfig
from environments.dataset.data import read_data

try:
    data, _ = read_data(DataConfig(path="someone/rows"))
    print("rows", len(data.rows), data.rows[0], data.fingerprint)
except ConfigError as error:
    print("refused", error)
"""
COMMIT = "a" * 40
TREE = [{"type": "file", "oid": "b" * 40, "size": len(LINES), "path": "train.jsonl"}]


def hub(asked: Asked) -> Reply:
    """What the hub answers of a data set with one file."""
    path, commit = asked.path.partition("?")[0], {"X-Repo-Commit": COMMIT}
    if path.endswith("/train.jsonl"):
        return Reply(content=LINES.encode(), headers={**commit, "ETag": '"1"'})
    if "/resolve/" in path:
        return Reply(404, headers={**commit, "X-Error-Code": "EntryNotFound"})
    if path.startswith("/api/datasets/someone/rows/tree/"):
        return Reply(json=TREE)
    if path.startswith("/api/datasets/someone/rows"):
        return Reply(json={"id": "someone/rows", "sha": COMMIT, "siblings": [{"rfilename": "train.jsonl"}], "tags": []})
    return Reply(404)


def from_hub(tmp_path: Path, handle: Callable[[Asked], Reply | None], **environment: str) -> str:
    """What a process says that reads `someone/rows` from a hub; its libraries read their settings when imported."""
    with answering(handle) as url:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.complete
def test_data_of_the_hub_is_read_and_then_cached(tmp_path: Path) -> None:
    first = from_hub(tmp_path, hub)
    assert first.startswith(f"rows 2 {ROWS[0]}")
    assert from_hub(tmp_path, lambda asked: None, HF_HUB_OFFLINE="1") == first  # the fingerprint, too


@pytest.mark.complete
@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (Reply(404, headers={"X-Error-Code": "RepoNotFound"}), "doesn't exist on the Hub"),
        (Reply(403, headers={"X-Error-Code": "GatedRepo"}), "gated"),
        (None, "without a network"),
    ],
    ids=["404", "gated", "no answer"],
)
def test_data_that_the_hub_refuses_is_one_line_with_its_fix(tmp_path: Path, reply: Reply | None, part: str) -> None:
    said = from_hub(tmp_path, lambda asked: reply)
    assert said.startswith("refused --data someone/rows: ") and said.count("\n") == 1
    assert part in said and "set HF_TOKEN" in said


@pytest.mark.complete
def test_data_without_a_network_only_the_cache_is_asked(tmp_path: Path) -> None:
    asked: list[Asked] = []
    said = from_hub(tmp_path, lambda each: asked.append(each), HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in said and not asked
