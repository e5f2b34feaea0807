"""The environment of a data set: prompts, groups, held-out rows, order; a server that answers from a script."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from transformers import Qwen2Tokenizer

from environments.api import wire
from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig, RewardConfig
from environments.dataset import data as reading
from environments.dataset.data import Columns, Data, read_data
from environments.dataset.env import DatasetConfig, DatasetEnv
from environments.demo_model.model import build_tokenizer
from environments.running.cli import process
from environments.running.groups import ALL_UNSCORED, EnvironmentFailed, unfit
from environments.running.state import keep
from tests.stand_ins import Asked, Reply, after_setup, answering, scripted
from tests.unit.factories import refusing

END = "<|endoftext|>"
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
CODE = """
import asyncio

def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def length(completions):
    return [len(c) for c in completions]

def some(completions):
    return [None if c == '1' else 2.0 for c in completions]

def never(completions):
    return [None] * len(completions)

def logs(completions, log_extra, log_metric, trainer_state, completion_ids, **kwargs):
    log_extra('seen', [c.upper() for c in completions])
    log_metric('step', trainer_state.global_step / max(1, trainer_state.max_steps))
    for name in ('reward_logs', 'rows'):
        log_metric(name, 7)
    log_metric('bad', float('inf'))
    return [len(ids) for ids in completion_ids]

def roles(completions, prompts, **kwargs):
    assert prompts[0] == [{'role': 'user', 'content': 'hi'}]
    return [float(c == [{'role': 'assistant', 'content': '1'}]) for c in completions]

async def judged(completions, prompt, **kwargs):
    if prompt[0] == "3+1=":
        await asyncio.Event().wait()
    if prompt[0] == "5+1=":
        raise SystemExit("no judge")
    return [1.0] * len(completions)

def broken(completions, prompt):
    raise KeyError(prompt[0])

def short(completions):
    return [1.0]
"""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<>{% endif %}"


@pytest.fixture
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(CODE)
    return tmp_path


def written(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def data(folder: Path) -> Path:
    """The file of `ROWS`."""
    return written(folder / "rows.jsonl")


def environment(
    tokenizer: Qwen2Tokenizer,
    data: Path,
    *rewards: str,
    answers: Sequence[str] = ("1" + END, "2" + END),
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> DatasetEnv:
    """An environment whose rewards are functions of `CODE`: `right` if none is named."""
    env = scripted(DatasetEnv, *answers, config=DatasetConfig, tokenizer=tokenizer, **changes)
    env.data = DataConfig(path=str(data), **(options or {}))
    env.rewards = tuple(RewardConfig.model_validate(f"{data.parent}/my.py:{each}") for each in rewards or ("right",))
    return env


def group_of(env: DatasetEnv, item: int = 0) -> wire.ScoredData:
    group = after_setup(env, lambda: env.collect_trajectories(item))
    assert group is not None
    return group


def asked(env: DatasetEnv, item: int = 0) -> Any:
    asyncio.run(env.setup())
    return env.prompt(item)


# ---------------------------------------------------------------- groups


def test_dataset_rows_become_groups(data: Path, tokenizer: Qwen2Tokenizer) -> None:
    env = environment(tokenizer, data, "right", "length=0.1", answers=["1" + END, "22" + END])
    group = group_of(env)
    assert group.scores == pytest.approx([1.1, 0.2])
    assert group.messages is not None
    assert group.messages[0] == [{"role": "user", "content": "0+1="}, {"role": "assistant", "content": "1"}]
    assert env.measures.take() == {"reward_right": 0.5, "reward_length": 1.5}


def test_dataset_a_sample_to_which_no_reward_applies_is_not_trained_on(data: Path, tokenizer: Qwen2Tokenizer) -> None:
    group = group_of(environment(tokenizer, data, "some"))
    assert group.overrides == [{"unscored": True}, {}] and wire.counted_scores(group) == [2.0]
    assert set(group.masks[0]) == {wire.IGNORED} and set(group.masks[1]) != {wire.IGNORED}
    env = environment(tokenizer, data, "never=5", "right")
    assert group_of(env).scores == [1.0, 0.0] and env.measures.take() == {"reward_right": 0.5}
    env = environment(tokenizer, data, "never")
    assert unfit(group_of(env), env.config, max_token_len=-1) == ALL_UNSCORED


def test_dataset_logs_of_functions(data: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """Metrics that are not finite, or have names of the environment's own, are left out, and the log says so once."""
    env = environment(tokenizer, data, "logs", answers=["a" + END, "bc" + END])
    env.curr_step, env.num_steps = 7, 10
    group = group_of(env)
    assert group.scores == [2.0, 3.0]  # with the end token
    assert group.messages is not None
    assert [talk[-1]["extra"] for talk in group.messages] == [{"seen": "A"}, {"seen": "BC"}]
    assert env.measures.take() == {"reward_logs": 2.5, "step": 0.7}
    env.curr_step = 0
    metrics = asyncio.run(env.evaluate())
    assert metrics["reward"] == 2.0 and metrics["rows"] == 20 and not metrics.keys() & {"bad", "reward_logs"}
    assert caplog.text.count("metric bad") == caplog.text.count("metric rows") == 1


