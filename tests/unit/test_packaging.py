"""What a wheel holds is what the folders hold."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = ("grpo_common", "grpo_trainer", "vllm_server", "environments")


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert folders and not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_every_other_file_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"].get("package-data", {})
    missing = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if not path.is_file() or path.suffix in (".py", ".pyc"):
                continue
            name = ".".join(path.parent.relative_to(ROOT).parts)
            if not any(fnmatch(path.name, pattern) for pattern in declared.get(name, ())):
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, "add them to [tool.setuptools.package-data]"


# the locks and pyproject.toml agree -------------------------------------------------------------------------


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILDS = ("cpu", "gpu")
PYTHONS = ("3.11", "3.12")


def pins(path: Path) -> dict[str, Version]:
    """The version of each package in a lock."""
    requirements = [Requirement(line) for line in path.read_text().splitlines()]
    found = {}
    for requirement in requirements:
        (exact,) = requirement.specifier
        assert exact.operator == "==" and not requirement.marker, requirement
        found[canonicalize_name(requirement.name)] = Version(exact.version)
    assert len(found) == len(requirements)
    return found


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_locked_within_its_bounds(build: str, python: str) -> None:
    locked = pins(ROOT / "locks" / f"{build}-py{python.replace('.', '')}.txt")
    chosen = [list_ for name, list_ in PROJECT["optional-dependencies"].items() if name == build or name not in BUILDS]
    wanted = [Requirement(text) for texts in (PROJECT["dependencies"], *chosen) for text in texts]
    requirements = [one for one in wanted if not one.marker or one.marker.evaluate({"python_version": python})]
    assert len(requirements) > 20
    missing = [str(one) for one in requirements if canonicalize_name(one.name) not in locked]
    outside = [
        (str(one), str(locked[canonicalize_name(one.name)]))
        for one in requirements
        if canonicalize_name(one.name) in locked and locked[canonicalize_name(one.name)] not in one.specifier
    ]
    assert not missing and not outside, "run scripts/lock.sh"


def test_cpu_locks_hold_nothing_that_is_left_out_of_the_installation() -> None:
    lines = (ROOT / "locks" / "cpu-excludes.txt").read_text().splitlines()
    left_out = {line for line in lines if not line.startswith("#")}
    assert left_out
    for python in PYTHONS:
        assert not left_out & pins(ROOT / "locks" / f"cpu-py{python.replace('.', '')}.txt").keys()
