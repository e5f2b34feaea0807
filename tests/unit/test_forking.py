"""The process that engines are forked from, with a module of a few lines in the place of vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import ROOT, alive, assert_ended, family, wait_for
from vllm_server import forking

MODULE = """
import os, signal, sys, time
from grpo_common.processes import end_with_parent
from vllm_server import forking
started_with = dict(os.environ)
importer = os.getpid()
unfit = ""
end_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)

class Reader:
    "Reads the environment when it is unpickled."
    def __setstate__(self, state):
        self.seen = os.environ.get("LATER")

def tell(answers, reader):
    answers.send({
        "later": os.environ.get("LATER"), "gone": os.environ.get("GONE"), "unpickled": reader.seen,
        "getenv": os.popen("echo $LATER").read().strip(), "forked": importer == os.getppid() != os.getpid(),
        "hears Ctrl-C": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "known": forking._forked,
    })
"""
SCRIPT = """
import os, sys
from vllm_server import forking

def main():
    os.environ["GONE"] = "here when it started"
    forking.start("standing_in")
    os.environ["LATER"] = "set since"
    del os.environ["GONE"]
    # What may change: threads are set again, and scikit-learn sets the others when it is imported.
    os.environ.update(OMP_NUM_THREADS="1", KMP_DUPLICATE_LIB_OK="True", KMP_INIT_AT_FORK="FALSE")
    {then}

if __name__ == "__main__":
    main()
"""
ASK = """
    import standing_in
    context = forking.context()
    ours, theirs = context.Pipe(duplex=False)
    reader = standing_in.Reader()
    reader.filled = 1
    process = context.Process(target=standing_in.tell, args=(theirs, reader))
    process.start()
    print(ours.recv())
    process.join()
    print(process.exitcode)
"""


def script(folder: Path, then: str, module: str = MODULE) -> list[str]:
    (folder / "standing_in.py").write_text(module)
    (folder / "script.py").write_text(SCRIPT.format(then=textwrap.dedent(then).strip().replace("\n", "\n    ")))
    return [sys.executable, str(folder / "script.py")]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != forking.METHOD_VARIABLE}
    return {**kept, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_WAIT_POLICY": "passive"}


def run(folder: Path, then: str, module: str = MODULE) -> subprocess.CompletedProcess[str]:
    command, env = script(folder, then, module), environment(folder)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)


def test_what_is_forked_has_the_environment_of_that_moment_before_its_arguments_are_unpickled(tmp_path: Path) -> None:
    done = run(tmp_path, ASK)
    said, exit_code = done.stdout.splitlines() or [done.stderr, ""]
    assert eval(said) == {  # printed by the script above
        "later": "set since", "gone": None, "unpickled": "set since", "getenv": "set since", "forked": True,
        "hears Ctrl-C": True, "known": True,
    }  # fmt: skip
    assert (exit_code, done.returncode) == ("0", 0)


@pytest.mark.parametrize(
    ("forked", "cores", "method"), [(True, "nobind", "fork"), (True, "0-1", "spawn"), (False, "nobind", "spawn")]
)
def test_workers_are_forked_from_an_engine_that_was_unless_each_has_its_cores(
    monkeypatch: pytest.MonkeyPatch, forked: bool, cores: str, method: str
) -> None:
    monkeypatch.setattr(forking, "_forked", forked)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
    monkeypatch.setenv(forking.METHOD_VARIABLE, "spawn")
    forking.allow_forked_workers()
    assert os.environ[forking.METHOD_VARIABLE] == method


@pytest.mark.parametrize(
    ("unfit", "change", "reason"),
    [
        ("", {"OMP_NUM_THREADS": "7", "KMP_INIT_AT_FORK": "FALSE", "LATER": "1"}, ""),
        ("CUDA", {}, "CUDA"),
        (None, {}, "standing_in "),  # it could not be imported
        ("", {"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND "),
        ("", {"OMP_WAIT_POLICY": None}, "OMP_WAIT_POLICY "),
        ("", {"LD_PRELOAD": "/nowhere/lib.so"}, "/nowhere/lib.so"),
    ],
)
def test_a_process_with_the_imports_says_why_it_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, unfit: str | None, change: dict[str, str | None], reason: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    module = SimpleNamespace(started_with=dict(os.environ), unfit=unfit)
    monkeypatch.setitem(sys.modules, "standing_in", None if unfit is None else module)  # type: ignore[arg-type]
    for name, value in change.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    said: list[str] = []
    forking._answer(SimpleNamespace(send=said.append), "standing_in")  # pyright: ignore
    assert reason in said[0] and bool(said[0]) == bool(reason)


def test_a_process_whose_imports_left_a_thread_is_not_fit() -> None:
    end = threading.Event()
    left = threading.Thread(target=end.wait, name="left behind")
    left.start()
    try:
        assert "left behind" in forking.spoiled()
    finally:
        end.set()
        left.join()


def test_nothing_is_forked_from_a_process_that_has_ended(tmp_path: Path) -> None:
    log = "import logging; logging.basicConfig(format='%(name)s %(levelname)s %(message)s')"
    done = run(tmp_path, f"{log}\nprint(forking.context())", "import os; os._exit(3)")
    assert done.stdout.strip() == "None"
    assert f"{forking.logger.name} WARNING " in done.stderr and "Error(" in done.stderr


@pytest.mark.parametrize("variable", [forking.METHOD_VARIABLE, "VLLM_ENABLE_CUDA_COMPATIBILITY"])
def test_an_engine_that_must_be_started_otherwise_is(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(forking.forkserver, "ensure_running", lambda: pytest.fail("a process was started"))
    monkeypatch.setenv(variable, "1")
    forking.start("standing_in")
    assert forking.context() is None


def test_it_ends_with_the_server_even_in_the_midst_of_its_imports(tmp_path: Path) -> None:
    module = f"{MODULE}\nprint('imported', flush=True)\ntime.sleep(600)"
    command, log = script(tmp_path, "import time; time.sleep(600)", module), tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, env=environment(tmp_path), stdout=output) as server:
        wait_for("the imports", lambda: "imported" in log.read_text(), log, 30)
        started = list(family(server.pid))
        assert len(alive(started)) >= 1
        os.kill(server.pid, signal.SIGKILL)
    assert_ended(started, log)


def test_imports_are_silent_and_what_comes_after_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", flush=True)
    with forking.silence():
        os.write(1, b"said")
        os.system("echo shouted >&2")
    print("after", flush=True)
    assert capfd.readouterr() == ("before\nafter\n", "")