@pytest.mark.parametrize(("reward", "text", "traces"), [("broken", "KeyError", 1), ("short", "short", 0)])
def test_dataset_a_reward_that_fails_loses_its_group_and_is_shown_once(
    data: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture, reward: str, text: str, traces: int
) -> None:
    env = environment(tokenizer, data, reward, data_path_to_save_groups=data.with_name("groups.jsonl"))
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(process(env, 32))
    assert text in caught.value.got and caplog.text.count("Traceback") == traces
    assert sum("my.py" in record.getMessage() for record in caplog.records) <= 1


def test_dataset_messages_are_prompts_and_completions_are_messages(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "an answer that is not a prompt"}]
    data = written(folder / "rows.jsonl", [{"messages": talk, "answer": "1"}])
    tokenizer.chat_template = CHAT
    env = environment(tokenizer, data, "roles")
    assert group_of(env).scores == [1.0, 0.0] and env.prompt(0) == talk[:1]
    tokenizer.chat_template = None
    with refusing(ConfigError, "--env.tokenizer_name demo"):
        asked(environment(tokenizer, data))


# ---------------------------------------------------------------- prompts

USER = [{"role": "user", "content": "0+1="}]


@pytest.mark.parametrize(
    ("chat", "template", "row", "prompt"),
    [
        *(("auto", CHAT, "0+1=", USER), ("on", CHAT, "0+1=", USER), ("off", CHAT, "0+1=", "0+1=")),
        ("auto", None, "0+1=", "0+1="),
        ("auto", CHAT, f"{END}1+1=", f"{END}1+1="),  # rendered already
    ],
)
def test_dataset_text_becomes_a_user_message_where_the_model_has_a_chat_template(
    folder: Path, tokenizer: Qwen2Tokenizer, chat: str, template: str | None, row: str, prompt: Any
) -> None:
    tokenizer.chat_template = template
    rows = [{"prompt": row, "answer": "1"}] * 3
    data = written(folder / "rows.jsonl", [*rows, {"prompt": f"What is {END}?", "answer": "2"}])  # it changes no other
    assert asked(environment(tokenizer, data, options={"chat": chat})) == prompt
    if template and prompt != USER:
        with refusing(ConfigError, "--env.system_prompt"):
            asked(environment(tokenizer, data, options={"chat": chat}, system_prompt="Be brief."))


