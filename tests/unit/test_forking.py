"""The process that engines are forked from, with a module of a few lines in the place of vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import ROOT, alive, family, wait_for
from vllm_server import forking

MODULE = """
import os, signal, sys, time
from vllm_server import forking
started_with = dict(os.environ)
importer = os.getpid()
unfit = ""
forking.end_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)

class Reader:
    "Reads the environment when it is unpickled."
    def __setstate__(self, state):
        self.seen = os.environ.get("LATER")

def worker_methods():
    "Without and with cores for each worker."
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-1"
    forking.allow_forked_workers()
    found = [os.environ.get(forking.METHOD_VARIABLE)]
    del os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    forking.allow_forked_workers()
    return [*found, os.environ.get(forking.METHOD_VARIABLE)]

def tell(answers, reader):
    answers.send({
        "later": os.environ.get("LATER"), "gone": os.environ.get("GONE"), "unpickled": reader.seen,
        "getenv": os.popen("echo $LATER").read().strip(), "forked": importer == os.getppid() != os.getpid(),
        "hears Ctrl-C": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "workers": worker_methods(),
    })
"""
THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name="left behind", daemon=True).start()
unfit = forking.spoiled()
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


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != forking.METHOD_VARIABLE}
    return {**kept, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_WAIT_POLICY": "passive", **more}


def run(folder: Path, then: str, module: str = MODULE, **more: str) -> subprocess.CompletedProcess[str]:
    command = script(folder, then, module)
    env = environment(folder, **more)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)


def test_what_is_forked_has_the_environment_of_that_moment_before_its_arguments_are_unpickled(tmp_path: Path) -> None:
    done = run(tmp_path, ASK)
    said, exit_code = done.stdout.splitlines() or [done.stderr, ""]
    assert eval(said) == {  # printed by the script above
        "later": "set since", "gone": None, "unpickled": "set since", "getenv": "set since", "forked": True,
        "hears Ctrl-C": True, "workers": [None, "fork"],
    }  # fmt: skip
    assert (exit_code, done.returncode) == ("0", 0)


def test_an_engine_that_was_not_forked_leaves_its_workers_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forking.METHOD_VARIABLE, "spawn")
    forking.allow_forked_workers()
    assert os.environ[forking.METHOD_VARIABLE] == "spawn"


@pytest.mark.parametrize(
    ("module", "then", "reason"),
    [
        (MODULE.replace('unfit = ""', 'unfit = "CUDA"'), "", ": CUDA"),
        (MODULE + THREAD, "", "left behind"),
        (MODULE, 'os.environ["OMP_PROC_BIND"] = "true"', ": OMP_PROC_BIND "),
        (MODULE, 'os.environ.pop("OMP_WAIT_POLICY")', ": OMP_WAIT_POLICY "),
        (MODULE, 'os.environ["LD_PRELOAD"] = "/nowhere/lib.so"', "/nowhere/lib.so"),
        ("import nothing_of_that_name", "", ": standing_in "),
        ("import os; os._exit(3)", "", "Error("),
    ],
)
def test_nothing_is_forked_from_a_process_that_is_not_fit(tmp_path: Path, module: str, then: str, reason: str) -> None:
    log = "import logging; logging.basicConfig(format='%(name)s %(levelname)s %(message)s')"
    done = run(tmp_path, f"{log}\n{then}\nprint(forking.context())", module)
    assert done.stdout.strip() == "None"
    assert f"{forking.logger.name} WARNING " in done.stderr and reason in done.stderr


@pytest.mark.parametrize("variable", [forking.METHOD_VARIABLE, "VLLM_ENABLE_CUDA_COMPATIBILITY"])
def test_whoever_wants_the_engine_started_otherwise_gets_it(tmp_path: Path, variable: str) -> None:
    pid = "from multiprocessing import forkserver\nprint(forkserver._forkserver._forkserver_pid)"
    done = run(tmp_path, f"print(forking.context())\n{pid}", **{variable: "1"})
    assert done.stdout.split() == ["None", "None"] and done.stderr == ""


@pytest.mark.parametrize("moment", ["importing", "waiting"])
def test_it_ends_with_the_server_even_in_the_midst_of_its_imports(tmp_path: Path, moment: str) -> None:
    wait = "\ntime.sleep(600)" if moment == "importing" else ""
    module = f"{MODULE}\nprint('imported', flush=True){wait}"
    command, log = script(tmp_path, "import time; time.sleep(600)", module), tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, env=environment(tmp_path), stdout=output) as server:
        wait_for("the imports", lambda: "imported" in log.read_text(), log, 30)
        started = list(family(server.pid))
        assert len(alive(started)) >= 1
        os.kill(server.pid, signal.SIGKILL)
    wait_for("all have ended", lambda: not alive(started), log, 20)


def test_imports_are_silent_and_what_comes_after_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", flush=True)
    with forking.silence():
        os.write(1, b"said")
        os.system("echo shouted >&2")
    print("after", flush=True)
    assert capfd.readouterr() == ("before\nafter\n", "")
