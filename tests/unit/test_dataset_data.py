"""Reading data sets: kinds of files, columns, and the error of each broken file."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig
from environments.dataset import data as reading
from environments.dataset.columns import Columns, boxed_or_all
from environments.dataset.data import Data, read_data
from tests.stand_ins import Asked, Reply, answering

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of `datasets` outside the folder with the data."""
    import datasets.config as settings

    folder = tmp_path / "cache of datasets"
    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", folder)
    return folder


def opened(path: Path, **options: Any) -> Data:
    return read_data(DataConfig(path=str(path), **options))[0]


def rows_of(data: Data) -> list[dict[str, Any]]:
    return [data.rows[number] for number in range(len(data.rows))]


def table(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
FILES: dict[str, bytes] = {
    "plain.jsonl": LINES.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "crlf.jsonl": LINES.replace("\n", "\r\n").encode(),
    "blank.jsonl": b"\n" + LINES.replace("\n", "\n  \n").encode(),
    "noend.jsonl": LINES.strip().encode(),
    "lines.json": LINES.encode(),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "field.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "table.csv": b"prompt,answer\na,1\nb,2\n",
    "crlf.csv": b"\xef\xbb\xbfprompt,answer\r\na,1\r\nb,2\r\n",
    "table.tsv": b"prompt\tanswer\na\t1\nb\t2\n",
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_have_the_same_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    data = opened(tmp_path / name)
    assert [{key: str(value) for key, value in row.items()} for row in rows_of(data)] == ROWS
    assert data.rows.columns == ("prompt", "answer")


def test_parquet_and_folders_have_rows_and_splits_and_the_cache_is_elsewhere(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "folder"
    table(folder / "train.parquet")
    table(folder / "test.parquet", ROWS[:1])
    assert rows_of(opened(folder / "train.parquet")) == ROWS
    assert rows_of(opened(folder)) == ROWS
    assert rows_of(opened(folder, split="test")) == ROWS[:1]
    train, held_out = read_data(DataConfig(path=str(folder), held_out_split="test"))
    assert rows_of(train) == ROWS and held_out is not None and rows_of(held_out) == ROWS[:1]
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]
    assert cache.is_dir()


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert rows_of(opened(tmp_path / "saved")) == ROWS


def test_json_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "dates.jsonl").write_text('{"prompt": "when?", "answer": "2024-01-01"}\n{"prompt": "x", "answer": 5}\n')
    assert [row["answer"] for row in rows_of(opened(tmp_path / "dates.jsonl"))] == ["2024-01-01", 5]


def test_cells_named_na_stay_text_and_empty_cells_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "cells.csv").write_text("prompt,answer\nNA,null\n,x\n")
    assert rows_of(opened(tmp_path / "cells.csv")) == [
        {"prompt": "NA", "answer": "null"},
        {"prompt": None, "answer": "x"},
    ]


def test_a_key_that_a_row_lacks_is_none(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "level": 3}\n')
    assert [row["level"] for row in rows_of(opened(tmp_path / "rows.jsonl"))] == [None, 3]


