"""The supervisor with real processes: order, readiness, failures, and that nothing is left behind."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import psutil
import pytest

from grpo_common import status
from grpo_common.status import BURST, LINES, TRAINED, StatusWriter, parse
from grpo_trainer import cli, signals
from grpo_trainer.errors import DiskFullError, FolderGoneError, ProcessFailedError, StoppedError
from grpo_trainer.launch import process
from grpo_trainer.launch import supervisor as supervisor_module
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.process import START_STOP_SECONDS, Process
from grpo_trainer.launch.supervisor import SHUTDOWN_SECONDS, Supervisor
from grpo_trainer.phases import FIRST_STEP, IN_WORDS, STARTING, Wait
from grpo_trainer.phases import SERVER as WAITS_FOR_SERVER
from tests.processes import alive, assert_ended, found_in, free_port, once, wait_for
from tests.unit.factories import refusing

SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_refused = "locked" in str(sys.argv[2:]) and self.headers["Authorization"] != "Bearer secret"
        self.send_response(401 if is_refused else 200); self.end_headers()
    def log_message(self, *a): pass
print("server up", *sys.argv[2:], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LAST = "no such dataset"
SAYS = """
import logging, sys, time
from grpo_common.status import NOTICE, OWN, WAITS
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
OWN.open()
log = logging.getLogger("x")
"""
"""Has a process write its status and its log as trainers and environments do."""
UNTIL = """
import pathlib, time
def until(path, text=""):
    path, end = pathlib.Path(path), time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, (path, text)
        time.sleep(0.01)
"""
"""Has a process wait for a file, or for what is in it: the test says there what the supervisor has seen."""
SLEEPER = "import time; print('asleep', flush=True); time.sleep(120)"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "again" not in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", SOURCE, "again"], start_new_session=True)
    print("child", child.pid, flush=True)
time.sleep(120)
"""
STUBBORN = f"SOURCE = {STUBBORN!r}\nexec(SOURCE)"
CHILD = r"^child (\d+)$"
"""What STUBBORN writes once SIGTERM does not end it and it has a child."""


def spec(name: str, code: str, *arguments: str, **options: Any) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", textwrap.dedent(code), *arguments), **options)


def trainer(code: str, *arguments: str, **options: Any) -> ProcessSpec:
    return spec("trainer", code, *arguments, ends_run=True, **options)


def speaking(folder: Path, name: str, code: str, *arguments: str, **options: Any) -> ProcessSpec:
    """A process with a status file."""
    env = {status.VARIABLE: str(folder / "status" / f"{name}.json")}
    return spec(name, SAYS + UNTIL + textwrap.dedent(code), *arguments, env=env, **options)


def served(code: str, **options: Any) -> ProcessSpec:
    """A server; `code` runs before it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    return spec("server", UNTIL + textwrap.dedent(code) + SERVER, str(port), ready_url=url, **options)


class Recorded(Supervisor):
    """A supervisor that keeps what it said and the pids of all that it started; none of them outlives it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.said, self.echoed, self.pids = list[str](), list[str](), dict[str, list[int]]()
        super().__init__(folder / "logs", self.said.append, self.echoed.append, **options)

    def start(self, spec: ProcessSpec) -> Process:
        child = super().start(spec)
        self.pids.setdefault(spec.name, []).append(child.pid)
        return child

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert_ended([pid for pids in self.pids.values() for pid in pids])


def failed(folder: Path, *processes: ProcessSpec) -> ProcessFailedError:
    """How a run of one stage fails."""
    with pytest.raises(ProcessFailedError) as error, Recorded(folder) as supervisor:
        supervisor.run([processes])
    return error.value


