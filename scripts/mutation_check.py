"""Plant known faults one at a time, and check that the tests notice each of them.

    python scripts/mutation_check.py                               all faults of the default lane
    python scripts/mutation_check.py --lane complete               those that only a real server notices
    python scripts/mutation_check.py --room fence --name caches    of one room; with "caches" in their name
    python scripts/mutation_check.py --list                        print the faults, and run nothing

scripts/mutations.toml has the faults: each replaces one text in one file, and names the tests that should fail then.
Faults are planted in a copy of the repository in a temporary folder, so the working tree never changes.
The exit status is 0 if every selected fault is caught, 1 if one is not, and 2 if the tests fail without a fault.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from grpo_common.processes import kill_group

LIBC = ctypes.CDLL(None)
ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("mutations.toml")

BROKEN = re.compile(
    r'(collection failure|(failed on \w+ with ")?(Syntax|Indentation|Import|ModuleNotFound|Name|UnboundLocal)Error\b)'
)
"""Begins the message of a failure that any test would show: such a fault says nothing about the behaviour it names."""

END_S = 20.0
"""Seconds for pytest to stop the processes of its tests after Ctrl-C, before it is killed."""

Outcome = Literal["caught", "NOT CAUGHT", "not planted", "bad fault"]


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        room: the part of the program.
        name: the behaviour that breaks.
        file: path in the repository.
        old, new: `old` occurs exactly once in the file, and is replaced by `new`.
        tests: paths or node ids of the tests that should notice.
        lane: "complete" if only tests of the complete lane notice.
    """

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    lane: Literal["default", "complete"] = "default"

    def planted_in(self, root: Path) -> str | None:
        """Return the file's text with the fault; None: the old text does not occur exactly once."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


class Row(NamedTuple):
    """The outcome of one fault. `by`: the first test that failed, or why there is none."""

    room: str
    fault: str
    outcome: Outcome
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.room:15} {self.outcome:11} {self.seconds:4.0f} s  {self.fault}  [{self.by}]"


class Result(NamedTuple):
    """One run of pytest. `status` None: it took too long. `failed`, `message`: the first failure, or empty."""

    status: int | None
    failed: str
    message: str
    output: str


def read_faults() -> list[Fault]:
    """Return the faults of the table, in its order."""
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in tomllib.loads(TABLE.read_text())["fault"]]


class Copies:
    """Copies of the repository, one for each job, in which tests run with and without faults.

    Args:
        folder: an empty folder for the copies.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self._copies = [folder / str(job) / "repository" for job in range(jobs)]
        self._free: Queue[Path] = Queue()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():  # git also lists files that were deleted and not committed yet
                target = self._copies[0] / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)

    def baseline(self, tests: Sequence[str], lane: str) -> Result:
        """Run tests without a fault. This also writes the bytecode that later runs read."""
        return self._pytest(self._copies[0], tests, lane, limit=3600.0)

    def open(self) -> None:
        """Make the other copies; `check` may be called then."""
        for copy in self._copies[1:]:
            shutil.copytree(self._copies[0], copy, symlinks=True)
        for copy in self._copies:
            self._free.put(copy)

    def check(self, fault: Fault, limit: float) -> Row:
        """Plant a fault in a free copy, and run its tests.

        Args:
            limit: most seconds; a fault with which the tests hang longer is caught, too.
        """
        copy, started = self._free.get(), time.monotonic()
        try:
            outcome, by = self._outcome(fault, copy, limit)
        finally:
            self._free.put(copy)
        return Row(fault.room, fault.name, outcome, by, round(time.monotonic() - started, 1))

    def _outcome(self, fault: Fault, copy: Path, limit: float) -> tuple[Outcome, str]:
        if (planted := fault.planted_in(copy)) is None:
            return "not planted", f"{fault.file}: the code has changed; plant it at its successor"
        try:
            ast.parse(planted)
        except SyntaxError as error:
            return "bad fault", str(error)
        path = copy / fault.file
        original, times = path.read_bytes(), path.stat()
        try:
            path.write_text(planted)
            os.utime(path, (times.st_atime, times.st_mtime + 10))  # so that the original's bytecode is not read
            result = self._pytest(copy, fault.tests, fault.lane, limit, "-x")
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if result.status is None:
            return "caught", f"no end within {limit:.0f} s"
        if result.status == 0:
            return "NOT CAUGHT", ", ".join(fault.tests)
        if not result.failed or BROKEN.match(result.message):
            return "bad fault", f"{result.failed}: {result.message or result.output[-300:]}"
        return "caught", result.failed

    def _pytest(self, copy: Path, tests: Sequence[str], lane: str, limit: float, *flags: str) -> Result:
        report, log = copy.with_name("report.xml"), copy.with_name("output.txt")
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *flags]
        command += [f"--junitxml={report}", f"--basetemp={copy.with_name('temporary')}"]
        command += ["-m", "not gpu" if lane == "complete" else "not complete and not gpu", *tests]
        env = {**os.environ, "PYTHONPATH": str(copy)}
        if flags:
            env["PYTHONDONTWRITEBYTECODE"] = "1"  # a fault's bytecode must not outlive it
        if len(self._copies) > 1:  # tests/conftest.py then gives each job its own ports
            env |= {"PYTEST_XDIST_WORKER": f"gw{copy.parent.name}", "PYTEST_XDIST_WORKER_COUNT": str(len(self._copies))}
        with log.open("wb") as output, self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            pytest = subprocess.Popen(
                command,
                cwd=copy,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            self._running.add(pytest)
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = pytest.wait(limit)
        finally:
            _end(pytest)
            self._running.discard(pytest)
        return Result(status, *_first_failure(report), log.read_text(errors="replace"))

    def stop(self) -> None:
        """End the running tests, and start no others."""
        with self._lock:
            self._stopped = True
        for pytest in list(self._running):
            _end(pytest)


def _end(pytest: subprocess.Popen[bytes]) -> None:
    """End a pytest as Ctrl-C does, so that it stops the processes of its tests; then kill what is left of its group."""
    try:
        if pytest.poll() is None:
            pytest.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                pytest.wait(END_S)
    finally:  # also if this program is interrupted again
        kill_group(pytest)
        pytest.wait()


def _end_with_parent() -> None:
    """Have the kernel interrupt this pytest when the thread that started it ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's job in the background ignores it
    LIBC.prctl(1, signal.SIGINT)  # 1: PR_SET_PDEATHSIG


def _first_failure(report: Path) -> tuple[str, str]:
    """Return the name and the message of the first test that failed, from pytest's report; empty: there is none."""
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        for problem in (*case.findall("failure"), *case.findall("error")):
            module = case.get("classname", "").rpartition(".")[2]
            return f"{module}::{case.get('name')}".removeprefix("::"), problem.get("message", "")
    return "", ""


def check_all(copies: Copies, faults: Sequence[Fault], jobs: int, limit: float, rows: list[Row]) -> int:
    """Check the faults, and print and collect their rows; return the exit status."""
    for lane in sorted({each.lane for each in faults}):
        tests = dict.fromkeys(test for each in faults if each.lane == lane for test in each.tests)
        result = copies.baseline([*tests], lane)
        if result.status != 0:
            print(f"{result.output[-4000:]}\nThe tests fail without a fault; nothing was checked.", file=sys.stderr)
            return 2
    copies.open()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(copies.check, each, limit) for each in faults]):
                rows.append(done.result())
                print(rows[-1], flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            copies.stop()
            raise
    caught = sum(row.outcome == "caught" for row in rows)
    print(f"{caught} of {len(faults)} faults caught")
    return int(caught < len(faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=("default", "complete", "all"), default="default")
    parser.add_argument("--room", action="append", help="only faults of this room; may be repeated")
    parser.add_argument("--name", action="append", help="only faults with this text in their name; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the selected faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults to check at the same time (default: 1)")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of a fault's tests (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file as well")
    given = parser.parse_args()
    faults = [each for each in read_faults() if given.lane in (each.lane, "all")]
    faults = [each for each in faults if not given.room or each.room in given.room]
    faults = [each for each in faults if not given.name or any(part in each.name for part in given.name)]
    if not faults:
        parser.error("no fault is selected; see --list --lane all")
    if given.list:
        print(*(f"{each.room:15} {each.lane:9} {each.name}  [{', '.join(each.tests)}]" for each in faults), sep="\n")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="grpo-mutations-", ignore_cleanup_errors=True) as folder:
        try:
            return check_all(Copies(Path(folder), given.jobs), faults, given.jobs, given.limit, rows)
        except KeyboardInterrupt:
            return 130
        finally:
            if given.json:
                given.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