@pytest.mark.parametrize(
    ("name", "content", "place", "got"),
    [
        ("broken.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', ", line 3", '{"prompt":'),
        ("number.jsonl", b'{"prompt": "a"}\n7\n', ", line 2", "7"),
        ("array.jsonl", b'[{"prompt": "a"}]\n', ", line 1", '[{"prompt": "a"}]'),
        ("latin.jsonl", '{"prompt": "caf\xe9"}\n'.encode("latin-1"), ", line 1", "not UTF-8"),
        ("escape.jsonl", b"\x1b[31mred\n", ", line 1", "\\x1b[31mred"),
        ("broken.json", b'[{"prompt": "a"},\n{"prompt": }]', ", line 2", ""),
        ("numbers.json", b'[{"prompt": "a"}, 7]', ", row 2", "7"),
        ("wide.jsonl", LINES.encode("utf-16"), "", "UTF-16"),
        ("empty.jsonl", b"", "", "an empty file"),
        ("blank.jsonl", b"\n\n", "", "no rows"),
        ("none.json", b"[]", "", "no rows"),
        ("cells.csv", b"prompt,answer\na,1\nb,2,3\n", ", line 3", "3 cells"),
        ("latin.csv", "prompt,answer\na,1\ncaf\xe9,2\n".encode("latin-1"), ", line 3", "not UTF-8"),
        ("header.csv", b"prompt,answer\n", "", "no rows"),
        ("text.parquet", b"not parquet at all", "", "Parquet"),
        ("notes.txt", b"hello\n", "", "the ending .txt"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, name: str, content: bytes, place: str, got: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        opened(file)
    assert caught.value.field == f"--data {file}{place}"
    assert got in caught.value.got and "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "options", "field", "fix"),
    [
        (lambda folder: folder / "rows.jsonl", {}, "--data FILE", "rows.json?"),
        (lambda folder: folder / "rows.json", {"split": "test"}, "--data.split test", "omit"),
        (lambda folder: folder / "rows.json", {"subset": "main"}, "--data.subset main", "omit"),
        (lambda folder: folder / "rows.json", {"held_out_split": "test"}, "--data.held_out_split test", "name a file"),
        (lambda folder: folder / "tables", {"split": "tst"}, "--data.split tst", "test"),
        (lambda folder: folder / "nothing", {}, "--data FILE", ""),
    ],
)
def test_missing_files_and_splits_are_named(
    tmp_path: Path, make: Callable[[Path], Path], options: dict[str, str], field: str, fix: str
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "nothing").mkdir()
    table(tmp_path / "tables" / "train.parquet")
    table(tmp_path / "tables" / "test.parquet")
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        opened(path, **options)
    assert caught.value.field == field.replace("FILE", str(path)) and fix in caught.value.fix


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(LINES)
    second.write_text(LINES)
    assert opened(first).fingerprint == opened(second).fingerprint
    second.write_text(LINES.replace("2", "3"))
    assert opened(first).fingerprint != opened(second).fingerprint


# ---------------------------------------------------------------- larger data


@pytest.mark.parametrize("content", [LINES[:20], LINES.replace("a", "b"), LINES * 2])
def test_a_file_that_changes_while_it_is_read_is_refused_and_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES * 1000)
    data = opened(path)
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        _ = data.rows[1999]
    assert caught.value.field == f"--data {path}" and "changed" in caught.value.summary


def test_a_file_that_is_replaced_while_it_is_read_keeps_its_rows(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    path.write_text(LINES)
    data = opened(path)
    other.write_text("{}\n")
    other.replace(path)
    assert rows_of(data) == ROWS


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("value", ['"1+\\ud83d"', "[" * 100_000 + "]" * 100_000], ids=["half a character", "deep"])
def test_rows_that_cannot_be_written_or_are_too_deep_are_named_with_the_line(
    tmp_path: Path, value: str, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": {value}}}\n')
    with pytest.raises(ConfigError) as caught:
        opened(path)
    assert caught.value.field == f"--data {path}, line 2"


@pytest.mark.parametrize("same", ["train", "itself", "copy"])
def test_rows_that_are_trained_on_are_not_held_out(tmp_path: Path, same: str) -> None:
    path, copy = tmp_path / "rows.jsonl", tmp_path / "copy.jsonl"
    path.write_text(LINES)
    copy.write_text(LINES)
    split = {"train": "train", "itself": str(path), "copy": str(copy)}[same]
    with pytest.raises(ConfigError) as caught:
        opened(path, held_out_split=split)
    assert caught.value.field == f"--data.held_out_split {split}"


def test_a_split_that_is_trained_on_by_default_is_not_held_out(tmp_path: Path) -> None:
    table(tmp_path / "folder" / "train.parquet")
    table(tmp_path / "folder" / "test.parquet", ROWS[:1])
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "folder", held_out_split="train")
    assert caught.value.field == "--data.held_out_split train"
    assert len(opened(tmp_path / "folder", held_out_split="test").rows) == 2


def test_the_fingerprint_of_a_folder_leaves_out_hidden_files_and_caches(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    before = opened(tmp_path / "saved").fingerprint
    (tmp_path / "saved" / "cache-1a2b.arrow").write_bytes(b"x")
    (tmp_path / "saved" / ".git").mkdir()
    (tmp_path / "saved" / ".git" / "HEAD").write_bytes(b"x")
    assert opened(tmp_path / "saved").fingerprint == before


@pytest.mark.parametrize("compressed", [False, True])
def test_text_of_json_stays_text_in_any_file(tmp_path: Path, compressed: bool) -> None:
    """The library `datasets` makes a timestamp of a date."""
    rows = [{"question": "2024-01-01", "answer": "2024-01-01T10:00:00Z"}, {"question": "x", "n": 2**60}]
    lines, end = [f"{json.dumps(row)}\n".encode() for row in rows], ".gz" if compressed else ""
    pack = gzip.compress if compressed else bytes
    (tmp_path / "folder" / "data").mkdir(parents=True)
    (tmp_path / f"rows.jsonl{end}").write_bytes(pack(reading.BOM + b"".join(lines)))
    (tmp_path / f"rows.json{end}").write_bytes(pack(json.dumps(rows).encode()))
    for number, line in enumerate(lines):
        (tmp_path / "folder" / "data" / f"train-{number}.jsonl{end}").write_bytes(pack(line))
    (tmp_path / "folder" / f"test.jsonl{end}").write_bytes(pack(lines[0]))
    whole = [{"question": "2024-01-01", "answer": "2024-01-01T10:00:00Z", "n": None}]
    whole += [{"question": "x", "answer": None, "n": 2**60}]
    for name in (f"rows.jsonl{end}", f"rows.json{end}", "folder"):
        assert rows_of(opened(tmp_path / name)) == whole
    data = opened(tmp_path / "folder")
    assert data.rows.place(1) == f"data/train-1.jsonl{end}, line 1" and data.split == "train"
    assert rows_of(opened(tmp_path / "folder", split="test")) == [rows[0]]


def test_a_folder_may_have_more_files_than_may_be_open(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"train-{number:02}.jsonl").write_text(f'{{"question": "{number}"}}\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 40, hard))
    try:
        assert len(opened(tmp_path).rows) == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_fingerprint_of_a_folder_is_that_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(LINES)
    before = opened(tmp_path).fingerprint
    for name in ("README.md", "notes.txt", "make.py"):
        (tmp_path / name).write_text("x")
    assert opened(tmp_path).fingerprint == before
    (tmp_path / "two.jsonl").write_text(LINES)
    assert opened(tmp_path).fingerprint != before


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(LINES.encode(), mtime=0)[:-9], gzip.compress(b"{", mtime=0)],
    ids=["empty", "no gzip", "cut", "damaged json"],  # the same in each of pytest's processes
)
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "rows.jsonl.gz")
    assert "rows.jsonl.gz" in caught.value.field


def test_larger_files_are_checked_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"prompt": "p", "answer": "#### Proof\nso x"}, {}, "p", "#### Proof\nso x"),
        ({"prompt": "p", "answer": "print('####') is a line"}, {}, "p", "print('####') is a line"),
        ({"prompt": "p", "answer": "so\n####"}, {}, "p", "so\n####"),
        ({"prompt": "p", "answer": ""}, {}, "p", None),
        ({"prompt": "p", "answer": " \n"}, {}, "p", None),
        ({"prompt": "p", "answer": None}, {}, "p", None),
        ({"prompt": "p"}, {}, "p", None),
        ({"messages": [{"role": "user", "content": "m"}]}, {}, [{"role": "user", "content": "m"}], None),
        ({"prompt": "{braces}"}, {"prompt_template": "{prompt}"}, "{braces}", None),
    ],
)
def test_prompt_and_answer_are_found(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], prompt: Any, answer: str | None
) -> None:
    found, data = columns(tmp_path / "rows.jsonl", [row], **options)
    assert (found.prompt_of(data.rows[0]), found.answer_of(data.rows[0])) == (prompt, answer)