@contextmanager
def started_with(disposition: signal.Handlers, *numbers: int) -> Iterator[None]:
    """As if the tests had been started with this disposition of signals: `nohup` makes them ignore a hang-up."""
    before = {number: signal.signal(number, disposition) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# stages and readiness ------------------------------------------------------------------------------------------


def test_supervisor_runs_to_the_end(tmp_path: Path) -> None:
    server = served("")
    check = f"""
        import sys, urllib.request
        print("Step 1", urllib.request.urlopen("{server.ready_url}").status)  # the stage before is ready
        print("noise", file=sys.stderr)
    """
    with Recorded(tmp_path) as supervisor:
        supervisor.run([[server], [trainer(check), spec("env", SLEEPER)]])
    assert supervisor.echoed == ["Step 1 200"]
    log = tmp_path / "logs" / "server.log"
    assert any(line.startswith("server: ") and str(log) in line for line in supervisor.said)
    said = log.with_name("trainer.log").read_text()
    assert said.startswith("$ ") and "Step 1 200" in said and "noise" in said


def test_supervisor_server_that_refuses_the_key_ends_the_run_at_once(tmp_path: Path) -> None:
    port = free_port()
    options = {"ready_url": f"http://127.0.0.1:{port}/", "ready_key": "another", "ready_timeout": 3600}
    error = failed(tmp_path, spec("server", SERVER, str(port), "locked", **options), trainer(SLEEPER))
    assert error.field == "server" and "401" in error.got and "another" not in str(error)


def test_supervisor_shows_what_a_start_waits_for(tmp_path: Path) -> None:
    shown, loading = tmp_path / "shown", tmp_path / "loading"
    trains = f"""
        OWN.update(phase={WAITS_FOR_SERVER!r}, since=time.time())
        pathlib.Path({str(loading)!r}).touch()
        until({str(shown)!r}, "ready after")
        OWN.update(phase="compile", since=time.time())
        until({str(shown)!r}, {IN_WORDS["compile"]!r})
        OWN.update(phase={TRAINED!r}, since=time.time())
        until({str(shown)!r}, "begun: True")
    """
    loads = f"""
        print("INFO loads\\n", flush=True)
        until({str(shown)!r}, "INFO loads")
        until({str(loading)!r})
    """
    seen = list[Wait]()

    def show() -> None:
        seen.extend(supervisor.waits)
        shown.write_text(f"{supervisor.said} {seen} begun: {supervisor.begun}")

    supervisor = Recorded(tmp_path, show=show)
    with supervisor:
        supervisor.run([[served(loads), speaking(tmp_path, "trainer", trains, ends_run=True)]])
    assert Wait("server", STARTING, 0, "INFO loads") in {replace(wait, seconds=0) for wait in seen}
    found = {wait.what for wait in seen if wait.name == "trainer"} - {STARTING}  # before it has said anything
    assert found == {IN_WORDS["compile"]}, "its wait for the server is that server's"
    assert supervisor.begun and not supervisor.waits


@pytest.mark.parametrize(
    ("phase", "options", "seconds", "may_save"),
    [
        ("compile", {"ends_run": True, "stop_seconds": 120}, START_STOP_SECONDS, False),
        (FIRST_STEP, {"ends_run": True, "stop_seconds": 120}, 120, True),
        (TRAINED, {"ends_run": True, "stop_seconds": 120}, 120, True),
        ("", {"stop_seconds": 3}, 3, False),
    ],
)
def test_process_trainer_before_its_first_step_has_little_time_to_end(
    tmp_path: Path, phase: str, options: dict[str, Any], seconds: float, may_save: bool
) -> None:
    child = Process(spec("trainer", "pass", **options), tmp_path / "trainer.log")
    child.status = status.Status(phase=phase)
    assert (child.stop_seconds, child.may_save) == (seconds, may_save)
    child.end(1.0)


# failures ------------------------------------------------------------------------------------------------------


def test_supervisor_process_that_may_not_end(tmp_path: Path) -> None:
    error = failed(tmp_path, trainer(SLEEPER), spec("api", "pass"))
    assert (error.field, error.got) == ("api", "exit code 0")


def test_supervisor_names_a_killed_process_before_its_victims(tmp_path: Path) -> None:
    victim = """
        import sys, time
        while ") Z " not in open(f"/proc/{sys.argv[1]}/stat").read(): time.sleep(0.01)
        sys.exit("lost it")
    """
    with refusing(ProcessFailedError, "server", words=["SIGKILL"]), Recorded(tmp_path) as supervisor:
        server = supervisor.start(spec("server", SLEEPER))
        threading.Timer(0.5, server.popen.kill).start()
        supervisor.run([[trainer(victim, str(server.pid))]])


def test_supervisor_whose_reader_went_away_goes_on(tmp_path: Path) -> None:
    closed = mock.Mock(side_effect=BrokenPipeError)
    chatty = "for i in range(20000): print('Step', i)"  # more than a pipe holds: unread, it would block the trainer
    with Supervisor(tmp_path, closed, closed) as supervisor:
        supervisor.run([[trainer(chatty)]])
    assert "Step 19999" in (tmp_path / "trainer.log").read_text()


def test_supervisor_raises_what_ends_the_run_before_the_processes_that_it_ended(tmp_path: Path) -> None:
    gone = tmp_path / "gone"

    def check() -> None:
        if gone.exists():
            raise FolderGoneError(field="--run-dir")

    code = f"import pathlib, sys; pathlib.Path({str(gone)!r}).touch(); sys.exit(1)"
    with refusing(FolderGoneError, "--run-dir"), Recorded(tmp_path, check=check) as supervisor:
        supervisor.run([[spec("api", code), trainer(SLEEPER)]])


@pytest.mark.parametrize("fetched", [False, True], ids=["starves", "gets its last batch"])
def test_supervisor_without_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: bool) -> None:
    """A trainer that waits for a batch when no environment is left ends the run."""
    monkeypatch.setattr(supervisor_module, "PATIENCE_SECONDS", 6.0 if fetched else 1.0)
    ended = tmp_path / "ended"
    waits = f"""
        OWN.update(lacks_batch=True)
        until({str(ended)!r})
        OWN.update(lacks_batch={not fetched})
        time.sleep({7 if fetched else 120})
    """
    last = spec("env-b", f"print({LAST!r})", may_end=True)
    stages = [[spec("env-a", "pass", may_end=True), last, speaking(tmp_path, "trainer", waits, ends_run=True)]]
    starves = refusing(ProcessFailedError, "env-b", got="exit code 0", words=[LAST, "logs/env-b.log"])
    supervisor = Recorded(tmp_path)
    with (
        once(lambda: sum("has ended" in line for line in supervisor.said) == 2, ended.touch),
        nullcontext() if fetched else starves,
        supervisor,
    ):
        supervisor.run(stages)


