"""Where a model's name points: to a folder of this machine, to the hub's cache, or to a folder that is not there."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_common.errors import Problem
from grpo_common.suggest import OF_FILES, nearest

CONFIG_FILE = "config.json"
LISTED = 6
"""A message lists at most this many models."""
WANTED = "the folder of a saved model, or a name on the hub such as Qwen/Qwen2.5-0.5B-Instruct"


def config_parts(config: object) -> list[Mapping[str, Any]]:
    """Return what a config.json says: its table, and the one of its text model; what is no table is left out."""
    if not isinstance(config, Mapping):
        return []
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def is_path(name: str) -> bool:
    """Return whether a name can't be one of the hub's, which have one slash at most."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def find_folder(name: str) -> Path | None:
    """Return the folder of a model: its own, or the one in the hub's cache; None: it would have to be downloaded."""
    if Path(name).is_dir():
        return Path(name)
    if is_path(name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, CONFIG_FILE)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def from_anywhere(name: str, folders: Iterable[Path] = ()) -> str:
    """Return a model's name so that it means the same in every folder: a folder's whole path, or the hub's name.

    A relative path that does not start in the current folder may start in one of `folders`.
    """
    found = next((folder / name for folder in (Path(), *folders) if (folder / name).is_dir()), None)
    return name if found is None else str(found.resolve())


def missing_path(name: str) -> Problem | None:
    """Return what is wrong with a model's name that is meant as a path where no folder is; None: nothing is.

    `runs/model` could be a name on the hub as well. It is a path when the folder `runs` is here, or when a model's
    folder of nearly this name is, such as `run/model`.
    """
    path = Path(name)
    if path.is_dir() or (not path.exists() and find_folder(name) is not None):
        return None
    near = nearest_folder(path)
    first_is_here = "/" in name and Path(path.parts[0]).is_dir()
    if not (is_path(name) or path.exists() or first_is_here or (near / CONFIG_FILE).is_file()):
        return None
    if name.startswith("~"):
        fix = "write ~ first and unquoted, so that the shell replaces it"
    elif (near / CONFIG_FILE).is_file():
        fix = f"did you mean {near}?"
    else:
        found = models_below(near)
        fix = f"correct the path; the nearest folder that is there: {near.resolve() if near == Path() else near}"
        fix += f", which holds the models {', '.join(map(str, found))}" if found else ""
    if first_is_here and not is_path(name):
        fix += f" (for a model of the hub: hf download {shlex.quote(name)})"
    return Problem(got=name, wanted=WANTED, fix=fix, summary="this is a file" if path.exists() else "no such folder")


def models_below(folder: Path) -> list[Path]:
    """Return the folders of models in a folder, two levels down at most; no more than `LISTED`."""
    found = (path.parent for pattern in (f"*/{CONFIG_FILE}", f"*/*/{CONFIG_FILE}") for path in folder.glob(pattern))
    return sorted(found)[:LISTED]


def nearest_folder(path: Path) -> Path:
    """Return the existing folder that is most like a path: each part that is missing is replaced by the one of the
    nearest name in the same folder; where there is none, the path ends."""
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if (found / part).is_dir():
            found /= part
            continue
        try:
            names = [folder.name for folder in found.iterdir() if folder.is_dir()]
        except OSError:
            break
        near = nearest(part, names, OF_FILES)
        if near is None:
            break
        found /= near
    return found