def test_dataset_prompts_that_leave_no_room_are_skipped_and_counted(
    folder: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [{"prompt": "1" * length, "answer": "1"} for length in (70, 64, 63)]
    env = environment(tokenizer, written(folder / "rows.jsonl", [*ROWS, *long]), max_token_length=64)
    asked(env)
    assert sorted(next(env.items) for _ in range(21)) == [*range(20), 22]
    assert "2 prompts" in caplog.text and "70 tokens" in caplog.text
    with refusing(ConfigError, "--env.max_token_length", words=["70 tokens"]):
        asked(environment(tokenizer, written(folder / "none.jsonl", long[:1]), max_token_length=64))
    monkeypatch.setattr(reading, "CHECKED_WHOLE", 10)  # of larger data only the first rows are checked
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 2)
    data = written(folder / "large.jsonl", [ROWS[0], long[0], ROWS[2]])
    data.write_text(f"{data.read_text()}\n{{broken\n")
    env = environment(tokenizer, data, max_token_length=64)
    asked(env)
    assert sorted(next(env.items) for _ in range(3)) == [0, 2, 3]
    with refusing(UnusableRow, f"--data {data}, line 5"):
        asyncio.run(env.collect_trajectories(3))


# ---------------------------------------------------------------- held-out rows


def test_dataset_held_out_rows_are_never_trained_on(data: Path, tokenizer: Qwen2Tokenizer) -> None:
    held_out, orders = [], []
    for seed in (0, 1):
        env = environment(tokenizer, data, options={"held_out": 5}, seed=seed)
        asyncio.run(env.setup())
        held_out.append(set(env._held_out))
        orders.append([next(env.items) for _ in range(30)])
    assert held_out[0] == held_out[1] and len(held_out[0]) == 5 and orders[0] != orders[1]
    for order in orders:  # each row once before any comes again
        assert sorted(order[:15]) == sorted(order[15:]) == sorted(set(range(20)) - held_out[0])