def test_supervisor_full_disk_under_the_logs(small_disk: Path) -> None:
    chatty = "import time\nwhile True: print('x' * 1000, flush=True); time.sleep(0.001)"
    with refusing(DiskFullError, str(small_disk / "logs" / "env.log")), Recorded(small_disk) as supervisor:
        supervisor.run([[spec("env", chatty)]])


def test_supervisor_large_log_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_CHARACTERS", 5_000)
    with Recorded(tmp_path) as supervisor:
        supervisor.run([[trainer("for number in range(300): print(f'line {number:4}', 'x' * 30)")]])
    newest, before = ((tmp_path / "logs" / name).read_text() for name in ("trainer.log", "trainer.log.1"))
    assert max(len(newest), len(before)) <= 5_000
    assert newest.splitlines()[-1].split()[:2] == ["line", "299"]
    numbers = [int(line.split()[1]) for line in (before + newest).splitlines() if line.startswith("line")]
    assert numbers == list(range(numbers[0], 300))


# signals, and that nothing stays -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_supervisor_signal_ends_every_child_and_grandchild(number: signal.Signals, tmp_path: Path) -> None:
    stubborn, log, supervisor = trainer(STUBBORN, stop_seconds=0.5), tmp_path / "logs/trainer.log", Recorded(tmp_path)
    stop = once(lambda: found_in(log, CHILD) is not None, partial(os.kill, os.getpid(), number))
    with stop as sent, pytest.raises(StoppedError) as error, supervisor:
        supervisor.run([[spec("env", SLEEPER), stubborn]])
    assert time.monotonic() - sent[0] < SHUTDOWN_SECONDS + 0.5  # what is promised to users, not a benchmark
    assert error.value.exit_code == 128 + number
    assert [line for line in supervisor.said if number.name in line] == supervisor.said[-1:]
    grandchild = found_in(log, CHILD)
    assert grandchild
    assert_ended([int(grandchild[1])])


