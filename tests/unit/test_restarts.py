"""Processes that restart, and servers that come and go, with real processes under the supervisor."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from typer.testing import CliRunner

from grpo_common.roster import FOLDER, MEMBERS_FILE, SERVED_FILE, Member, Served, in_use, read_members
from grpo_trainer.cli import app
from grpo_trainer.errors import ConfigError, ProcessFailedError, ServerError, StoppedError
from grpo_trainer.launch import fleet, supervisor
from grpo_trainer.launch.fleet import FOLDER as REQUESTS
from grpo_trainer.launch.fleet import Answer, Request, answer_all, request
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import TRAINERS, ProcessSpec, sampling_seed
from grpo_trainer.launch.process import Process
from grpo_trainer.launch.replan import Replanner
from grpo_trainer.servers import change, rows
from tests.processes import alive, assert_ended, free_port, wait_for
from tests.unit.factories import refusing
from tests.unit.test_supervisor import LAST, SERVER, SLEEPER, Recorded, spec

TWICE = """
import pathlib, sys, time
starts = pathlib.Path(sys.argv[1])
starts.open("a").write(" ".join(sys.argv[2:]) + ".\\n")
if len(starts.read_text().splitlines()) < 2:
    {end}
if "stays" in sys.argv:
    time.sleep(60)