@pytest.mark.parametrize(
    ("row", "options", "field", "fix"),
    [
        ({"text": "t"}, {}, "--data.prompt_column", "name the column"),
        ({"prompt": "p"}, {"prompt_column": "promt"}, "--data.prompt_column promt", "prompt?"),
        ({"prompt": "p", "answer": 1}, {"answer_column": "anser"}, "--data.answer_column anser", "answer?"),
        ({"question": "p"}, {"prompt_template": "{qestion}"}, "--data.prompt_template qestion", "question?"),
    ],
)
def test_columns_that_are_missing_are_named(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        columns(tmp_path / "rows.jsonl", [row], **options)
    assert caught.value.field == field and fix in caught.value.fix


def test_names_of_foreign_columns_are_shown_escaped_and_not_all(tmp_path: Path) -> None:
    row = {f"\x1b[31m{number}": 1 for number in range(50)}
    with pytest.raises(ConfigError) as caught:
        columns(tmp_path / "rows.jsonl", [row])
    assert "\x1b" not in str(caught.value) and "\\x1b[31m19" in caught.value.got and "30 more" in caught.value.got


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("first", "second", "place", "got"),
    [
        ("text", 5, "prompt", "a number, 5"),
        ("text", None, "prompt", "nothing"),
        ("text", " ", "prompt", "empty text"),
        ("text", [USER], "prompt", "a list"),
        ([USER], "text", "prompt", "text, 'text'"),
        ([USER], [], "prompt", "a list, []"),
        ([USER], [USER, "x"], "prompt, message 2", "text, 'x'"),
        ([USER], [{"role": "user"}], "prompt, message 1", "no content"),
        ([USER], [{"role": "assistant", "content": "hi"}], "prompt", "only an answer"),
    ],
)
def test_a_prompt_of_another_kind_than_the_first_is_named(
    tmp_path: Path, first: Any, second: Any, place: str, got: str
) -> None:
    found, data = columns(tmp_path / "rows.jsonl", [{"prompt": first}, {"prompt": second}])
    found.prompt_of(data.rows[0])
    with pytest.raises(UnusableRow) as caught:
        found.prompt_of(data.rows[1])
    assert caught.value.field == place and caught.value.got.startswith(got)