def test_supervisor_second_signal_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONCE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "SHUTDOWN_SECONDS", 100.0)
    log, interrupt = tmp_path / "logs" / "trainer.log", partial(os.kill, os.getpid(), signal.SIGINT)
    supervisor = Recorded(tmp_path)
    first = once(lambda: found_in(log, CHILD) is not None, interrupt)
    second = once(lambda: any(line.startswith("stopping") for line in supervisor.said), interrupt)
    with first, second as again, pytest.raises(StoppedError), supervisor:
        supervisor.run([[trainer(STUBBORN, stop_seconds=60)]])
    assert time.monotonic() - again[0] < 60  # less than what one signal would have allowed


@pytest.mark.parametrize("by_nohup", [False, True])
def test_supervisor_closed_terminal_ends_the_run_unless_nohup_started_it(tmp_path: Path, by_nohup: bool) -> None:
    code = f"import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep({0.5 if by_nohup else 60})"
    refused = nullcontext() if by_nohup else pytest.raises(StoppedError)
    set_before = signal.SIG_IGN if by_nohup else signal.SIG_DFL
    with started_with(set_before, signal.SIGHUP), refused, Recorded(tmp_path) as supervisor:
        supervisor.run([[trainer(code)]])


def test_supervisor_ends_an_orphan_of_a_process_with_it(tmp_path: Path) -> None:
    """Its parent, which the process started, has ended: only their process group still connects the two."""
    orphan = "import subprocess; subprocess.run(['sh', '-c', 'sleep 120 & echo orphan $!'])"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {orphan!r}])\nsys.exit(1)"
    failed(tmp_path, spec("env", code, may_end=True))
    log = tmp_path / "logs" / "env.log"
    found = found_in(log, r"^orphan (\d+)$")
    assert found
    wait_for("the orphan's end", lambda: not alive([int(found[1])]), log, 60)


def test_supervisor_ends_all_others_where_a_descendant_is_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil.Process, "kill", mock.Mock(side_effect=psutil.AccessDenied(1)))
    last = trainer(f"{UNTIL}until({str(tmp_path / 'logs' / 'env.log')!r}, '\\nasleep')")
    with Recorded(tmp_path) as supervisor:
        supervisor.run([[spec("env", SLEEPER), spec("env-2", SLEEPER), last]])
    assert "another user's" in (tmp_path / "logs" / "env.log").read_text()


def test_supervisor_that_is_killed_leaves_no_child(tmp_path: Path) -> None:
    script = f"""
        import sys
        from pathlib import Path
        from grpo_trainer.launch.plan import ProcessSpec
        from grpo_trainer.launch.supervisor import Supervisor
        with Supervisor(Path({str(tmp_path)!r}), str, str) as supervisor:
            child = supervisor.start(ProcessSpec("env", (sys.executable, "-c", {SLEEPER!r})))
            print(child.pid, flush=True)
            supervisor.run([])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert alive([child])
        supervisor.kill()
    wait_for("the child's end", lambda: not alive([child]), tmp_path / "env.log", 60)


def test_supervisor_leaves_what_the_kernel_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Process(spec("trainer", SLEEPER), tmp_path / "trainer.log")
    held = mock.Mock(side_effect=subprocess.TimeoutExpired("trainer", math.inf))
    with monkeypatch.context() as patched:
        patched.setattr(child.popen, "wait", held)
        child.kill()
    assert f"process {child.pid}" in child.last_words()
    child.end(1.0)


def test_process_keeps_its_number_until_it_is_killed_and_ends_nothing_that_has_it_afterwards(tmp_path: Path) -> None:
    """A process in its group, which it leaves behind, is ended."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid)"
    child = Process(spec("env", code), tmp_path / "env.log")
    wait_for("its end", lambda: child.exit_code is not None, child.log_path, 60)
    assert child.exit_code == 0 and psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    wait_for("its line", lambda: child.progress.isdecimal(), child.log_path, 60)
    left = int(child.progress)
    child.terminate()
    assert alive([left]) and child.exit_code == 0
    child.kill()
    wait_for("the end of what it left", lambda: not alive([left]), child.log_path, 60)
    assert child.exit_code == 0 and not psutil.pid_exists(child.pid)
    another = subprocess.Popen(["sleep", "300"], start_new_session=True)
    child.pid = child.popen.pid = another.pid
    try:
        child.end(1.0)
        with pytest.raises(subprocess.TimeoutExpired):
            another.wait(1.0)
    finally:
        another.kill()
        another.wait()


