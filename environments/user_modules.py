"""Import users' modules: by name, or by the path of a file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from environments.config import ConfigError
from grpo_common.suggest import OF_FILES, did_you_mean, nearest


def import_file(path: Path) -> ModuleType:
    """Return the module of a file, which may import from its folder. A file is imported once.

    It has the file's name, so that processes which the user's code starts can import it, too, unless another module has
    that name.
    """
    path = path.resolve()
    known, number = path.stem, 0
    while (there := sys.modules.get(known)) is not None:
        if getattr(there, "__file__", None) == str(path):
            return there
        number += 1
        known = f"user_{path.stem}_{number}"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module


def module_of_file(field: str, where: str) -> ModuleType:
    """Return the module of a file that a setting names.

    Raises:
        ConfigError: There is no such file, or it can't be imported.
    """
    path = Path(where).expanduser()
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = nearest(path.name, (each.name for each in folder.glob("*.py")), OF_FILES)
        fix = f"did you mean {folder / near}?" if near else f"correct the path; it is relative to {Path.cwd()}"
        raise ConfigError("no such file", field=field, got=where, wanted="a Python file", fix=fix)
    return _imported(field, partial(import_file, path))


def module_named(field: str, where: str) -> ModuleType:
    """Return the module of a name.

    Raises:
        ConfigError: There is no such module, or it can't be imported.
    """
    found = _imported(field, partial(_spec_of, where))
    if found is None:
        file = Path(*where.split(".")).with_suffix(".py")
        fix = f"did you mean {file}:{field.rpartition(':')[2]}?" if file.is_file() else "correct it, or name a FILE.py"
        raise ConfigError("no such module", field=field, got=where, wanted="a module", fix=fix)
    return _imported(field, partial(importlib.import_module, where))


def _spec_of(where: str) -> ModuleSpec | None:
    """Return where a module is; None if it, or a package that it is in, does not exist."""
    try:
        return importlib.util.find_spec(where)  # it imports the packages
    except ModuleNotFoundError as error:
        if error.name and f"{where}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # a module such as __main__
        return None


def _imported(field: str, load: Callable[[], Any]) -> Any:
    """Run an import.

    Raises:
        ConfigError: The user's code raised an error; the message has its file and line.
    """
    try:
        return load()
    except Exception as error:  # any error of the user's module, at import, is for the user to mend
        if isinstance(error, SyntaxError):
            place = f"{error.filename}, line {error.lineno}"
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
            place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "its import"
        raise ConfigError(
            "can't be imported", field=field, got=f"{type(error).__name__}: {error}", fix=f"correct {place}"
        ) from error


def function_of(field: str, module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function of a module.

    Raises:
        ConfigError: There is none of this name.
    """
    found = getattr(module, name, None)
    if callable(found):
        return found
    there = [each for each, value in vars(module).items() if inspect.isfunction(value) and not each.startswith("_")]
    raise ConfigError(
        "no such function" if found is None else "not a function",
        field=field,
        got=name,
        wanted=f"one of {', '.join(there)}" if there else "a function",
        fix=did_you_mean(name, there),
    )
