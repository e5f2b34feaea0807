"""Parts of the user's own, named as `MODULE:NAME`: a loss, an estimate of advantages."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from grpo_trainer.errors import ConfigError

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Return whether a name stands for a part of the user's own rather than a built-in one."""
    return ":" in name


def check(path: str) -> None:
    """Raise a `ConfigError` if a path is not well-formed, or its module's package can't be found; import neither."""
    package = path.partition(":")[0].partition(".")[0]
    if not FORM.fullmatch(path):
        raise ConfigError(got=path, wanted="MODULE:NAME", fix="for example my_losses:my_loss")
    if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
        raise ConfigError(
            got=f"no module {package} in {Path.cwd()} or on the import path",
            wanted="a module that can be imported",
            fix="start in the folder that has it, or install it",
        )


@cache
def load(path: str, field: str) -> Any:
    """Import the module of a path, which came by the flag `field`, and return what the path names.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{module_name} cannot be imported", field=field, got=str(error)) from error
    if not hasattr(module, name):
        raise ConfigError(field=field, got=f"{module.__file__} has no {name}", wanted="a name that the module defines")
    return getattr(module, name)