# what processes say --------------------------------------------------------------------------------------------


def test_supervisor_shows_notices_at_once_and_waits_for_a_server_once_it_is_there(tmp_path: Path) -> None:
    ready, shown = tmp_path / "ready", tmp_path / "shown"
    talks = f"""
        log.info("server, 1", extra=NOTICE | WAITS)
        log.warning("careful")
        log.info("proved", extra=NOTICE)
        log.info("idle")
        print("WARNING of a library", file=sys.stderr)
        until({str(ready)!r})
        log.warning("server, 2", extra=WAITS)
        until({str(shown)!r}, "server, 2")
        log.error("last")
    """
    supervisor = Recorded(tmp_path, show=lambda: shown.write_text(str(supervisor.said)))
    server = served(f"until({str(shown)!r}, 'proved')\n")
    with once(lambda: any("ready after" in line for line in supervisor.said), ready.touch), supervisor:
        supervisor.run([[server, speaking(tmp_path, "trainer", talks, ends_run=True)]])
    told = [line for line in supervisor.said if line.startswith("trainer: ")][1:]
    assert told == [f"trainer: {line}" for line in ("WARNING careful", "proved", "WARNING server, 2", "ERROR last")]


def test_supervisor_shows_part_of_a_stack(tmp_path: Path) -> None:
    code = """
        from grpo_common.text import Lines
        stack = Lines("\\n".join(f'  File "{n}.py" ' + "x" * 1000 for n in range(100)))
        log.warning("code_\\nx:\\n%s", stack)
    """
    with Recorded(tmp_path) as supervisor:
        supervisor.run([[speaking(tmp_path, "env-slow", code, ends_run=True)]])
    notice, *shown = [line.removeprefix("env-slow: ") for line in supervisor.said[1:]]
    assert notice == rf"WARNING code_\nx: (in {tmp_path / 'logs' / 'env-slow.log'})"
    assert [line[:12] for line in shown] == [f'  File "{n}.py"'[:12] for n in range(LINES - 1)]
    assert max(map(len, shown)) < 300


def test_supervisor_shows_foreign_text_cut_and_without_control_characters(tmp_path: Path) -> None:
    hostile = r"""
        for number in range(40):
            log.warning("\x1b]0;title\x07" + "x" * 100_000)
            print("\x1b[2J\rStep" + "y" * 3000, file=sys.stderr)
        sys.exit(1)
    """
    with pytest.raises(ProcessFailedError) as error, Recorded(tmp_path) as supervisor:
        supervisor.run([[speaking(tmp_path, "env-bad", hostile)]])
    shown = "\n".join([*supervisor.said, *supervisor.echoed, str(error.value)])
    assert "\x1b" not in shown and "\\x1b]0;title" in shown
    assert len(shown) < 50_000 and "more characters" in shown
    notices = [line for line in supervisor.said if "WARNING" in line]
    assert len(notices) < 2 * BURST and all("99," in line for line in notices)
    log = (tmp_path / "logs" / "env-bad.log").read_text()
    assert log.count("x" * 100_000) == 40 and "\x1b" not in log


