"""Find what this server uses of vLLM's internals, and name what the installed vLLM does not have."""

import importlib
from types import ModuleType
from typing import Any

from vllm_server.errors import IncompatibleError
from vllm_server.protocol import VLLM_RUN


def seam(module: str, *names: str) -> ModuleType:
    """Return one of vLLM's modules; it must have all `names`.

    Raises:
        FatalError: the module does not exist, or a name is missing; the message names it.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "\0"):
            raise  # the module exists, but one of its imports does not
        raise moved(module) from error
    for name in names:
        if not hasattr(found, name):
            raise moved(f"{module}.{name}")
    return found


def found(module: str, name: str, *members: str) -> Any:
    """Return a class or function of one of vLLM's modules; a class must have all `members`.

    Raises:
        FatalError: it does not exist, or lacks a member; the message names that.
    """
    value = getattr(seam(module, name), name)
    for member in members:
        if not hasattr(value, member):
            raise moved(f"{name}.{member}")
    return value


def moved(symbol: str) -> IncompatibleError:
    """Return the error for a symbol that this vLLM does not have."""
    return IncompatibleError(
        f"has no {symbol}", field=f"vLLM {vllm_version()}", wanted=f"vLLM {VLLM_RUN}", fix="install it"
    )


def vllm_version() -> str:
    """Return vLLM's version from its module: the CPU build's distribution has another name in its metadata."""
    return importlib.import_module("vllm.version").__version__
