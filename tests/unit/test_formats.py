"""Formats of a newer version are refused by name, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from environments.api import wire
from environments.api.store import Store
from environments.config import BaseEnvConfig
from environments.peers.http import Peer, PeerError
from environments.peers.inference import detect
from environments.peers.rollout_api import RolloutApi
from grpo_common.errors import UserError
from grpo_common.formats import FormatError, check_format, check_sqlite
from grpo_trainer.cli import app
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import RolloutConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.launch.fleet import FOLDER as REQUESTS
from grpo_trainer.launch.fleet import Answer, Request, answer_all
from grpo_trainer.logs.sinks import JsonlSink
from grpo_trainer.metrics.rows import read_rows
from grpo_trainer.report.read import read_series
from grpo_trainer.report.runs import list_runs
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.saving.manifest import Progress, newest_whole, seal
from grpo_trainer.server_client import ServerClient
from grpo_trainer.shared.bridge_file import read_bridge_config
from tests.golden.stand_in import bridge_config, write_config
from tests.old_runs import FINISHED, UNFINISHED, copy_of
from tests.stand_ins import Asked, Reply, answering, registration
from tests.unit.factories import bridge_info
from vllm_server.bridge_file import BridgeFile
from vllm_server.errors import FatalError

Edit = Callable[[Path], None]


def numbered_2(path: Path) -> None:
    """Give a JSON object, or the last line of a file of them, the number 2."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    lines[-1] = json.dumps({**json.loads(lines[-1]), "format": 2})
    path.write_text("\n".join(lines) + "\n")


NEWER_STORE = wire.STORE_FORMAT + 1


def newer_sqlite(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {NEWER_STORE}")


def write_numbered_2(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"format": 2}')


@contextmanager
def refused(folder: Path, field: str, kind: type[UserError] = FormatError) -> Iterator[None]:
    """That the block is refused with the file and both numbers named, and that every file of the folder is as before.

    SQLite's index of a journal (`-shm`) holds no data: each process that opens the file makes it.
    """

    def contents() -> dict[Path, bytes]:
        files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
        return {path: path.read_bytes() for path in files}

    before = contents()
    with pytest.raises(kind) as error:
        yield
    assert error.value.field.endswith(field)
    newer = NEWER_STORE if field == "queue.sqlite" else 2
    assert error.value.got == f"format {newer}" and error.value.wanted.startswith(f"format {newer - 1},")
    assert error.value.fix
    assert contents() == before


def command(*words: object) -> None:
    """Run a `grpo` command in this process; raise its error."""
    CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("metrics.jsonl", numbered_2),
        ("samples.jsonl", numbered_2),
        ("start.json", numbered_2),
        ("checkpoints/step_3/state.json", numbered_2),
        ("queue.sqlite", newer_sqlite),
        ("servers/members.json", write_numbered_2),
        ("servers/served.json", write_numbered_2),
    ],
)
def test_a_run_is_not_resumed_by_an_older_version(tmp_path: Path, name: str, edit: Edit) -> None:
    folder = copy_of(UNFINISHED, tmp_path)
    edit(folder / name)
    with refused(tmp_path, name):
        command("run", "--model-name", "m", "--run-dir", folder, "--resume", "auto")


def test_a_queue_is_not_emptied_where_a_new_run_begins(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    newer_sqlite(folder / "queue.sqlite")
    with refused(tmp_path, "queue.sqlite"):
        command("run", "--model-name", "m", "--run-dir", folder)


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "samples.jsonl", "logs/env-arithmetic.metrics.jsonl", "checkpoints/adapter_final/state.json"],
)
def test_report_of_a_newer_run(tmp_path: Path, name: str) -> None:
    folder = copy_of(FINISHED, tmp_path)
    numbered_2(folder / name)
    with refused(tmp_path, name):
        command("report", folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/adapter_final/state.json"])
def test_list_of_runs_names_a_newer_one_and_has_the_others(tmp_path: Path, name: str) -> None:
    numbered_2(copy_of(FINISHED, tmp_path) / name)
    copy_of(UNFINISHED, tmp_path)
    assert {Path(run.folder).name: run.state for run in list_runs(tmp_path)} == {
        "finished": "newer",
        "unfinished": "stopped",
    }


def test_a_newer_checkpoint_is_neither_taken_for_damaged_nor_exported(tmp_path: Path) -> None:
    checkpoints = copy_of(UNFINISHED, tmp_path) / "checkpoints"
    numbered_2(checkpoints / "step_3" / "state.json")
    with refused(tmp_path, "step_3/state.json"):
        newest_whole(checkpoints, lambda line: None)
    for named in (checkpoints, checkpoints / "step_3"):
        with refused(tmp_path, "step_3/state.json"):
            command("export", named, tmp_path / "out")


@pytest.mark.parametrize("resume", ["auto", "checkpoints/step_3", "never"])
def test_a_trainer_started_by_hand_leaves_newer_checkpoints(tmp_path: Path, resume: str) -> None:
    from tests.unit.test_checkpoint import checkpoints, trainer_of_all_weights

    folder = copy_of(UNFINISHED, tmp_path)
    damaged = shutil.copytree(folder / "checkpoints" / "step_3", folder / "checkpoints" / "step_1")
    (damaged / "state.json").write_text("{")  # would be moved aside
    numbered_2(folder / "checkpoints" / "step_3" / "state.json")
    named = resume if resume in ("auto", "never") else str(folder / resume)
    saver = checkpoints(trainer_of_all_weights(), folder / "checkpoints", resume=named)
    with refused(tmp_path, "step_3/state.json"):
        saver.resume()


@pytest.mark.parametrize("journal", [False, True])
def test_a_newer_queue_is_not_opened(tmp_path: Path, journal: bool) -> None:
    killed = tmp_path / "killed"
    with closing(sqlite3.connect(copy_of(UNFINISHED, tmp_path) / "queue.sqlite", isolation_level=None)) as other:
        other.execute(f"PRAGMA user_version = {NEWER_STORE}")
        if not journal:
            other.close()
        shutil.copytree(tmp_path / "unfinished", killed)  # with a journal: as a killed process leaves it
    assert (killed / "queue.sqlite-wal").exists() == journal
    with refused(killed, "queue.sqlite"):
        Store(killed / "queue.sqlite")


def test_a_newer_request_is_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / REQUESTS).mkdir()
    (tmp_path / REQUESTS / "a.json").write_bytes(msgspec.json.encode(Request("drop", "server-1", format=2)))
    answer_all(tmp_path, lambda request: pytest.fail("it was obeyed"))
    answer = msgspec.json.decode((tmp_path / REQUESTS / "a.answer").read_bytes(), type=Answer)
    assert not answer.done and "format 2" in answer.text