@pytest.mark.parametrize(
    ("answer", "gold"), [(r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), ("$4$", "4"), ("12", "12"), ("", "")]
)
def test_the_gold_of_a_solution_is_what_it_boxes(answer: str, gold: str) -> None:
    assert boxed_or_all(answer) == gold


# ---------------------------------------------------------------- the hub

CODE = """
import sys
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
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.complete
def test_a_data_set_of_the_hub_is_read_and_then_cached(tmp_path: Path) -> None:
    first = from_hub(tmp_path, hub)
    assert first.startswith(f"rows 2 {ROWS[0]}")
    assert from_hub(tmp_path, lambda asked: None, HF_HUB_OFFLINE="1") == first  # the fingerprint, too


@pytest.mark.complete
@pytest.mark.parametrize(
    ("reply", "fix"),
    [
        (Reply(401, headers={"X-Error-Code": "RepoNotFound"}), "HF_TOKEN"),
        (Reply(404, headers={"X-Error-Code": "RepoNotFound"}), "correct the name"),
        (Reply(403, headers={"X-Error-Code": "GatedRepo"}), "accept its terms"),
        (None, "check the network"),
        (Reply(200, json={}), "name a file or folder"),
    ],
    ids=["401", "404", "gated", "no answer", "not a hub"],
)
def test_what_the_hub_refuses_is_one_line_with_its_fix(tmp_path: Path, reply: Reply | None, fix: str) -> None:
    said = from_hub(tmp_path, lambda asked: reply)
    assert said.startswith("refused --data someone/rows: ") and fix in said and said.count("\n") == 1


@pytest.mark.complete
def test_without_a_network_only_the_cache_is_asked(tmp_path: Path) -> None:
    asked: list[Asked] = []
    said = from_hub(tmp_path, lambda each: asked.append(each), HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in said and not asked


@pytest.mark.parametrize("name", ["a*b", "a[b]c", "a?", "x::y"])
@pytest.mark.parametrize("kind", ["rows.csv", "rows.jsonl.gz", "folder of JSON Lines", "folder of tables"])
def test_names_that_datasets_reads_as_patterns_or_urls_are_names(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if "folder" in kind:
        end = "-[1].jsonl" if "JSON" in kind else ".csv"
        for split, rows in (("train", ROWS), ("test", ROWS[:1])):
            (folder / f"{split}{end}").write_bytes(written(end, rows))
        assert rows_of(opened(folder, split="test")) == rows_of(opened(folder))[:1]
        data = opened(folder)
    else:
        (folder / kind).write_bytes(written(kind, ROWS))
        data = opened(folder / kind)
    assert [{key: str(value) for key, value in row.items()} for row in rows_of(data)] == ROWS


def written(name: str, rows: Sequence[dict[str, Any]]) -> bytes:
    if name.endswith(".csv"):
        return ("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows)).encode()
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return gzip.compress(lines) if name.endswith(".gz") else lines
