"""`python -m environments NAME COMMAND …`: run an environment by the name of its module, or by its file.

The module needs no line that runs it: its one class of `BaseEnv` is found. `NAME:CLASS` chooses one of several.
`grpo run` and `grpo env` start users' environments this way.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from environments.base import BaseEnv
from environments.config import ConfigError
from environments.running.cli import CALLED_AS
from environments.running.trial import fail_and_exit, report
from environments.user_modules import module_of


def environment_class(module: ModuleType, wanted: str = "") -> type[BaseEnv[Any, Any]]:
    """Return the class of `BaseEnv` that a module defines: the `wanted` one, or the only one that no other extends.

    Raise a ConfigError if there is none, or if there are several.
    """
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    classes = {kind.__name__: kind for kind in own if issubclass(kind, BaseEnv)}
    bases = {base for kind in classes.values() for base in kind.__mro__[1:]}
    found = {name: kind for name, kind in classes.items() if (name == wanted if wanted else kind not in bases)}
    if len(found) == 1:
        return next(iter(found.values()))
    file = Path(module.__file__ or module.__name__).name
    if found:
        got, wanted = f"{len(found)} classes of BaseEnv: {', '.join(found)}", "one"
        fix = f"name one: --env {file}:{next(iter(found))}"
    else:
        got = ", ".join(classes) or (f"classes {', '.join(kind.__name__ for kind in own)}" if own else "no class")
        wanted = f"the class {wanted}" if wanted else "a class of BaseEnv"
        fix = "derive a class from environments.base.BaseEnv"
        others = [kind.__name__ for kind in own if any("atropos" in base.__module__ for base in kind.__mro__)]
        if others:
            fix = f"{others[0]} is a class of Atropos: start it by python {shlex.quote(file)} serve, next to grpo api"
    raise ConfigError(field=f"--env {file}", got=got, wanted=wanted, fix=fix)


def main(arguments: list[str]) -> None:
    """Load the environment that the first argument names, and run its command."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m environments MODULE|FILE.py[:CLASS] COMMAND …", file=sys.stderr)
        sys.exit(2)
    given, *rest = arguments
    name, _, wanted = given.partition(":")
    called = os.environ.setdefault(CALLED_AS, f"grpo env {given}")
    sys.path.insert(0, "")  # like `python -m`, also where the interpreter was started in another way
    report().doing("import")
    sys.argv = [given, *rest]  # a module that runs itself when it is imported reads them
    try:
        env_cls = environment_class(module_of(f"--env {name}", name), wanted)
    except ConfigError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, SyntaxError):
            traceback.print_exception(error.__cause__)
        fail_and_exit(error, called)
    env_cls.cli()


if __name__ == "__main__":
    main(sys.argv[1:])
