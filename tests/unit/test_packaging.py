"""What a wheel holds is what the folders hold."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

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
