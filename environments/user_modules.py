"""Import users' modules, by name or by the path of a file, and name the line of theirs that fails."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import FrameSummary
from types import ModuleType
from typing import Any, Final

from environments.config import ConfigError
from grpo_common.suggest import OF_FILES, did_you_mean, nearest

LIBRARIES: Final = tuple(
    str(Path(path).resolve())
    for path in (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), Path(__file__).parents[1])
)
"""Folders of code that is not the user's: Python, installed packages, and this package."""


def expanded(path: str) -> Path:
    """Return the path that a setting names. `~` is the user's home; an unknown `~name` stays as it is."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


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


def module_of(field: str, where: str) -> ModuleType:
    """Return the module that a setting names, a file that ends in `.py` or a module's name; or raise ConfigError."""
    if not where.endswith(".py"):
        return _module_named(field, where)
    path = expanded(where)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = nearest(path.name, (each.name for each in folder.glob("*.py")), OF_FILES)
        fix = f"did you mean {folder / near}?" if near else f"correct the path; it is relative to {Path.cwd()}"
        raise ConfigError("no such file", field=field, got=where, wanted="a Python file", fix=fix)
    try:
        return import_file(path)
    except Exception as error:
        raise user_code_failed(error, "import", field) from error


def _module_named(field: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not (missing and f"{where}.".startswith(f"{missing}.")):
            raise user_code_failed(error, "import", field) from error
    file = Path(*where.split(".")).with_suffix(".py")
    _, colon, name = field.rpartition(":")
    fix = f"did you mean {file}{colon}{name if colon else ''}?" if file.is_file() else "correct it, or name a FILE.py"
    raise ConfigError("no such module", field=field, got=where, wanted="a module", fix=fix)


def function_of(field: str, module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function of a module, or raise ConfigError."""
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


def users_frames(frames: Sequence[FrameSummary]) -> list[FrameSummary]:
    """Return the frames of the user's code: neither Python's, nor of an installed package, nor ours."""
    return [frame for frame in frames if _is_users(frame.filename)]


@cache
def _is_users(file: str) -> bool:
    return not file.startswith("<") and not any(Path(file).resolve().is_relative_to(each) for each in LIBRARIES)


def place(frame: FrameSummary) -> str:
    """Return FILE:LINE of a frame."""
    path = Path(frame.filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{frame.lineno}"


def user_code_failed(error: BaseException, step: str, field: str = "") -> ConfigError:
    """Return an error of the user's code, which failed in `step`, as one message with the file and the line.

    `field` is the setting that names the code.
    """
    if isinstance(error, SyntaxError):
        frames = [FrameSummary(error.filename or "", error.lineno or 0, "", line=error.text or "")]
        message = error.msg
    else:
        frames, message = list[FrameSummary](), str(error)
        cause: BaseException | None = error
        while cause is not None:  # it was raised from another one, whose line matters
            frames += traceback.extract_tb(cause.__traceback__)
            cause = cause.__cause__
    last = (users_frames(frames) or frames)[-1]
    line = f": {last.line.strip()[:120]}" if last.line and last.line.strip() else ""
    fix = "correct it there"
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        fix = "name the module by its package, such as --env my_envs.my_env, instead of the file"
    got = f"{type(error).__name__}: {message}"[:500]
    return ConfigError(f"{step} failed at {place(last)}{line}", field=field, got=got, fix=fix)
