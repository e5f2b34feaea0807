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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from grpo_trainer.phases import FIRST_STEP, IN_WORDS, STARTING, Wait, read_report
from grpo_trainer.phases import SERVER as WAITS_FOR_SERVER
from tests.processes import found_in, free_port, once, wait_for

SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("server up", flush=True)
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
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, "-c", SOURCE, "again"], start_new_session=True)
    print("child", child.pid, flush=True)
time.sleep(120)
"""
STUBBORN = f"SOURCE = {STUBBORN!r}\nexec(SOURCE)"
CHILD = r"^child (\d+)$"
"""What STUBBORN writes once SIGTERM does not end it and it has a child."""


def spec(name: str, code: str, *arguments: str, **options: object) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", textwrap.dedent(code), *arguments), **options)  # type: ignore[arg-type]


def speaking(folder: Path, name: str, code: str, *arguments: str, **options: object) -> ProcessSpec:
    """A process with a status file."""
    env = {status.VARIABLE: str(folder / "status" / f"{name}.json")}
    return spec(name, SAYS + UNTIL + textwrap.dedent(code), *arguments, env=env, **options)


class Recorder:
    """What a supervisor said and which processes it started."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.echoed: list[str] = []
        self.pids: list[int] = []


class Recorded(Supervisor):
    """A supervisor whose processes are remembered after it has ended them."""

    def __init__(self, log_folder: Path, recorder: Recorder, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(log_folder, recorder.said.append, recorder.echoed.append, check=check)
        self.recorder = recorder

    def start(self, spec: ProcessSpec) -> Process:
        child = super().start(spec)
        self.recorder.pids.append(child.pid)
        return child


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make(tmp_path: Path, recorder: Recorder) -> Callable[[], Supervisor]:
    return lambda: Recorded(tmp_path / "logs", recorder)


def runs(pid: int) -> bool:
    """Whether a process still does anything; one that waits for init to collect it does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(all_pids: list[int]) -> None:
    assert all_pids and not [pid for pid in all_pids if runs(pid)]


@contextmanager
def started_with(number: int, disposition: signal.Handlers) -> Iterator[None]:
    """As if the tests had been started with this disposition of a signal: `nohup` makes them ignore a hang-up."""
    before = signal.signal(number, disposition)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_runs_to_the_end_in_order_and_leaves_nothing(
    make: Callable[[], Supervisor], recorder: Recorder, tmp_path: Path
) -> None:
    port = free_port()
    server = spec("server", SERVER, str(port), ready_url=f"http://127.0.0.1:{port}/")
    check = f"""
        import sys, urllib.request
        print("Step 1", urllib.request.urlopen("http://127.0.0.1:{port}/").status)  # the stage before is ready
        print("noise", file=sys.stderr)
    """
    with make() as supervisor:
        supervisor.run([[server], [spec("trainer", check, ends_run=True), spec("env", SLEEPER)]])
    assert_gone(recorder.pids)
    assert recorder.echoed == ["Step 1 200"]
    assert any(line.startswith("server: ") and str(tmp_path / "logs" / "server.log") in line for line in recorder.said)
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert log.startswith("$ ") and "Step 1 200" in log and "noise" in log


def rollout_api(port: int, key: str, asked_with: str | None, seconds: float) -> ProcessSpec:
    """A real rollout API that wants a key, and the key that the supervisor has for it."""
    return ProcessSpec(
        name="api",
        argv=(sys.executable, "-m", "environments.api", "--port", str(port)),
        env={"ROLLOUT_API_KEY": key},
        ready_url=f"http://127.0.0.1:{port}/",
        ready_key=asked_with,
        ready_timeout=seconds,
        restarts="api",
    )


def test_supervisor_api_with_a_key_is_ready(make: Callable[[], Supervisor], recorder: Recorder) -> None:
    api = rollout_api(free_port(), "secret", "secret", seconds=60)
    with make() as supervisor:
        supervisor.run([[api], [spec("trainer", "print('Step 1')", ends_run=True)]])
    assert recorder.echoed == ["Step 1"]
    assert_gone(recorder.pids)


@pytest.mark.parametrize("asked_with", [None, "another"])
def test_supervisor_api_that_refuses_the_key_ends_the_run_at_once(
    make: Callable[[], Supervisor], recorder: Recorder, asked_with: str | None
) -> None:
    api = rollout_api(free_port(), "secret", asked_with, seconds=3600)
    with pytest.raises(ProcessFailedError) as error, make() as supervisor:
        supervisor.run([[api], [spec("trainer", SLEEPER, ends_run=True)]])
    assert error.value.field == "api" and "401" in error.value.got
    assert "secret" not in str(error.value) and "another" not in str(error.value)
    assert_gone(recorder.pids)


def test_processes_of_a_stage_start_together(
    make: Callable[[], Supervisor], recorder: Recorder, tmp_path: Path
) -> None:
    port, sign, ready = free_port(), tmp_path / "sign", tmp_path / "ready"
    patient = f"{UNTIL}until({str(sign)!r})\n{SERVER}"
    server = spec("server", patient, str(port), ready_url=f"http://127.0.0.1:{port}/")
    first = f"{UNTIL}pathlib.Path({str(sign)!r}).touch()\nuntil({str(ready)!r})"
    with once(lambda: any("ready after" in line for line in recorder.said), ready.touch), make() as supervisor:
        supervisor.run([[server, spec("trainer", first, ends_run=True)]])
    assert_gone(recorder.pids)
    named = [line.partition(":")[0] for line in recorder.said]
    assert named == ["server", "trainer", "server"], "both were started, the server became ready later"


def test_supervisor_shows_what_a_start_waits_for(tmp_path: Path) -> None:
    """And completes the report on it, which the trainer writes at its first trained step."""
    report, shown, loading = tmp_path / "start.json", tmp_path / "shown", tmp_path / "loading"
    report.write_text("of an earlier start")
    trainer = f"""
        OWN.update(phase={WAITS_FOR_SERVER!r}, since=time.time())
        pathlib.Path({str(loading)!r}).touch()
        until({str(shown)!r}, "ready after")
        OWN.update(phase="compile", since=time.time())
        until({str(shown)!r}, {IN_WORDS["compile"]!r})
        open({str(report)!r}, "w").write('{{"seconds": 5, "phases": {{"compile": 4}}}}')
        OWN.update(phase={TRAINED!r}, since=time.time())
        until({str(shown)!r}, "begun: True")
    """
    loads = f"""
        print("INFO loads\\n", flush=True)
        until({str(shown)!r}, "INFO loads")
        until({str(loading)!r})
    """
    port, said, seen = free_port(), list[str](), list[Wait]()

    def show() -> None:
        seen.extend(supervisor.waits)
        shown.write_text(f"{said} {seen} begun: {supervisor.begun}")

    server = spec("server", UNTIL + textwrap.dedent(loads) + SERVER, str(port), ready_url=f"http://127.0.0.1:{port}/")
    train = speaking(tmp_path, "trainer", trainer, ends_run=True)
    supervisor = Supervisor(tmp_path, said.append, said.append, show=show, report=report)
    with supervisor:
        assert not report.exists()
        supervisor.run([[server, train]])
    assert Wait("server", STARTING, 0, "INFO loads") in {replace(wait, seconds=0) for wait in seen}
    found = {wait.what for wait in seen if wait.name == "trainer"} - {STARTING}  # before it has said anything
    assert found == {IN_WORDS["compile"]}, "its wait for the server is that server's"
    assert max(wait.seconds for wait in seen) < 60
    assert supervisor.begun and not supervisor.waits
    known = read_report(report)
    assert known is not None and known.phases == {"compile": 4} and known.servers.keys() == {"server"}


def test_a_trainer_that_starts_its_server_itself_waits_for_it(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    waits = f"""
        OWN.update(phase={WAITS_FOR_SERVER!r}, since=time.time())
        until({str(shown)!r}, {IN_WORDS[WAITS_FOR_SERVER]!r})
    """
    said, seen = list[str](), list[Wait]()

    def show() -> None:
        seen.extend(supervisor.waits)
        shown.write_text(str(seen))

    supervisor = Supervisor(tmp_path, said.append, said.append, show=show)
    with supervisor:
        supervisor.run([[speaking(tmp_path, "trainer", waits, ends_run=True)]])
    assert {(wait.what, wait.logged) for wait in seen} >= {(IN_WORDS[WAITS_FOR_SERVER], True)}


def test_a_trainer_before_its_first_step_has_little_time_to_end(make: Callable[[], Supervisor], tmp_path: Path) -> None:
    says = """
        for phase in sys.argv[1:]:
            OWN.update(phase=phase, since=time.time())
        time.sleep(60)
    """

    def started(name: str, *phases: str, **options: object) -> Process:
        child = supervisor.start(speaking(tmp_path, name, says, *phases, **options))
        wait_for(
            "it says so", lambda: child.hear() == [] and child.status.phase == "".join(phases[-1:]), child.log_path
        )
        return child

    with make() as supervisor:
        children = [
            started("a", "compile", ends_run=True, stop_seconds=120),
            started("b", "compile", FIRST_STEP, ends_run=True, stop_seconds=120),
            started("c", FIRST_STEP, TRAINED, ends_run=True, stop_seconds=120),
            started("d", stop_seconds=3),
        ]
        assert [child.stop_seconds for child in children] == [START_STOP_SECONDS, 120, 120, 3]
        assert [child.may_save for child in children] == [False, True, True, False]


def test_notices_are_shown_at_once_and_waits_for_a_server_once_it_is_there(tmp_path: Path) -> None:
    port, said, ready, shown = free_port(), list[str](), tmp_path / "ready", tmp_path / "shown"
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

    def show() -> None:
        shown.write_text(str(said))

    patient = f"{UNTIL}until({str(shown)!r}, 'proved')\n{SERVER}"
    server = spec("server", patient, str(port), ready_url=f"http://127.0.0.1:{port}/")
    with (
        once(lambda: any("ready after" in line for line in said), ready.touch),
        Supervisor(tmp_path, said.append, said.append, show=show) as supervisor,
    ):
        supervisor.run([[server, speaking(tmp_path, "trainer", talks, ends_run=True)]])
    told = [line for line in said if line.startswith("trainer: ")][1:]
    assert told == [f"trainer: {line}" for line in ("WARNING careful", "proved", "WARNING server, 2", "ERROR last")]


@pytest.mark.parametrize(
    ("name", "code", "may_end", "got", "last"),
    [
        ("env", f"import sys; print({LAST!r}, file=sys.stderr); sys.exit(3)", True, "exit code 3", LAST),
        ("api", "pass", False, "exit code 0", ""),
    ],
)
def test_supervisor_process_that_fails_stops_the_run_with_its_last_lines(
    make: Callable[[], Supervisor], recorder: Recorder, name: str, code: str, may_end: bool, got: str, last: str
) -> None:
    with pytest.raises(ProcessFailedError) as error, make() as supervisor:
        supervisor.run([[spec("trainer", SLEEPER, ends_run=True), spec(name, code, may_end=may_end)]])
    assert (error.value.field, error.value.got) == (name, got)
    assert last in error.value.fix and f"logs/{name}.log" in error.value.fix
    assert_gone(recorder.pids)


def test_the_cause_is_shown_though_much_was_said_after_it(make: Callable[[], Supervisor]) -> None:
    code = """
        import sys
        print("(Engine) ERROR [core.py] ValueError: no float32")
        for i in range(100): print("  traceback line", i)
        print("RuntimeError: failed")
        sys.exit(1)
    """
    with pytest.raises(ProcessFailedError) as error, make() as supervisor:
        supervisor.run([[spec("server", code)]])
    said = str(error.value)
    assert said.index("  ValueError: no float32\n") < said.index("traceback line 99")
    assert said.count("RuntimeError: failed") == 1


def test_a_killed_process_is_named_with_its_signal_before_its_victims(make: Callable[[], Supervisor]) -> None:
    victim = "import os, sys, time\nwhile os.path.exists(f'/proc/{sys.argv[1]}'): time.sleep(0.01)\nsys.exit('lost it')"
    with pytest.raises(ProcessFailedError) as error, make() as supervisor:
        server = supervisor.start(spec("server", SLEEPER))
        threading.Timer(0.5, os.kill, (server.pid, signal.SIGKILL)).start()
        supervisor.run([[spec("trainer", victim, str(server.pid), ends_run=True)]])
    assert error.value.field == "server" and "SIGKILL" in error.value.got


def test_a_reader_that_went_away_does_not_stop_the_run(tmp_path: Path) -> None:
    def closed(_: str) -> None:
        raise BrokenPipeError

    chatty = "for i in range(20000): print('Step', i)"  # more than a pipe holds: unread, it would block the trainer
    with Supervisor(tmp_path, closed, closed) as supervisor:
        supervisor.run([[spec("trainer", chatty, ends_run=True)]])
    assert "Step 19999" in (tmp_path / "trainer.log").read_text()


def test_a_second_signal_kills_at_once(
    make: Callable[[], Supervisor], recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ONCE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "SHUTDOWN_SECONDS", 100.0)
    patient = spec("trainer", STUBBORN, ends_run=True, stop_seconds=60)
    log, interrupt = tmp_path / "logs" / "trainer.log", partial(os.kill, os.getpid(), signal.SIGINT)
    with (
        once(lambda: found_in(log, CHILD) is not None, interrupt),
        once(lambda: any(line.startswith("stopping") for line in recorder.said), interrupt) as again,
        pytest.raises(StoppedError),
        make() as supervisor,
    ):
        supervisor.run([[patient]])
    assert time.monotonic() - again[0] < 60  # less than what one signal would have allowed
    assert_gone(recorder.pids)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_is_sent_twice_at_once_leaves_time_to_save(
    make: Callable[[], Supervisor], number: int, tmp_path: Path
) -> None:
    """As a closed terminal and `timeout` send it."""
    saves = """
        import os, signal, sys, time
        def send():
            os.kill(os.getppid(), int(sys.argv[1]))
        def save(*_):
            send()
            time.sleep(0.5)
            print("saved", flush=True)
            sys.exit(1)
        signal.signal(signal.SIGTERM, save)
        send()
        time.sleep(60)
    """
    trainer = spec("trainer", saves, str(int(number)), ends_run=True, stop_seconds=5)
    with started_with(number, signal.SIG_DFL), pytest.raises(StoppedError), make() as supervisor:
        supervisor.run([[trainer]])
    assert "saved" in (tmp_path / "logs" / "trainer.log").read_text().splitlines()


def test_what_ends_the_run_is_raised_before_the_processes_that_it_ended(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    folder = FolderGoneError(field="--run-dir")

    def check() -> None:
        if gone.exists():
            raise folder

    recorder = Recorder()
    code = f"import pathlib, sys; pathlib.Path({str(gone)!r}).touch(); sys.exit(1)"
    with pytest.raises(FolderGoneError) as error, Recorded(tmp_path / "logs", recorder, check) as supervisor:
        supervisor.run([[spec("api", code), spec("trainer", SLEEPER, ends_run=True)]])
    assert error.value is folder
    assert_gone(recorder.pids)


def test_supervisor_shows_the_first_lines_of_a_stack_and_the_log_that_has_the_rest(
    make: Callable[[], Supervisor], recorder: Recorder, tmp_path: Path
) -> None:
    code = """
        from grpo_common.text import Lines
        stack = Lines("\\n".join(f'  File "{n}.py" ' + "x" * 1000 for n in range(100)))
        log.warning("code_\\nx:\\n%s", stack)
    """
    with make() as supervisor:
        supervisor.run([[speaking(tmp_path, "env-slow", code, ends_run=True)]])
    notice, *shown = [line.removeprefix("env-slow: ") for line in recorder.said[1:]]
    assert notice == rf"WARNING code_\nx: (in {tmp_path / 'logs' / 'env-slow.log'})"
    assert [line[:12] for line in shown] == [f'  File "{n}.py"'[:12] for n in range(LINES - 1)]
    assert max(map(len, shown)) < 300


@pytest.mark.parametrize("fetched", [False, True], ids=["starves", "gets its last batch"])
def test_a_trainer_that_waits_when_no_environment_is_left_ends_the_run(
    make: Callable[[], Supervisor], recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: bool
) -> None:
    monkeypatch.setattr(supervisor_module, "PATIENCE_SECONDS", 6.0 if fetched else 1.0)
    ended = tmp_path / "ended"
    waits = f"""
        OWN.update(lacks_batch=True)
        until({str(ended)!r})
        if {fetched}:
            OWN.update(lacks_batch=False)
            time.sleep(7)
            sys.exit(0)
        time.sleep(120)
    """
    last = spec("env-b", f"print({LAST!r})", may_end=True)
    trainer = speaking(tmp_path, "trainer", waits, ends_run=True)
    stages = [[spec("env-a", "pass", may_end=True), last, trainer]]
    with once(lambda: sum("has ended" in line for line in recorder.said) == 2, ended.touch):
        if fetched:
            with make() as supervisor:
                supervisor.run(stages)
        else:
            with pytest.raises(ProcessFailedError) as error, make() as supervisor:
                supervisor.run(stages)
            assert (error.value.field, error.value.got) == ("env-b", "exit code 0")
            assert LAST in error.value.fix and "logs/env-b.log" in error.value.fix
    assert_gone(recorder.pids)


def test_an_environment_may_end_before_the_trainer(make: Callable[[], Supervisor]) -> None:
    with make() as supervisor:
        supervisor.run(
            [[spec("env", "pass", may_end=True), spec("trainer", "import time; time.sleep(1)", ends_run=True)]]
        )


def test_one_that_is_never_ready_is_told_with_what_it_said_last(make: Callable[[], Supervisor]) -> None:
    slow = spec("server", SLEEPER, ready_url=f"http://127.0.0.1:{free_port()}/", ready_timeout=1.5)
    with pytest.raises(ProcessFailedError) as error, make() as supervisor:
        server = supervisor.start(slow)
        log = server.log_path
        wait_for("its last words", lambda: found_in(log, "^asleep$") is not None, log)  # its time may be up by then
        supervisor.run([])
    assert error.value.field == "server" and str(slow.ready_url) in error.value.got
    assert "2 s" in error.value.wanted and "asleep" in error.value.fix


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_child_and_grandchild_within_ten_seconds(
    make: Callable[[], Supervisor], recorder: Recorder, number: signal.Signals, tmp_path: Path
) -> None:
    stubborn = spec("trainer", STUBBORN, ends_run=True, stop_seconds=0.5)
    log, stop = tmp_path / "logs" / "trainer.log", partial(os.kill, os.getpid(), number)
    with (
        once(lambda: found_in(log, CHILD) is not None, stop) as sent,
        pytest.raises(StoppedError) as error,
        make() as supervisor,
    ):
        supervisor.run([[spec("env", SLEEPER), stubborn]])
    assert time.monotonic() - sent[0] < SHUTDOWN_SECONDS + 0.5  # what is promised to users, not a benchmark
    assert error.value.exit_code == 128 + number
    assert [line for line in recorder.said if number.name in line] == recorder.said[-1:]
    grandchild = found_in(log, CHILD)
    assert grandchild
    assert_gone([*recorder.pids, int(grandchild[1])])


@pytest.mark.parametrize("by_nohup", [False, True])
def test_a_closed_terminal_ends_the_run_unless_nohup_started_it(make: Callable[[], Supervisor], by_nohup: bool) -> None:
    code = f"import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep({0.5 if by_nohup else 60})"
    with started_with(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL), make() as supervisor:
        if by_nohup:
            supervisor.run([[spec("trainer", code, ends_run=True)]])
        else:
            with pytest.raises(StoppedError):
                supervisor.run([[spec("trainer", code, ends_run=True)]])


def test_an_orphan_of_a_process_ends_with_it(make: Callable[[], Supervisor], tmp_path: Path) -> None:
    """Its parent, which the process started, has ended: only their process group still connects the two."""
    orphan = "import subprocess; subprocess.run(['sh', '-c', 'sleep 120 & echo orphan $!'])"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {orphan!r}])\nsys.exit(1)"
    with pytest.raises(ProcessFailedError), make() as supervisor:
        supervisor.run([[spec("env", code)]])
    found = found_in(tmp_path / "logs" / "env.log", r"^orphan (\d+)$")
    assert found
    wait_for("the orphan's end", lambda: not runs(int(found[1])), tmp_path / "logs" / "env.log", 10)


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
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
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert psutil.pid_exists(child)
        supervisor.kill()
    deadline = time.monotonic() + 10
    while runs(child):
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.05)


def test_a_full_disk_under_the_logs_stops_the_run(small_disk: Path, recorder: Recorder) -> None:
    chatty = "import time\nwhile True: print('x' * 1000, flush=True); time.sleep(0.001)"
    with pytest.raises(DiskFullError) as error, Recorded(small_disk / "logs", recorder) as supervisor:
        supervisor.run([[spec("env", chatty)]])
    assert error.value.field == str(small_disk / "logs" / "env.log")
    assert_gone(recorder.pids)


def test_supervisor_shows_foreign_text_cut_and_without_control_characters(
    make: Callable[[], Supervisor], recorder: Recorder, tmp_path: Path
) -> None:
    hostile = r"""
        for number in range(200):
            log.warning("\x1b]0;title\x07" + "x" * 300_000)
            print("\x1b[2J\rStep" + "y" * 3000, file=sys.stderr)
        sys.exit(1)
    """
    with pytest.raises(ProcessFailedError) as error, make() as supervisor:
        supervisor.run([[speaking(tmp_path, "env-bad", hostile)]])
    shown = "\n".join([*recorder.said, *recorder.echoed, str(error.value)])
    assert "\x1b" not in shown and "\\x1b]0;title" in shown
    assert len(shown) < 50_000 and "more characters" in shown
    notices = [line for line in recorder.said if "WARNING" in line]
    assert len(notices) < 2 * BURST and all("299," in line for line in notices)
    log = (tmp_path / "logs" / "env-bad.log").read_text()
    assert log.count("x" * 300_000) == 200 and "\x1b" not in log


def test_a_foreign_status_file_is_shown_as_text_and_a_broken_one_is_none(tmp_path: Path) -> None:
    """A process may write anything there."""
    said = list[str]()
    path = tmp_path / "status" / "env.json"
    notice = {"number": 1, "text": "\x1b[2J" + "x" * 10_000 + "\n\x07" + "\n" * 10_000}
    content = json.dumps({"notices": [notice]}).encode()
    code = f"import os, pathlib; pathlib.Path(os.environ['GRPO_STATUS']).write_bytes({content!r})"
    with Supervisor(tmp_path, said.append, said.append) as supervisor:
        supervisor.run([[spec("env", code, env={status.VARIABLE: str(path)}, ends_run=True)]])
    assert r"\x1b[2J" in said[1] and "\x1b" not in str(said[1:]) and max(map(len, said)) < 1000
    assert len(said) < 2 * LINES
    for broken in (b"", b"{", b"[]", b'{"phase": 7}', b"\xff", b"[" * 100_000, b'{"format": 2}'):
        assert parse(broken) is None


def test_a_command_shows_an_error_with_foreign_text_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli._fail(ProcessFailedError("one\x1b[2J\ntwo", field="--env bad"))
    assert capsys.readouterr().err == "grpo: --env bad: one\\x1b[2J\ntwo\n"


def test_notices_are_a_burst_and_then_one_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, path = [100.0], tmp_path / "status.json"
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    monkeypatch.setenv(status.VARIABLE, str(path))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    StatusWriter().open()

    def missed(at: float, records: int) -> list[int]:
        """Of the notices that are written then, each with those before it that were not."""
        now[0] = at
        before = len(counts())
        for _ in range(records):
            logging.getLogger().warning("x")
        return counts()[before:]

    def counts() -> list[int]:
        if path.exists() and (found := parse(path.read_bytes())) is not None:
            seen.update({notice.number: notice.missed for notice in found.notices})
        return [seen[number] for number in sorted(seen)]

    seen: dict[int, int] = {}
    assert missed(100.0, 12) == [0] * 10
    assert missed(104.9, 1) == [] and missed(105.2, 1) == [3]
    assert missed(106.0, 1) == []
    assert missed(1000.0, 11) == [1] + [0] * 9


def test_a_fork_writes_nothing_into_the_status_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    code = "import os\nOWN.update(phase='mine')\nif os.fork() == 0: OWN.update(phase='forked'); os._exit(0)\nos.wait()"
    subprocess.run([sys.executable, "-c", SAYS + code], env={**os.environ, status.VARIABLE: str(path)}, check=True)
    found = parse(path.read_bytes())
    assert found is not None and found.phase == "mine"


def test_a_record_with_wrong_arguments_raises_nothing_and_a_lost_write_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "status" / "env.json"
    code = """
log.warning("%d", "no number")
OWN.update(phase="step")
pathlib.Path(sys.argv[1]).parent.mkdir()
OWN.update(phase="step")
"""
    env = {**os.environ, status.VARIABLE: str(path)}
    done = subprocess.run(
        [sys.executable, "-c", "import pathlib" + SAYS + code, str(path)],
        env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = parse(path.read_bytes())
    assert "no number" in done.stderr and found is not None and (found.phase, found.notices) == ("step", ())


def test_a_status_file_of_another_process_is_not_believed(tmp_path: Path) -> None:
    """One of an earlier run may be ending, and write the file of the same name."""
    path = tmp_path / "status" / "trainer.json"
    code = "import sys; sys.stdin.read()"
    old = Process(spec("trainer", code, env={status.VARIABLE: str(path)}), tmp_path / "trainer.log")
    content = {"phase": TRAINED, "notices": [{"number": 5, "text": "old"}]}
    for pid, phase in ((old.pid + 1, ""), (old.pid, TRAINED)):
        path.write_text(json.dumps({**content, "pid": pid}))
        heard = old.hear()
        assert len(heard) == bool(phase) and old.status.phase == phase
    assert heard[0].missed == 4, "notices that left the file before it was read"
    old.end(1.0)


def test_a_killed_process_that_the_kernel_holds_does_not_hold_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Process(spec("trainer", SLEEPER), tmp_path / "trainer.log")

    def held(timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("trainer", timeout or math.inf)

    with monkeypatch.context() as patched:
        patched.setattr(child.popen, "wait", held)
        child.kill()
    assert f"process {child.pid}" in child.last_words()
    child.end(1.0)


def test_log_begins_again_when_it_is_large(
    make: Callable[[], Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOG_CHARACTERS", 5_000)
    talks = "for number in range(300): print(f'line {number:4}', 'x' * 30)"
    with make() as supervisor:
        supervisor.run([[spec("trainer", talks, ends_run=True)]])
    logs = tmp_path / "logs"
    newest = (logs / "trainer.log").read_text()
    before = (logs / "trainer.log.1").read_text()
    assert max(len(newest), len(before)) <= 5_000
    assert newest.splitlines()[-1].split()[:2] == ["line", "299"]
    lines = (before + newest).splitlines()
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    assert numbers == list(range(numbers[0], 300))