"""
"""Ends in some way at its first start, and keeps running at its second."""
KILLED = "import os; os.kill(os.getpid(), 9)"
OF = {"trainer": TRAINERS}
"""Name of a process -> those that restart together with it; others restart alone."""


def awaiting(path: Path, lines: int) -> ProcessSpec:
    """A trainer that ends once a file has that many lines."""
    path.touch()
    code = "import sys, time\nwhile len(open(sys.argv[1]).readlines()) < int(sys.argv[2]): time.sleep(0.02)"
    return spec("trainer", code, str(path), str(lines), ends_run=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "PLACE_SECONDS", 0.1)
    monkeypatch.setattr(fleet, "LOOK_SECONDS", 0.05)


class Running(Recorded):
    """A run after its first step, with a checkpoint."""

    def __init__(self, folder: Path, most: int = 3, *, begun: bool = True, **options: Any) -> None:
        super().__init__(folder, **{"max_restarts": most, "has_checkpoint": lambda: True, **options})
        self.begun = begun


class Planner(Replanner):
    """Gives room at the third attempt, and has some more servers."""

    def __init__(self, *more: ProcessSpec) -> None:
        self.more = list(more)
        self.tries: list[int] = []
        self.vacant: list[str] = []

    def placed(self, specs: Sequence[ProcessSpec]) -> Sequence[ProcessSpec] | None:
        self.tries.append(len(specs))
        return specs if len(self.tries) > 2 else None

    def another_server(self, gpus: str | None) -> ProcessSpec:
        if gpus is not None:
            raise ConfigError("not these", field="--gpus", got=gpus)
        return self.more.pop()

    def vacate(self, name: str) -> None:
        self.vacant.append(name)


def starts(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "end", "options"),
    [
        ("env", KILLED, {"may_end": True, "after_errors": True}),
        ("api", KILLED, {}),
        ("trainer", f"sys.exit({os.EX_TEMPFAIL})", {"ends_run": True}),  # it says so that another trainer has ended
    ],
)
def test_supervisor_restarts(tmp_path: Path, name: str, end: str, options: dict[str, Any]) -> None:
    words = ["stays"] if name == "api" else []
    one = spec(name, TWICE.format(end=end), str(tmp_path / "a"), *words, restarts=OF.get(name, name), **options)
    with Running(tmp_path) as running:
        running.run([[one] if name == "trainer" else [awaiting(tmp_path / "a", 2), one]])
    assert starts(tmp_path, "a") == ["".join([*words, "."])] * 2


def test_all_trainers_restart_together_from_their_checkpoint(tmp_path: Path) -> None:
    waits = "\n    time.sleep(20)"
    killed = "\n    while not starts.with_name('a').read_text(): time.sleep(0.02)\n    " + KILLED  # both have started
    (tmp_path / "a").touch()
    leads = spec("trainer", TWICE.format(end=waits), str(tmp_path / "a"), ends_run=True, restarts=TRAINERS)
    other = spec("trainer-1", TWICE.format(end=killed), str(tmp_path / "b"), may_end=True, restarts=TRAINERS)
    again = ("--resume", "auto")
    with Running(tmp_path) as running:
        running.run([[replace(leads, again=again), replace(other, again=again)]])
    assert starts(tmp_path, "a") == [".", "--resume auto."]
    assert starts(tmp_path, "b")[0] == "."


@pytest.mark.parametrize(
    ("name", "options", "end"),
    [
        ("trainer", {"begun": False}, KILLED),
        ("trainer", {"has_checkpoint": lambda: False}, KILLED),
        ("trainer", {"most": 0}, KILLED),
        ("trainer", {}, "sys.exit(1)"),
        ("api", {}, "sys.exit(1)"),
    ],
    ids=["before the first step", "no checkpoint", "no restarts", "its own error", "the api's own error"],
)
def test_supervisor_does_not_restart(tmp_path: Path, name: str, options: dict[str, Any], end: str) -> None:
    one = spec(
        name, TWICE.format(end=end), str(tmp_path / "a"), ends_run=name == "trainer", restarts=OF.get(name, name)
    )
    with refusing(ProcessFailedError, name), Running(tmp_path, **options) as running:
        running.run([[one, spec("env", SLEEPER)]])
    assert len(starts(tmp_path, "a")) == 1


def test_a_server_that_fails_every_time_ends_the_run_after_other_seeds(tmp_path: Path) -> None:
    code = f"import sys; open(sys.argv[1], 'a').write(sys.argv[3] + '\\n'); sys.exit({LAST!r})"
    server = spec("server", code, str(tmp_path / "seeds"), "--seed", "7", restarts="server", after_errors=True)
    with refusing(ProcessFailedError, "server", got="exit code 1", words=[LAST]), Running(tmp_path, 2) as running:
        running.run([[spec("trainer", SLEEPER, ends_run=True), replace(server, seed="0 server 0")]])
    assert starts(tmp_path, "seeds") == ["7", *(sampling_seed("0 server 0", start) for start in (1, 2))]


def test_restarts_are_counted_anew_after_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "IN_A_ROW_SECONDS", 0.0)
    code = "import sys; open(sys.argv[1], 'a').write('.\\n'); sys.exit(1)"
    env = spec("env", code, str(tmp_path / "env"), may_end=True, restarts="env", after_errors=True)
    with Running(tmp_path, 1) as running:
        running.run([[awaiting(tmp_path / "env", 4), env]])


def test_restarts_of_a_server_that_is_never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting until it is given up takes longer than the time after which the count of restarts is reset."""
    monkeypatch.setattr(supervisor, "IN_A_ROW_SECONDS", 0.0)
    url = f"http://127.0.0.1:{free_port()}/health"
    options = {"ready_url": url, "ready_timeout": 0.3, "restarts": "server", "after_errors": True}
    running = Running(tmp_path, 2)
    with refusing(ProcessFailedError, "server"), running:
        running.run([[spec("server", SLEEPER, **options)]])
    assert len(running.pids["server"]) == 3


def test_supervisor_does_not_blame_a_process_that_has_lost_another_one(tmp_path: Path) -> None:
    """Both have ended when the supervisor looks."""
    with refusing(ProcessFailedError, "trainer"), Running(tmp_path, 0) as running:
        for name, code in (("trainer-1", os.EX_TEMPFAIL), ("trainer", 1)):
            running.start(spec(name, f"raise SystemExit({code})", ends_run=name == "trainer"))
        while any(child.exit_code is None for child in running.processes):
            time.sleep(0.01)
        running.run([])


