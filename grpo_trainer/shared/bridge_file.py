"""Read `vllm_bridge_config.json`, and refuse it unless it is of a running server of this user and machine.

A file of mode 0600 that this user owns is trusted: only a server of this user can have written it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import psutil

from grpo_common.errors import Problem
from grpo_trainer.errors import BridgeError
from vllm_server.protocol import machine_id
from vllm_server.protocol.bridge_config import FILE_NAME, SCHEMA_VERSION, BridgeConfigFile, CudaIpcHandle, Handle

CLOCK_SLACK_S: Final = 2.0
"""Tolerance in comparing start times of processes, which are rounded, with file times, which are of another clock."""

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes that can be trained. Torch's own table is not used, so that this file needs no torch."""


class _Versioned(msgspec.Struct):
    schema_version: int


def read_bridge_config(path: Path, rank: int = 0, ranks: int = 1) -> BridgeConfigFile:
    """Read the file, or the one in the folder.

    The caller must compare `boot_id` with that of `/bridge/info`, to exclude a file from before a server's restart. If
    the weights are sharded over `ranks` trainer processes, the server has as many workers; this process shares those of
    worker `rank`.

    Raises:
        BridgeError: the file is not usable.
    """
    path = path / FILE_NAME if path.is_dir() else path
    data, written = _read_private(path)
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version != SCHEMA_VERSION:
            raise BridgeError(
                "server and trainer are of different releases",
                field=f"{path}: schema_version",
                got=version,
                wanted=str(SCHEMA_VERSION),
                fix="install one release for both",
            )
        config = msgspec.json.decode(data, type=BridgeConfigFile)
    except msgspec.DecodeError as error:
        raise BridgeError("damaged", field=str(path), got=error, fix="start the server again") from None
    if (problem := _problem(config, written, ranks)) is not None:
        raise BridgeError.of([replace(problem, field=f"{path}: {problem.field}")])
    return config.of_rank(rank)


def _read_private(path: Path) -> tuple[bytes, float]:
    """Return content and modification time of a file that this user owns and no other user may read."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise BridgeError(
            field=f"--vllm-config-path {path}", got=error.strerror, wanted=f"the server's {FILE_NAME}"
        ) from None
    if info.st_uid != os.geteuid():
        raise BridgeError(
            field=f"{path}: owner",
            got=f"uid {info.st_uid}",
            wanted=f"{os.geteuid()}, the trainer's",
            fix="run both as one user",
        )
    if info.st_mode & 0o077:
        raise BridgeError(
            "any user who can read this file can write the weights",
            field=f"{path}: mode",
            got=f"{stat.S_IMODE(info.st_mode):04o}",
            wanted="0600",
            fix="chmod 600 it if nobody else could have changed it, or start the server again",
        )
    return data, info.st_mtime


def _problem(config: BridgeConfigFile, written: float, ranks: int) -> Problem | None:
    """Return what is wrong with a file, the most fundamental problem first."""
    if config.machine != machine_id():
        summary = "of another machine, or of this one before its last start"
        return Problem("machine", config.machine, machine_id(), "start the server here", summary)
    if not _alive(config.server_pid, written):
        fix = "start the server, or remove the file"
        return Problem("server_pid", str(config.server_pid), fix=fix, summary="the process that wrote it is gone")
    if config.tp_degree != ranks:
        fix = f"train in {config.tp_degree} processes, with --server.tensor-parallel-size {config.tp_degree}"
        return Problem("tp_degree", str(config.tp_degree), f"{ranks}, as the trainer's", fix, "each worker has a shard")
    for name, handle in config.ipc_handles.items():
        if handle.dtype not in ITEM_BYTES:
            return Problem(f"{name}: dtype", handle.dtype, ", ".join(ITEM_BYTES), "serve without quantisation")
    return None


def _alive(pid: int, written: float) -> bool:
    """Return whether the process that wrote the file still runs; one that started later only reuses its pid."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= written + CLOCK_SLACK_S
    except (psutil.Error, ValueError):
        return False


def tied_names(config: BridgeConfigFile) -> dict[str, str]:
    """Return for each further name of the same memory the name that comes first."""
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name in config.param_names:
        handle = config.ipc_handles[name]
        place = (*storage_of(handle), start_of(handle), *handle.shape)
        if (owner := first.setdefault(place, name)) != name:
            ties[name] = owner
    return ties


def storage_of(handle: Handle) -> tuple[str, int]:
    """Return a key that identifies a tensor's storage."""
    if isinstance(handle, CudaIpcHandle):
        return handle.ipc_handle_b64, handle.storage_offset
    return handle.path, 0


def start_of(handle: Handle) -> int:
    """Return the byte offset at which a tensor begins in its storage."""
    if isinstance(handle, CudaIpcHandle):
        return handle.tensor_offset * ITEM_BYTES[handle.dtype]
    return handle.offset
