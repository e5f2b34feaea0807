"""`grpo servers`: the inference servers of a running `grpo run`, and changes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from grpo_common.locks import is_held
from grpo_common.roster import FOLDER, read_members, read_served
from grpo_trainer.config.processes import newest_run
from grpo_trainer.errors import ConfigError, ServerError
from grpo_trainer.files import LOCK_FILE

if TYPE_CHECKING:
    from grpo_trainer.launch.fleet import Request

app = typer.Typer(
    name="servers",
    help="List the inference servers of a run in progress, add one, or drop one (broadcast, and lora_only without "
    "--share-base).",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="PATH", help="Folder of the run (default: the newest of runs/).")
]
WIDEST = 2000
"""Columns of the table, at most: a terminal wraps a line that is too long, where rich would cut addresses off."""
URL = re.compile(r"http://[^/:]+:\d+")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the servers of a run: name, url, where, state, version, boot, note.

    `state` is as `grpo run` and the trainer see it; `serves`: environments ask it. `version` is the policy version that
    it generates with, None if the trainer does not use it, for the reason of `note`. `boot` counts its starts.

    Raises:
        ConfigError: the folder has no list of servers.
    """
    folder = run_dir / FOLDER
    if not (members := read_members(folder)):
        wanted = "the folder of a grpo run with lora_only or broadcast"
        raise ConfigError("no list of servers there", field="RUN_DIR", got=run_dir, wanted=wanted)
    served, found = read_served(folder), []
    for member in members:
        known = served.get(member.url)
        known = known if known is not None and known.boot == member.boot else None
        version = known.version if known else None
        state = "serves" if member.state == "running" and version is not None else member.state
        note = known.note if known and version is None else ""
        found.append(msgspec.to_builtins(member) | {"state": state, "version": version, "note": note})
    return found


def change(run_dir: Path, wanted: Request) -> str:
    """Have a running `grpo run` change its servers, and return what it answers.

    Raises:
        ConfigError: the run is over, or the server's URL has another form.
        ServerError: it refused, or did not answer.
    """
    from grpo_trainer.launch.fleet import request  # takes as long to import as all of `grpo --help` besides

    if wanted.action == "add" and wanted.server is not None and not URL.fullmatch(wanted.server):
        raise ConfigError(field="URL", got=wanted.server, wanted="http://HOST:PORT")
    rows(run_dir)
    if not is_held(run_dir / LOCK_FILE):
        raise ConfigError("the run is over", field="RUN_DIR", got=run_dir, wanted="a running grpo run")
    answer = request(run_dir / FOLDER, wanted)
    if not answer.done:
        raise ServerError(f"grpo run refuses: {answer.text}", field=f"grpo servers {wanted.action}")
    return answer.text


def newest() -> Path:
    """Return the folder of the newest run that was started without `--run-dir`, or raise a `ConfigError`."""
    if (folder := newest_run()) is None:
        raise ConfigError(field="--run-dir", got="no numbered run in runs/", wanted="the folder of a run")
    return folder


@app.callback()
def list_servers(
    ctx: typer.Context,
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the inference servers of a grpo run: state, policy version, machine. Subcommands add or drop one."""
    if ctx.invoked_subcommand is not None:
        return
    found = rows(run_dir or newest())
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("server", "URL", "where", "state", "version", "starts", "note", box=None)
    for row in found:
        version = "" if row["version"] is None else str(row["version"])
        table.add_row(row["name"], row["url"], row["where"], row["state"], version, str(row["boot"]), row["note"])
    Console(width=WIDEST, markup=False, highlight=False).print(table)


@app.command("add")
def add_server(
    url: Annotated[
        str | None, typer.Argument(help="A running `grpo serve`, http://HOST:PORT; default: start one.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="CUDA_VISIBLE_DEVICES of a server that is started.")
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Start one more server, or add a running one. It gets requests once it is proved and has the newest weights."""
    from grpo_trainer.launch.fleet import Request

    typer.echo(change(run_dir or newest(), Request("add", url, gpus)))


@app.command("drop")
def drop_server(
    server: Annotated[str, typer.Argument(help="Its name, or http://HOST:PORT.")], run_dir: RunDir = None
) -> None:
    """Take a server out of the run: its requests go to other servers, and a server that the run started ends."""
    from grpo_trainer.launch.fleet import Request

    typer.echo(change(run_dir or newest(), Request("drop", server)))
