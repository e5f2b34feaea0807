"""Environments of the `verifiers` library: ``grpo env verifiers serve --env.env_id ID …``.

``grpo env verifiers install [PACKAGE …]`` creates their virtual environment, once. All other commands are those of
every environment and run in it. It is separate because `verifiers` pins versions (of mcp, openai and others) that may
conflict with an inference server's. The packages in `LINKED` are linked into it; only their light modules are needed
there (no torch, no vLLM).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from environments.config import ConfigError
from environments.running.cli import COMMANDS
from environments.running.trial import fail_and_exit

MODULE: Final = "environments.from_verifiers"
HELP: Final = {"-h", "--help"}
VERSION: Final = "0.4.0"
REQUIREMENTS: Final = (
    f"verifiers=={VERSION}",
    "uv",  # verifiers prepares the programs of its harnesses with it
    "aiohttp>=3.12,<4",
    "msgspec>=0.19",
    "pydantic>=2.11",
)
LINKED: Final = ("environments", "grpo_common", "vllm_server")
FOLDER_VARIABLE: Final = "GRPO_VERIFIERS_VENV"
READY: Final = "grpo-ready"
"""File in the virtual environment with the version that was installed to the end."""


def folder() -> Path:
    """Return the virtual environment's folder: `$GRPO_VERIFIERS_VENV`, or one in the user's cache."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "grpo" / f"verifiers-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def _is_ready(place: Path) -> bool:
    return (place / READY).is_file() and (place / READY).read_text().strip() == VERSION


def install(extra: Sequence[str] = ()) -> Path:
    """Create the virtual environment, or add `extra` packages to it; return its folder, or raise ConfigError."""
    place = folder()
    python, uv = place / "bin" / "python", place / "bin" / "uv"
    wanted = [*extra] if _is_ready(place) else [*REQUIREMENTS, *extra]
    if not python.exists():
        venv.create(place, with_pip=True)
    commands = [] if uv.exists() else [[python, "-m", "pip", "install", "--quiet", "uv"]]
    commands += [[uv, "pip", "install", "--quiet", "--python", python, *wanted]] if wanted else []
    for command in commands:
        if status := subprocess.run(command, check=False).returncode:
            said = " ".join(map(str, command[1:]))
            raise ConfigError(field=said, got=f"exit status {status}", fix="see its output above")
    link(place)
    (place / READY).write_text(VERSION + "\n")
    return place


def link(place: Path) -> None:
    """Link the packages of `LINKED` into the virtual environment, from their current place."""
    (site,) = place.glob("lib/python*/site-packages")
    for name in LINKED:
        there, target = site / name, Path(__file__).parents[2] / name
        if there.is_dir() and not there.is_symlink():  # of an older way to install it
            shutil.rmtree(there)
        if not (there.is_symlink() and there.readlink() == target):
            there.unlink(missing_ok=True)
            there.symlink_to(target)


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m MODULE ARGUMENTS` in the virtual environment; raise ConfigError if none is."""
    place = folder()
    if not _is_ready(place):
        raise ConfigError(
            f"is not installed in {place}",
            field=f"verifiers {VERSION}",
            fix="run `grpo env verifiers install` once; it takes a minute",
        )
    link(place)  # this package may have moved since
    path = os.pathsep.join([str(place / "bin"), os.environ.get("PATH", os.defpath)])
    python = str(place / "bin" / "python")
    sys.stdout.flush()
    os.execve(python, [python, "-m", module, *arguments], {**os.environ, "PATH": path, "VIRTUAL_ENV": str(place)})


def usage() -> str:
    commands = {"install": f"install verifiers {VERSION} and PACKAGEs into {folder()}", **COMMANDS}
    lines = "\n".join(f"  {name:<10}{text}" for name, text in commands.items())
    return f"""usage: grpo env verifiers install [PACKAGE …]
       grpo env verifiers COMMAND --env.env_id ID [--env.… …] [--openai.… …] [--config FILE.toml]

Environments of the `verifiers` library, in a separate virtual environment.

{lines}

Options of a command, after verifiers is installed: grpo env verifiers serve --help"""


def main(arguments: list[str]) -> None:
    """Print help, install, or run the environment in its virtual environment."""
    command = arguments[0] if arguments else ""
    if command in ("", *HELP) or (command == "install" and HELP & {*arguments}):
        print(usage())
        sys.exit(0 if arguments else 2)
    try:
        if command == "install":
            print(f"verifiers {VERSION} is installed in {install(arguments[1:])}")
            return
        if find_spec("verifiers") is None:
            become(MODULE, arguments)
    except ConfigError as error:
        fail_and_exit(error, "grpo env verifiers")
    from environments.from_verifiers.env import VerifiersEnv

    VerifiersEnv.cli()


if __name__ == "__main__":
    main(sys.argv[1:])
