"""The virtual environment in which environments of the `verifiers` library run.

`verifiers` pins versions (of mcp, openai and others) that an inference server beside it may refuse, so it has a virtual
environment of its own; this package is linked into it, of which it needs the light parts only (no torch, no vLLM).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from environments.config import ConfigError

VERSION: Final = "0.4.0"
REQUIREMENTS: Final = (
    f"verifiers=={VERSION}",
    "uv",  # verifiers prepares the programs of its harnesses with it
    "msgspec>=0.19",
    "pydantic-settings>=2.9",
)
LINKED: Final = ("environments", "vllm_server")
FOLDER_VARIABLE: Final = "GRPO_VERIFIERS_VENV"
_READY: Final = "grpo-ready"


def folder() -> Path:
    """Where the virtual environment is: `$GRPO_VERIFIERS_VENV`, or in the user's cache."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "grpo" / f"verifiers-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def install(extra: Sequence[str] = ()) -> Path:
    """Makes the virtual environment, or adds to it; `extra` goes to pip: the packages of environments, say.

    Raises:
        ConfigError: pip could not install it.
    """
    place = folder()
    wanted = [*extra] if _is_ready(place) else [*REQUIREMENTS, *extra]
    if not _python(place).exists():
        venv.create(place, with_pip=True)
    if wanted:
        done = subprocess.run([str(_python(place)), "-m", "pip", "install", "--quiet", *wanted], check=False)
        if done.returncode:
            raise ConfigError(f"pip install {' '.join(wanted)}: failed with status {done.returncode}; see above")
    _link(place)
    (place / _READY).write_text(VERSION + "\n")
    return place


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Goes on in the virtual environment, as `python -m MODULE ARGUMENTS`.

    Raises:
        ConfigError: It is not there.
    """
    place = folder()
    if not _is_ready(place):
        raise ConfigError(
            f"verifiers {VERSION} is not installed in {place}; `grpo env verifiers install` does it, once, in a minute"
        )
    _link(place)  # of this very package, wherever it lies now
    path = os.pathsep.join([str(place / "bin"), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execve(
        _python(place),
        [str(_python(place)), "-m", module, *arguments],
        {**os.environ, "PATH": path, "VIRTUAL_ENV": str(place)},
    )


def _python(place: Path) -> Path:
    return place / "bin" / "python"


def _is_ready(place: Path) -> bool:
    return (place / _READY).is_file() and (place / _READY).read_text().strip() == VERSION


def _link(place: Path) -> None:
    (site,) = place.glob("lib/python*/site-packages")
    for name in LINKED:
        link, target = site / name, Path(__file__).parents[2] / name
        if link.is_symlink() and link.readlink() == target:
            continue
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            shutil.rmtree(link)
        link.symlink_to(target)
