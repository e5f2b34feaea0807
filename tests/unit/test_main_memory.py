"""Main memory within control groups of both versions, whose files are written here."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from grpo_trainer.main_memory import MainMemory, main_memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = type("Memory", (), {"total": 64 * GIB, "available": 48 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)


def write(root: Path, path: str, content: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{content}\n")


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert main_memory(tmp_path) == MainMemory(64 * GIB, 48 * GIB)


def test_a_containers_share_is_less_what_it_holds_but_for_what_can_be_let_go(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", 8 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory.current", 5 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory.stat", f"anon {3 * GIB}\ninactive_file {2 * GIB}")
    assert main_memory(tmp_path) == MainMemory(8 * GIB, 5 * GIB)  # 8 - (5 - 2)


def test_the_narrowest_of_the_groups_in_each_other_bounds(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/box/job")
    write(tmp_path, "sys/fs/cgroup/box/job/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/box/memory.max", 16 * GIB)
    write(tmp_path, "sys/fs/cgroup/box/memory.current", 15 * GIB)
    assert main_memory(tmp_path) == MainMemory(16 * GIB, GIB)


def test_version_1_has_other_names_and_no_limit_is_a_large_number(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:cpu,cpuacct:/box\n4:memory:/box")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(tmp_path, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", 4 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", 3 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory/box/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}")
    assert main_memory(tmp_path) == MainMemory(4 * GIB, 2 * GIB)


def test_a_path_of_the_machine_that_the_container_does_not_see_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/docker-1.scope")
    write(tmp_path, "sys/fs/cgroup/memory.max", 2 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory.current", 3 * GIB)
    assert main_memory(tmp_path) == MainMemory(2 * GIB, 0)