def test_trainers_of_which_one_can_not_be_started_start_together_later(tmp_path: Path) -> None:
    class Refusing(Running):
        refusals = 1

        def start(self, spec: ProcessSpec) -> Process:
            if spec.name == "trainer-1" and self.pids.get("trainer-1") and self.refusals:
                self.refusals -= 1
                raise ProcessFailedError("its machine is gone", field=spec.name)
            return super().start(spec)

    leads = replace(awaiting(tmp_path / "b", 2), restarts=TRAINERS)
    other = spec("trainer-1", TWICE.format(end=KILLED), str(tmp_path / "b"), may_end=True, restarts=TRAINERS)
    running = Refusing(tmp_path)
    with running:
        running.run([[leads, other]])
    assert len(running.pids["trainer"]) == 3 and len(running.pids["trainer-1"]) == 2


def test_a_process_without_room_waits_for_a_machine(tmp_path: Path) -> None:
    planner = Planner()
    trainer = spec("trainer", TWICE.format(end=KILLED), str(tmp_path / "a"), ends_run=True, restarts=TRAINERS)
    with Running(tmp_path, replanner=planner) as running:
        running.run([[trainer]])
    assert planner.tries == [1, 1, 1] and len(starts(tmp_path, "a")) == 2


# servers -------------------------------------------------------------------------------------------------------