def test_dataset_held_out_rows_do_not_depend_on_which_prompts_fit(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    data = written(folder / "rows.jsonl", [{"prompt": "1" * (10 + 3 * n), "answer": "1"} for n in range(20)])
    found = []
    for longest in (50, 80):
        env = environment(tokenizer, data, options={"held_out": 10}, max_token_length=longest)
        asyncio.run(env.setup())
        found.append(set(env._held_out))
    assert 0 < len(found[0]) < len(found[1]) == 10 and found[0] < found[1]


@pytest.mark.parametrize("count", [20, 25])
def test_dataset_not_all_rows_can_be_held_out(data: Path, tokenizer: Qwen2Tokenizer, count: int) -> None:
    with refusing(ConfigError, "--data.held_out"):
        asked(environment(tokenizer, data, options={"held_out": count}))


def test_dataset_counts_overlap(data: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    other = written(data.with_name("test.jsonl"), [*ROWS[:3], {"prompt": "5+5=", "answer": "10"}])
    asked(environment(tokenizer, data, options={"held_out": 4}))
    assert not [record for record in caplog.records if "held-out" in record.getMessage()]
    asked(environment(tokenizer, data, options={"held_out_split": str(other)}))
    (warning,) = [record.getMessage() for record in caplog.records if "held-out" in record.getMessage()]
    assert re.findall(r"\d+", warning)[:2] == ["3", "4"]


def test_dataset_evaluation_scores_rows(data: Path, tokenizer: Qwen2Tokenizer) -> None:
    options = {"held_out_split": str(written(data.with_name("test.jsonl"), ROWS[:4]))}
    env = environment(tokenizer, data, "right", "length=0.5", answers=["1" + END], options=options)
    metrics = after_setup(env, env.evaluate)
    # The answer 1 is right for 0+1= alone: rewards 1.5, 0.5, 0.5, 0.5, of mean 0.75 and standard deviation 0.5.
    assert metrics["reward"] == 0.75 and metrics["reward_right"] == 0.25 and metrics["reward_length"] == 1.0
    assert metrics["reward_high"] - metrics["reward"] == pytest.approx(1.96 * 0.5 / 2, abs=1e-3)
    assert metrics["rows"] == 4 and env.measures.take() == {}

    env = environment(tokenizer, data)
    alone = after_setup(env, env.evaluate)
    assert alone["rows"] == 20 and alone["reward"] == 0.05  # 1 is the answer to 0+1= alone
    env.curr_step = 3
    assert asyncio.run(env.evaluate()) == {}


def test_dataset_evaluation_counts_failed_rows(folder: Path, data: Path, tokenizer: Qwen2Tokenizer) -> None:
    held_out = written(folder / "test.jsonl", [*ROWS[:10], {"prompt": "1" * 70, "answer": "1"}])
    env = environment(
        tokenizer, data, "judged", answers=["1" + END],
        options={"held_out_split": str(held_out)}, score_timeout=2.0, max_token_length=64,
    )  # fmt: skip
    asyncio.run(env.setup())
    env._held_out = range(11)  # large data is not checked before the start
    metrics = asyncio.run(asyncio.wait_for(env.evaluate(), 60))
    assert metrics["reward"] == 1.0 and metrics["rows"] == 8 and metrics["rows_failed"] == 3
    env = environment(tokenizer, written(folder / "one.jsonl", ROWS[:1]), "broken")
    with pytest.raises(EnvironmentFailed, match="0\\+1="):
        after_setup(env, env.evaluate)


# ---------------------------------------------------------------- a resumed run, and a trial


def test_changed_data_end_a_run(data: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = data.parent / "run" / "checkpoints" / "step_5"
    record = data.parent / "run" / "data" / "env-dataset.json"

    def begun(**options: Any) -> dict[str, Any]:
        """Set an environment up as `serve` does, and return its record."""
        env = environment(tokenizer, data, options=options, data_record=record)
        asyncio.run(env.setup())
        keep(record, env.data_sets())
        return json.loads(record.read_text())

    digest = hashlib.sha256(hashlib.sha256(data.read_bytes()).digest()).hexdigest()
    first = {"data": [{"name": str(data), "rows": 20, "fingerprint": digest}]}
    assert begun() == first
    written(data, ROWS[:18])  # without a checkpoint a run begins again, with any data
    assert begun()["data"][0]["rows"] == 18
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    assert begun()["data"][0]["rows"] == 18  # they are unchanged
    written(data)
    with pytest.raises(ConfigError) as caught:
        begun()
    assert caught.value.field == f"--data {data}" and "--allow-changed-data" in caught.value.fix
    assert caught.value.got.startswith("20 rows") and caught.value.wanted.startswith("18 rows")
    assert begun(allow_changed=True) == first
    assert "fingerprint" in caplog.text and "--allow-changed-data" not in caplog.text


def test_dataset_a_trial_says_which_rows_columns_and_rewards_are_used(data: Path, tokenizer: Qwen2Tokenizer) -> None:
    env = environment(tokenizer, data, "right=0.5", options={"held_out": 4})
    steps: list[str] = []
    found = after_setup(env, lambda: env.rehearse(0, steps.append))
    assert found.startswith(f"16 rows of {data}") and "4 held" in found
    assert all(part in found for part in ("column prompt", "column answer", "--data.chat", "right (weight 0.5)"))
    assert steps == ["prompt()", "sampling()", "score_group()"]
    assert re.search(r" scores 0, '\d+' scores 0.5$", found), "the last is the row's right answer"
    odd = environment(tokenizer, data, "length")
    assert "WARNING" in after_setup(odd, lambda: odd.rehearse(0, steps.append))


# data ----------------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
DATA_ROWS: list[dict[str, Any]] = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
LINES = "".join(f"{json.dumps(row)}\n" for row in DATA_ROWS)


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


def table(path: Path, rows: list[dict[str, Any]] = DATA_ROWS) -> None:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


FILES: dict[str, bytes] = {
    "plain.jsonl": LINES.encode(),
    "crlf.jsonl": LINES.replace("\n", "\r\n").encode(),
    "blank.jsonl": b"\n" + LINES.replace("\n", "\n  \n").encode(),
    "noend.ndjson": LINES.strip().encode(),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "a*b[c]?::d.jsonl": LINES.encode(),
    "lines.json": LINES.encode(),
    "array.json": json.dumps(DATA_ROWS, indent=1).encode(),
    "field.json": json.dumps({"version": 1, "data": DATA_ROWS}).encode(),
    "table.csv": b"prompt,answer\na,1\nb,2\n",
    "crlf.csv": b"\xef\xbb\xbfprompt,answer\r\na,1\r\nb,2\r\n",
    "table.tsv": b"prompt\tanswer\na\t1\nb\t2\n",
}


@pytest.mark.parametrize("name", FILES)
def test_data_files_of_every_kind_have_the_same_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    data = opened(tmp_path / name)
    assert [{key: str(value) for key, value in row.items()} for row in rows_of(data)] == DATA_ROWS
    assert data.rows.columns == ("prompt", "answer") and data.whole and data.split is None


def test_data_of_a_folder_has_splits_and_the_cache_is_elsewhere(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "folder"
    table(folder / "train.parquet")
    table(folder / "test.parquet", DATA_ROWS[:1])
    assert rows_of(opened(folder / "train.parquet")) == rows_of(opened(folder)) == DATA_ROWS
    train, held_out = read_data(DataConfig(path=str(folder), held_out_split="test"))
    assert rows_of(train) == DATA_ROWS and held_out is not None and rows_of(held_out) == DATA_ROWS[:1]
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
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/cells.csv").write_text("prompt,answer,n\nNA,true,9007199254740993\n,02108\n")
    cells = [{"prompt": "NA", "answer": "true", "n": 2**53 + 1}, {"prompt": None, "answer": "02108", "n": None}]
    assert rows_of(opened(tmp_path / "tables")) == rows_of(opened(tmp_path / "tables/cells.csv")) == cells


def test_data_a_column_of_csv_files_has_one_type_also_by_a_card(tmp_path: Path) -> None:
    for name, lines in (("one", "02,1,True\n03,\n"), ("two", '"04" b,many\n \n'), ("../linked", "05,2\n")):
        (tmp_path / f"{name}.csv").write_text(f"answer,n,ok\n{lines}")
    assert [row["n"] for row in rows_of(opened(tmp_path))] == ["1", None, "many"]
    card = "---\nconfigs:\n- config_name: a\n  data_files: [{split: dev, path: [one.csv, ../linked.csv]}]\n---\n"
    (tmp_path / "README.md").write_text(card)
    wanted = [("02", 1, True), ("03", None, None), ("05", 2, None)]
    assert [tuple(row.values()) for row in rows_of(opened(tmp_path))] == wanted


@pytest.mark.parametrize(
    ("name", "content", "place", "got"),
    [
        ("broken.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', ", line 3", '{"prompt":'),
        ("number.jsonl", b'{"prompt": "a"}\n7\n', ", line 2", "7"),
        ("latin.jsonl", '{"prompt": "caf\xe9"}\n'.encode("latin-1"), ", line 1", "utf-8"),
        ("escape.jsonl", b"\x1b[31mred\n", ", line 1", "\\x1b[31mred"),
        ("half.jsonl", b'{"prompt": "a"}\n{"prompt": "1+\\ud83d"}\n', ", line 2", "surrogates"),
        ("deep.json", b'{"prompt": "a"}\n{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ", line 2", "recursion"),
        ("broken.json", b'[{"prompt": "a"},\n{"prompt": }]', ", line 2", ""),
        ("numbers.json", b'[{"prompt": "a"}, 7]', ", row 2", "7"),
        ("empty.jsonl", b"", "", "no rows"),
        ("stray.jsonl.gz", b"no gzip", "", ""),
        ("cut.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "", ""),
        ("shifted.tsv", b'prompt\tanswer\n"a\nb"\t46\t\n', ", line 2", "3 fields"),
        ("twice.csv", b"prompt,answer,prompt\na,1,b\n", ", header", "prompt, answer, prompt"),
        ("quote.csv", b'prompt,answer\na,1\nb,"2\n', ", line 3", ""),
        ("latin.csv", "prompt,answer\na,1\ncaf\xe9,2\n".encode("latin-1"), ", line 3", "0xe9"),
        ("text.parquet", b"not parquet at all", "", "Parquet"),
        ("a[1].parquet", b"", "", "a path with one of * ? [ ::"),
        ("notes.txt", b"hello\n", "", "the ending .txt"),
    ],
)
def test_data_broken_line_is_named(tmp_path: Path, name: str, content: bytes, place: str, got: str) -> None:
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
        ("mixed", {}, "--data FILE", "CSV and JSON"),
    ],
)
def test_data_that_is_missing_or_trained_on_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, str], field: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("rows.json", "copy.json"):
        (tmp_path / file).write_text(json.dumps(DATA_ROWS))
    for folder in ("nothing", "two", "mixed"):
        (tmp_path / folder).mkdir()
    for file in ("two/dev.jsonl", "two/test.jsonl", "mixed/part1.csv", "mixed/part2.jsonl"):
        (tmp_path / file).write_text(LINES)
    table(tmp_path / "tables" / "train.parquet")
    table(tmp_path / "tables" / "test.parquet")
    with refusing(ConfigError, field.replace("FILE", str(tmp_path / name)), words=[fix]):
        opened(tmp_path / name, **options)


@pytest.mark.parametrize("name", ["", " ", "~nobody-of-this-name/rows.jsonl"])
def test_data_a_name_that_is_none_is_refused(name: str) -> None:
    with refusing(ConfigError, f"--data {name}"):
        read_data(DataConfig(path=name))


def test_data_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, second, folder, saved = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "folder", "saved"))
    first.write_text(LINES)
    second.write_text(LINES)
    assert opened(first).fingerprint == opened(second).fingerprint
    second.write_text(LINES.replace("2", "3"))
    assert opened(first).fingerprint != opened(second).fingerprint
    folder.mkdir()
    (folder / "one.jsonl").write_text(LINES)
    datasets.Dataset.from_list(DATA_ROWS).save_to_disk(str(saved))
    assert rows_of(opened(saved)) == DATA_ROWS
    before = opened(folder).fingerprint, opened(saved).fingerprint
    for name in ("README.md", "make.py", ".hidden.jsonl"):
        (folder / name).write_text("x")
    for name in ("cache-1a2b.arrow", ".hidden"):
        (saved / name).write_bytes(b"x")
    assert (opened(folder).fingerprint, opened(saved).fingerprint) == before
    (folder / "two.jsonl").write_text(LINES)
    assert opened(folder).fingerprint != before[0]


# ---------------------------------------------------------------- columns


def columns(path: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[Columns, Data]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = DataConfig(path=str(path), **options)
    data = read_data(config)[0]
    return Columns.of(config, data), data


DATA_USER = {"role": "user", "content": "hi"}


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
        ({"messages": [{**DATA_USER, "name": None}, {"role": "assistant", "content": "no"}]}, {}, [DATA_USER], None),
        ({"prompt": "{braces}"}, {"prompt_template": "{prompt}"}, "{braces}", None),
    ],
)
def test_columns_prompt_and_answer_are_found(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], prompt: Any, answer: str | None
) -> None:
    found, data = columns(tmp_path / "rows.jsonl", [row], **options)
    assert (found.prompt_of(data.rows[0]), found.answer_of(data.rows[0])) == (prompt, answer)


