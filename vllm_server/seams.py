"""Find what this server uses of vLLM's internals, by capability: versions have the same things in different modules."""

import importlib
from types import ModuleType
from typing import Any

from vllm_server.errors import IncompatibleError


def seam(modules: tuple[str, ...], *names: str) -> ModuleType:
    """Return the first of `modules` that exists; it must have all `names`.

    Raises:
        FatalError: none exists, or a name is missing; the message names it.
    """
    for module_name in modules:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not module_name.startswith(error.name or "\0"):
                raise  # the module exists, but one of its imports does not
            continue
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise moved(f"{module_name}.{missing[0]}")
        return module
    raise moved(" or ".join(modules))


def found(module: str, name: str, *members: str) -> Any:
    """Return a class or function of one of vLLM's modules; a class must have all `members`.

    Raises:
        FatalError: it does not exist, or lacks a member; the message names that.
    """
    value = getattr(seam((module,), name), name)
    for member in members:
        if not hasattr(value, member):
            raise moved(f"{name}.{member}")
    return value


def moved(symbol: str) -> IncompatibleError:
    """Return the error for a symbol that this vLLM does not have."""
    return IncompatibleError(
        f"has no {symbol}", field=f"vLLM {vllm_version()}", wanted="vLLM 0.25 to 0.33", fix="install one of them"
    )


def vllm_version() -> str:
    """Return vLLM's version from its module: the CPU build's distribution has another name in its metadata."""
    return importlib.import_module("vllm.version").__version__