class Servers:
    """A run with servers that a script changes from another thread; the trainer ends once it is through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = folder / "servers"

    def server(self, name: str) -> ProcessSpec:
        port = free_port()
        url = f"http://127.0.0.1:{port}/health"
        return spec(name, SERVER, str(port), ready_url=url, restarts=name)

    def play(self, specs: Sequence[ProcessSpec], script: Callable[[Running], None], **options: Any) -> None:
        done = self.folder / "done"
        waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
        trainer = spec("trainer", waits, str(done), ends_run=True)

        def act() -> None:
            try:
                self.until(lambda: all(each.state == "running" for each in self.listed(specs)))
                script(running)
            finally:
                done.touch()

        running = Running(self.folder, servers=self.servers, **options)
        with ThreadPoolExecutor(1) as pool, running:
            acting = pool.submit(act)
            running.run([[*specs, trainer]])
        acting.result()

    def listed(self, specs: Sequence[ProcessSpec]) -> list[Member]:
        self.until(lambda: {each.name for each in specs} <= self.states().keys())
        found = {member.name: member for member in read_members(self.servers)}
        return [found[each.name] for each in specs]

    def states(self) -> dict[str, tuple[str, int]]:
        return {member.name: (member.state, member.boot) for member in read_members(self.servers)}

    def serve(self) -> None:
        """As a trainer that uses every server of the list."""
        served = {member.url: Served(member.boot, 1) for member in read_members(self.servers)}
        (self.servers / "served.json").write_bytes(msgspec.json.encode(served))

    def until(self, done: Callable[[], bool]) -> None:
        wait_for("the list of servers", done, self.folder / "logs" / "server.log", 20)


def test_servers_killed_one_comes_back_and_is_left_out_at_last(tmp_path: Path) -> None:
    run = Servers(tmp_path)
    specs = [run.server("server"), run.server("server-2")]

    def script(running: Running) -> None:
        run.serve()
        assert len(in_use(run.servers)) == 2
        os.kill(running.pids["server-2"][0], signal.SIGKILL)
        run.until(lambda: len(in_use(run.servers)) == 1)
        run.until(lambda: run.states().get("server-2") == ("running", 2))
        assert len(in_use(run.servers)) == 1, "the trainer has not proved it yet"
        assert running._fleet is not None and not running._fleet.has_another(running.table["server"])
        os.kill(running.pids["server-2"][1], signal.SIGKILL)
        run.until(lambda: "server-2" not in run.states())
        assert run.states() == {"server": ("running", 1)}

    run.play(specs, script, most=1)


def test_a_dropped_server_ends_once_the_trainer_has_let_it_go(tmp_path: Path) -> None:
    run = Servers(tmp_path)
    specs = [run.server("server"), run.server("server-2")]

    def script(running: Running) -> None:
        run.serve()
        url, mistyped = run.listed(specs)[1].url, "http://127.0.0.1:9"
        assert request(run.servers, Request("add", mistyped)).done
        assert request(run.servers, Request("drop", url)).done
        run.until(lambda: run.states()["server-2"][0] == "leaving")
        assert len(in_use(run.servers)) == 1
        time.sleep(0.3)
        assert run.states()["server-2"][0] == "leaving", "the trainer may still be publishing to it"
        (run.servers / "served.json").unlink()
        run.until(lambda: "server-2" not in run.states())
        for wanted, done in (("server", False), (mistyped, True), ("server", False), ("http://nowhere:1", False)):
            assert request(run.servers, Request("drop", wanted)).done == done, wanted

    run.play(specs, script)


def test_servers_are_added_while_a_run_goes_on(tmp_path: Path) -> None:
    run = Servers(tmp_path)
    specs, planner = [run.server("server")], Planner(run.server("server-3"), run.server("server-2"))

    def script(running: Running) -> None:
        assert not request(run.servers, Request("add", gpus="7")).done
        assert request(run.servers, Request("add")).done
        run.until(lambda: run.states().get("server-2") == ("running", 1))
        assert len(planner.tries) == 3, "it has waited for room"
        planner.tries.clear()
        planner.placed = lambda specs: None  # type: ignore[method-assign]
        assert request(run.servers, Request("add")).done
        run.until(lambda: run.states().get("server-3") == ("waiting for a machine", 1))
        assert request(run.servers, Request("drop", "server-3")).done
        assert planner.vacant == ["server-3"]
        elsewhere = "http://127.0.0.1:9"
        assert request(run.servers, Request("add", elsewhere)).done
        assert not request(run.servers, Request("add", elsewhere)).done
        run.until(lambda: elsewhere in {member.url for member in read_members(run.servers)})
        assert request(run.servers, Request("drop", elsewhere)).done
        run.until(lambda: len(run.states()) == 2)
        for url in ("http://127.0.0.1:10", elsewhere):
            assert request(run.servers, Request("add", url)).done
        run.until(lambda: len({member.name for member in read_members(run.servers)}) == 4)

    run.play(specs, script, replanner=planner)


def test_a_run_that_is_over_answers_nothing(tmp_path: Path) -> None:
    with pytest.raises(ServerError):
        request(tmp_path, Request("add"), seconds=0.2)
    assert not list((tmp_path / "requests").iterdir())


def test_a_request_that_is_withdrawn_unreadable_or_newer_does_not_end_a_run(tmp_path: Path) -> None:
    folder = tmp_path / REQUESTS
    folder.mkdir()
    drops = {name: msgspec.json.encode(Request("drop", f"http://{name}:1")) for name in ("b", "c")}
    newer = msgspec.json.encode(Request("drop", "http://d:1", format=2))
    for name, content in {"a": b"{", "a2": b"[" * 100_000, **drops, "d": newer}.items():
        (folder / f"{name}.json").write_bytes(content)
    obeyed: list[str | None] = []

    def obey(request: Request) -> Answer:
        obeyed.append(request.server)
        (folder / "c.json").unlink()  # who asked has stopped waiting meanwhile
        return Answer(True, "done")

    answer_all(tmp_path, obey)
    assert obeyed == ["http://b:1"]
    answers = {path.stem: msgspec.json.decode(path.read_bytes(), type=Answer) for path in folder.iterdir()}
    assert {name: each.done for name, each in answers.items()} == {"a": False, "a2": False, "b": True, "d": False}
    assert "format 2" in answers["d"].text


# `grpo servers` ---------------------------------------------------------------------------------------------


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


def test_servers_command(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = [(row["name"], row["state"], row["version"], row["note"]) for row in rows(run)]
    assert found == [
        ("server", "serves", 7, ""),
        ("server-2", "running", None, ""),
        ("server-3", "running", None, "unproved"),
        ("server-4", "restarting", None, ""),
    ]

    table = CliRunner().invoke(app, ["servers", "--run-dir", str(run)], env={"COLUMNS": "20"})
    assert table.exit_code == 0 and all(name in table.output for name in ("server-4", D, "n2", "serves"))
    done = CliRunner().invoke(app, ["servers", "--run-dir", str(run), "--json"])
    assert [row["url"] for row in json.loads(done.output)] == [A, B, C, D]

    for folder in (run, tmp_path_factory.mktemp("other")):
        with refusing(ConfigError, "RUN_DIR"):
            change(folder, Request("add"))


@pytest.mark.parametrize("url", ["127.0.0.1:9001", "http://host", "http://host:9001/v1", "https://host:1"])
def test_an_address_of_another_form_is_refused(run: Path, url: str) -> None:
    with refusing(ConfigError, "URL", got=url):
        change(run, Request("add", url))


# the trainer's own server --------------------------------------------------------------------------------------------


CAUSE = "ValueError: no such model"
DIES = f"import sys; print({CAUSE!r}, file=sys.stderr); print('giving up'); sys.exit(3)"
SLEEPS = "import time; print('loading', flush=True); time.sleep(600)"


def server(
    tmp_path: Path, script: str = SERVER, *, timeout: float = 60.0, key: str | None = None, **options: object
) -> OwnedServer:
    port = free_port()

    def launch(model: str, version: int) -> ProcessSpec:
        ready = {"ready_url": f"http://127.0.0.1:{port}/health", "ready_key": key, "ready_timeout": timeout}
        return spec("server", script, str(port), f"{model}-v{version}", **ready, stop_seconds=0.5)

    return OwnedServer(launch, tmp_path / "logs" / "server.log", tmp_path / "served", **options)  # type: ignore[arg-type]


def test_owned_server_serves_what_each_start_names_until_it_dies(tmp_path: Path) -> None:
    with server(tmp_path, key="secret") as owned:
        pids = []
        for version in (0, 2):
            owned.stop()
            owned.start("locked", version)
            owned.wait_ready()
            assert owned.pid is not None
            pids.append(owned.pid)
            line = f"server up locked-v{version}"  # a thread writes the log
            wait_for(line, lambda line=line: line in owned.log_path.read_text(), owned.log_path, 30)
        assert not alive(pids[:1]) and alive(pids[1:])
        assert "server up locked-v0" in owned.log_path.read_text(), "the log of the launch before is gone"
        owned.check()
        os.kill(pids[1], signal.SIGKILL)
        assert_ended(pids)
        with refusing(ProcessFailedError, "server", words=["SIGKILL"]):
            owned.check()


def test_every_model_folder_is_served_by_one_path(tmp_path: Path) -> None:
    with server(tmp_path) as owned:
        for version, name in enumerate(("a", "b")):
            (tmp_path / name).mkdir()
            assert owned.start(str(tmp_path / name), version) == str(tmp_path / "served")
            assert (tmp_path / "served").resolve() == tmp_path / name
            owned.stop()
        assert owned.start("a-hub/name", 2) == "a-hub/name"
    assert not (tmp_path / "served").is_symlink()


@pytest.mark.parametrize(
    ("script", "timeout", "model", "got", "helps"),
    [
        (DIES, 60, "model", "exit code 3", ("logs/server.log", CAUSE, "giving up")),
        (SLEEPS, 0.5, "model", "/health", ("0 s", "--server.startup-timeout")),
        (SERVER, 3600, "locked", "401", ()),  # it refuses the key
    ],
)
def test_owned_server_that_is_not_ready_is_named_and_ended(
    tmp_path: Path, script: str, timeout: float, model: str, got: str, helps: tuple[str, ...]
) -> None:
    with server(tmp_path, script, timeout=timeout) as owned:
        owned.start(model, 0)
        pid = owned.pid
        with refusing(ProcessFailedError, "server", words=helps) as error:
            owned.wait_ready()
    assert got in error.value.got
    assert pid is not None
    assert_ended([pid])


def test_a_signal_to_the_trainer_ends_the_wait(tmp_path: Path) -> None:
    stopped = Mock(side_effect=StoppedError(signal.SIGINT))
    with server(tmp_path, SLEEPS, check_stop=stopped) as owned, pytest.raises(StoppedError):
        owned.start("model", 0)
        owned.wait_ready()