def test_columns_an_answer_that_no_reward_compares_may_be_anything(data: Path, tokenizer: Qwen2Tokenizer) -> None:
    lists = [{**row, "answer": [row["answer"]]} for row in ROWS]
    other = written(data.with_name("test.jsonl"), [{"prompt": "1+1="}])
    env = environment(tokenizer, written(data, lists), "length", options={"held_out_split": str(other)})
    assert after_setup(env, env.evaluate)["reward"] == 1.0 and env.right_answer(0) is None
    written(data)
    env.rewards = (RewardConfig(function="exact_match"),)
    with refusing(ConfigError, f"--data.held_out_split {other}", words=["answer"]):
        asked(env)
    with refusing(ConfigError, "answer"):
        asked(environment(tokenizer, written(data, lists), "length", options={"answer_column": "answer"}))


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
def test_columns_missing(tmp_path: Path, row: dict[str, Any], options: dict[str, Any], field: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        columns(tmp_path / "rows.jsonl", [row], **options)
    assert caught.value.field == field and part in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "got"),
    [
        ("text", 5, "5 (int)"),
        ("text", None, "None (NoneType)"),
        ("text", " ", "' ' (str)"),
        ("text", [DATA_USER], "[{'role': 'user', 'content': 'hi'}] (list)"),
        ([DATA_USER], "text", "'text' (str): Expected `array`"),
        ([DATA_USER], [], "no message"),
        ([DATA_USER], [DATA_USER, "x"], "(list): Expected `object`, got `str` - at `$[1]`"),
        ([DATA_USER], [{"role": "user"}], "a message of user without content"),
        ([DATA_USER], [{"role": "assistant", "content": "hi"}], "no message, or only an answer"),
    ],
)
def test_columns_prompt_of_another_kind(tmp_path: Path, first: Any, second: Any, got: str) -> None:
    found, data = columns(tmp_path / "rows.jsonl", [{"prompt": first}, {"prompt": second}])
    found.prompt_of(data.rows[0])
    with refusing(UnusableRow, "prompt", words=[got]):
        found.prompt_of(data.rows[1])


