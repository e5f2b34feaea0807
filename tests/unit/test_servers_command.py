"""`grpo servers`: what it lists, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from grpo_common.roster import FOLDER, MEMBERS_FILE, SERVED_FILE, Member, Served
from grpo_trainer.cli import app
from grpo_trainer.errors import ConfigError
from grpo_trainer.launch.fleet import Request
from grpo_trainer.servers import change, rows

A, B, C, D = (f"http://127.0.0.1:{port}" for port in (9001, 9002, 9003, 9004))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir()
    members = [
        Member("server", A, "n1", "running"),
        Member("server-2", B, "n2", "running", 2),
        Member("server-3", C, "n2", "running"),
        Member("server-4", D, "n2", "restarting", 2),
    ]
    served = {A: Served(1, 7), B: Served(1, 6), C: Served(1, None, "unproved"), D: Served(1, 7)}
    (tmp_path / FOLDER / MEMBERS_FILE).write_bytes(msgspec.json.encode(members))
    (tmp_path / FOLDER / SERVED_FILE).write_bytes(msgspec.json.encode(served))
    return tmp_path


def test_a_server_serves_once_its_present_process_has_a_version(run: Path) -> None:
    found = [(row.name, row.state, row.version, row.note) for row in rows(run)]
    assert found == [
        ("server", "serves", 7, ""),
        ("server-2", "running", None, ""),
        ("server-3", "running", None, "unproved"),
        ("server-4", "restarting", None, ""),
    ]


def test_the_list_is_printed_as_a_table_and_as_json(run: Path) -> None:
    table = CliRunner().invoke(app, ["servers", "--run-dir", str(run)])
    assert table.exit_code == 0 and all(name in table.output for name in ("server-4", "n2", "serves"))
    done = CliRunner().invoke(app, ["servers", "--run-dir", str(run), "--json"])
    assert [row["url"] for row in json.loads(done.output)] == [A, B, C, D]


@pytest.mark.parametrize("url", ["127.0.0.1:9001", "http://host", "http://host:9001/v1", "https://host:1"])
def test_an_address_of_another_form_is_refused(run: Path, url: str) -> None:
    with pytest.raises(ConfigError) as error:
        change(run, Request("add", url))
    assert (error.value.field, error.value.got) == ("URL", url)


def test_a_run_that_is_over_or_has_no_list_is_not_changed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError) as over:
        change(run, Request("add"))
    assert over.value.field == "RUN_DIR"
    with pytest.raises(ConfigError) as none:
        change(tmp_path_factory.mktemp("other"), Request("add"))
    assert none.value.field == "RUN_DIR"
