"""The faults of scripts/mutations.toml: each can be planted, and its tests are there. The program that plants them."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import ROOT, load_script

mutation_check = load_script("mutation_check")
FAULTS = mutation_check.read_faults()


def test_mutations_occur_exactly_once() -> None:
    """If this fails, the code of a fault has changed: plant the fault at its successor (CONTRIBUTING.md)."""
    assert not [(each.file, each.old) for each in FAULTS if each.planted_in(ROOT) is None]


def test_mutations_leave_valid_python_that_differs() -> None:
    originals = {file: ast.dump(ast.parse((ROOT / file).read_text())) for file in {each.file for each in FAULTS}}
    for each in FAULTS:
        if (planted := each.planted_in(ROOT)) is not None:
            assert ast.dump(ast.parse(planted)) != originals[each.file], each.name


def test_mutations_name_tests_that_exist() -> None:
    named = [(each, *test.partition("::")[::2]) for each in FAULTS for test in each.tests]
    assert not [path for _, path, _ in named if not (ROOT / path).is_file()]
    assert not [
        name for _, path, name in named if name and f"def {name.partition('[')[0]}(" not in (ROOT / path).read_text()
    ]
    # A fault of the default lane is noticed by the default lane.
    assert {
        path
        for each, path, _ in named
        if each.lane == "default" and not path.startswith(("tests/unit", "tests/contract"))
    } == set()


def test_mutations_cover_every_room() -> None:
    rooms = Counter(each.room for each in FAULTS)
    assert len(FAULTS) >= 60 and len({each.name for each in FAULTS}) == len(FAULTS)
    assert min(rooms.values()) >= 2, rooms


@pytest.mark.complete
def test_mutation_check_tells_outcomes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "sums.py").write_text("LIMIT = 3\n\n\ndef total(a, b):\n    return a + b\n")
    (root / "test_sums.py").write_text(
        "import sums\n\n\ndef test_total():\n    assert sums.total(1, 2) == sums.LIMIT\n"
    )
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    complete\n    gpu\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(mutation_check, "ROOT", root)
    copies = mutation_check.Copies(tmp_path / "copies", 1)
    assert copies.baseline(["test_sums.py"], "default").status == 0
    copies.open()
    found = {}
    for old, new in [
        ("a + b", "a - b"),
        ("a + b", "b + a"),
        ("a + c", "a - c"),
        ("a + b", "a +"),
        ("return a + b", "while True: pass"),
    ]:
        fault = mutation_check.Fault("room", "name", "sums.py", old, new, ("test_sums.py",))
        row = copies.check(fault, 8.0 if "while" in new else 200.0)
        found[new] = row.outcome
        assert (row.by == "test_sums::test_total") == (new == "a - b")
    assert found == {
        "a - b": "caught",
        "b + a": "NOT CAUGHT",
        "a - c": "not planted",
        "a +": "bad fault",
        "while True: pass": "caught",
    }
    assert (tmp_path / "copies/0/repository/sums.py").read_bytes() == (root / "sums.py").read_bytes()


@pytest.mark.parametrize(
    ("message", "broken"),
    [
        ("NameError: name 'd' is not defined", True),
        ("ImportError: cannot import name", True),
        ('failed on setup with "ModuleNotFoundError: No module', True),
        ("assert 3 == 4", False),
        ("ValueError: SyntaxError", False),
    ],
)
def test_mutation_check_knows_what_any_test_would_show(message: str, broken: bool) -> None:
    assert bool(mutation_check.BROKEN.match(message)) is broken


STARTS_TESTS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import mutation_check
mutation_check.ROOT = Path(sys.argv[2])
mutation_check.Copies(Path(sys.argv[3]), 1).baseline(["test_slow.py"], "default")
"""


def test_mutation_check_leaves_no_pytest_when_it_is_killed(tmp_path: Path) -> None:
    root, note = tmp_path / "root", tmp_path / "pid"
    root.mkdir()
    work = f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    (root / "test_slow.py").write_text(f"import os, time\n\ndef test():\n    {work}\n")
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    complete\n    gpu\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    words = [str(Path(mutation_check.__file__).parent), str(root), str(tmp_path / "copies")]
    with subprocess.Popen([sys.executable, "-c", STARTS_TESTS, *words]) as checking:
        while not (note.exists() and note.read_text().endswith(" ")):
            assert checking.poll() is None
            time.sleep(0.05)
        checking.kill()
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        tests = psutil.Process(int(note.read_text()))
        while tests.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_tests_that_have_ended_end_no_process_that_has_got_their_number() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    another = subprocess.Popen(["sleep", "300"], start_new_session=True)
    ended.pid = another.pid
    try:
        mutation_check._end(ended)
        with pytest.raises(subprocess.TimeoutExpired):
            another.wait(1.0)
    finally:
        another.kill()
        another.wait()