# ---------------------------------------------------------------- the hub

READING = """
import sys
from environments.config import ConfigError
from environments.data_config import DataConfig
from environments.dataset.data import read_data

for name in sys.argv[1:]:
    try:
        data, _ = read_data(DataConfig(path=name))
        print("rows", len(data.rows), data.rows[0], data.fingerprint)
    except ConfigError as error:
        print("refused", error)
"""
COMMIT = "a" * 40
TREE = [{"type": "file", "oid": "b" * 40, "size": len(LINES), "path": "train.jsonl"}]


def hub(asked: Asked) -> Reply | None:
    """A hub that has one data set of one file, refuses two others, and does not answer for a fourth."""
    path, commit = asked.path.partition("?")[0], {"X-Repo-Commit": COMMIT}
    for name, reply in REFUSED.items():
        if name in path:
            return reply
    if path.endswith("/train.jsonl"):
        return Reply(content=LINES.encode(), headers={**commit, "ETag": '"1"'})
    if "/resolve/" in path:
        return Reply(404, headers={**commit, "X-Error-Code": "EntryNotFound"})
    if path.startswith("/api/datasets/someone/rows/tree/"):
        return Reply(json=TREE)
    return Reply(json={"id": "someone/rows", "sha": COMMIT, "siblings": [{"rfilename": "train.jsonl"}], "tags": []})