def test_a_newer_bridge_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    path = write_config(tmp_path, bridge_config("m", {}, schema_version=2))
    before = path.read_bytes()
    with pytest.raises(BridgeError) as trainer:
        read_bridge_config(path)
    assert (trainer.value.field, trainer.value.got, trainer.value.wanted) == (f"{path}: schema_version", "2", "1")
    with pytest.raises(FatalError) as server:
        BridgeFile(path).check()
    assert "schema_version 2" in server.value.got and server.value.fix
    assert path.read_bytes() == before


def answers_of(**by_path: Any) -> Callable[[Asked], Reply]:
    def answer(asked: Asked) -> Reply:
        name = asked.path.strip("/").replace("/", "_").replace("-", "_")
        return Reply(json=by_path.get(name, {}), headers={"Content-Type": wire.JSON})

    return answer


async def closed_after(client: Any, ask: Callable[[Any, str], Awaitable[object]]) -> None:
    try:
        await ask(client, "name")
    finally:
        await client.close()


def test_clients_refuse_newer_servers(tmp_path: Path) -> None:
    info = msgspec.to_builtins(msgspec.structs.replace(bridge_info(), format=2))
    with answering(answers_of(bridge_info=info, health={})) as url:
        client = ServerClient(Server(host="127.0.0.1", port=int(url.rpartition(":")[2])))
        with refused(tmp_path, url, ServerError):
            client.wait_until_ready()
        with refused(tmp_path, url, PeerError):
            asyncio.run(closed_after(Peer("the inference server", url, patience=5.0), detect))

    registered = {"register": {"uuid": 1, "format": 2}, "register_env": {"status": "success", "format": 2}}
    with answering(answers_of(**registered)) as url:
        with refused(tmp_path, url, ServerError):
            RolloutClient(RolloutConfig(atropos_url=url, rollout_timeout=5), registration(4), lambda: None).register()
        config = BaseEnvConfig(tokenizer_name="m", group_size=2, rollout_server_url=url, retry_timeout=5.0)
        with refused(tmp_path, url, PeerError):
            asyncio.run(closed_after(RolloutApi(config), RolloutApi.register))


def test_what_is_written_has_its_number(tmp_path: Path) -> None:
    seal(tmp_path, Progress(1, 1))
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": 0.5})
    sink.close()
    for name in ("state.json", "metrics.jsonl"):
        assert json.loads((tmp_path / name).read_text())["format"] == 1
    series, _ = read_series(read_rows(tmp_path / "metrics.jsonl"), tmp_path / "api.log", [])
    assert series.keys() == {"loss"}, "the number is no figure"


@pytest.mark.parametrize("content", [{}, {"format": 1}, [], [{"format": 2}], 0, 1])
def test_what_has_no_number_or_a_known_one_is_read(content: object) -> None:
    check_format("file", content, 1)


@pytest.mark.parametrize("content", [{"format": 3}, {"format": "2"}, {"format": None}, 3])
def test_what_is_newer_or_has_no_whole_number_is_refused(content: object) -> None:
    with pytest.raises(FormatError):
        check_format("file", content, 2)


def test_no_file_has_no_number(tmp_path: Path) -> None:
    check_sqlite(tmp_path / "none", 1)
    (tmp_path / "empty").touch()
    check_sqlite(tmp_path / "empty", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