def test_supervisor_shows_a_foreign_status_file_as_text(tmp_path: Path) -> None:
    """A process may write anything there; a broken file is none."""
    path = tmp_path / "status" / "env.json"
    notice = {"number": 1, "text": "\x1b[2J" + "x" * 10_000 + "\n\x07" + "\n" * 10_000}
    content = json.dumps({"notices": [notice]}).encode()
    code = f"import os, pathlib; pathlib.Path(os.environ['GRPO_STATUS']).write_bytes({content!r})"
    with Recorded(tmp_path) as supervisor:
        supervisor.run([[spec("env", code, env={status.VARIABLE: str(path)}, ends_run=True)]])
    said = supervisor.said
    assert r"\x1b[2J" in said[1] and "\x1b" not in str(said[1:]) and max(map(len, said)) < 1000
    assert len(said) < 2 * LINES
    for broken in (b"", b"{", b"[]", b'{"phase": 7}', b"\xff", b"[" * 100_000, b'{"format": 2}'):
        assert parse(broken) is None


def test_supervisor_believes_no_status_file_of_another_process(tmp_path: Path) -> None:
    """One of an earlier run may be ending, and write the file of the same name."""
    path = tmp_path / "status" / "trainer.json"
    old = Process(spec("trainer", SLEEPER, env={status.VARIABLE: str(path)}), tmp_path / "trainer.log")
    content = {"phase": TRAINED, "notices": [{"number": 5, "text": "old"}]}
    for pid, phase in ((old.pid + 1, ""), (old.pid, TRAINED)):
        path.write_text(json.dumps({**content, "pid": pid}))
        heard = old.hear()
        assert len(heard) == bool(phase) and old.status.phase == phase
    assert heard[0].missed == 4, "notices that left the file before it was read"
    old.end(1.0)


def test_command_error_with_foreign_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli._fail(ProcessFailedError("one\x1b[2J\ntwo", field="--env bad"))
    assert capsys.readouterr().err == "grpo: --env bad: one\\x1b[2J\ntwo\n"


def test_status_notices_are_a_burst_and_then_one_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, path = [100.0], tmp_path / "status.json"
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    monkeypatch.setenv(status.VARIABLE, str(path))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    StatusWriter().open()
    seen: dict[int, int] = {}

    def missed(at: float, records: int) -> list[int]:
        """Of the notices that are written then, each with those before it that were not."""
        now[0], before = at, len(seen)
        for _ in range(records):
            logging.getLogger().warning("x")
            if path.exists() and (found := parse(path.read_bytes())) is not None:
                seen.update({notice.number: notice.missed for notice in found.notices})
        return [seen[number] for number in sorted(seen)][before:]

    assert missed(100.0, 12) == [0] * 10
    assert missed(104.9, 1) == [] and missed(105.2, 1) == [3]
    assert missed(106.0, 1) == []
    assert missed(1000.0, 11) == [1] + [0] * 9


@pytest.mark.parametrize(
    ("code", "phase", "error"),
    [
        ("if os.fork() == 0: OWN.update(phase='forked'); os._exit(0)\nos.wait()", "mine", ""),
        ("log.warning('%d', 'no number')", "mine", "no number"),
        ("path.parent.rename('a'); OWN.update(phase='b'); path.parent.mkdir(); OWN.update(phase='b')", "b", ""),
    ],
    ids=["fork", "wrong arguments", "lost write"],
)
def test_status_of_a_process(tmp_path: Path, code: str, phase: str, error: str) -> None:
    """A fork writes nothing, wrong arguments raise nothing, and a lost write is made again."""
    path = tmp_path / "status" / "env.json"
    path.parent.mkdir()
    begins = f"import os, pathlib{SAYS}path = pathlib.Path({str(path)!r})\nOWN.update(phase='mine')\n"
    env = {**os.environ, status.VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", begins + code]
    done = subprocess.run(command, env=env, cwd=tmp_path, check=True, capture_output=True, text=True)
    found = parse(path.read_bytes())
    assert error in done.stderr and found is not None and (found.phase, found.notices) == (phase, ())