REFUSED = {
    "someone/none": Reply(404, headers={"X-Error-Code": "RepoNotFound"}),
    "someone/closed": Reply(403, headers={"X-Error-Code": "GatedRepo"}),
    "someone/silent": None,
}


def from_hub(tmp_path: Path, *names: str, **environment: str) -> tuple[list[str], list[Asked]]:
    """The lines of a process that reads these data sets from a hub, and what the hub was asked.

    The libraries read their settings when they are imported.
    """
    asked: list[Asked] = []
    with answering(lambda each: asked.append(each) or hub(each)) as url:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, "-c", READING, *names]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), asked


@pytest.mark.complete
def test_data_of_the_hub_is_read_and_then_cached_and_refusals_are_one_line_with_its_fix(tmp_path: Path) -> None:
    (first, none, closed, silent), _ = from_hub(tmp_path, "someone/rows", *REFUSED)
    assert first.startswith(f"rows 2 {DATA_ROWS[0]}")
    parts = {
        "someone/none": "doesn't exist on the Hub",
        "someone/closed": "gated",
        "someone/silent": "without a network",
    }
    for said, (name, part) in zip((none, closed, silent), parts.items(), strict=True):
        assert said.startswith(f"refused --data {name}: ") and part in said and "set HF_TOKEN" in said
    (again, missing), asked = from_hub(tmp_path, "someone/rows", "someone/none", HF_HUB_OFFLINE="1")
    assert again == first and "HF_HUB_OFFLINE" in missing and not asked  # the fingerprint, too
