"""`vllm_bridge_config.json`, which tells trainers where shared weights are: its place, its content, its end."""

import contextlib
import logging
import os
import shlex
import stat
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from grpo_common.http import address
from vllm_server import seams
from vllm_server.errors import FatalError
from vllm_server.protocol import WorkerInfo, machine_id
from vllm_server.protocol.bridge_config import (
    FILE_NAME,
    SCHEMA_VERSION,
    BridgeConfigFile,
    Exported,
    ParamMapping,
    RankWeights,
)
from vllm_server.seams import Engine

logger = logging.getLogger("vllm.grpo.bridge_file")
T = TypeVar("T")

FOLDER = "atropos_bridge"  # in the system temporary folder
_REACHED_BY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # servers that listen on all addresses


@dataclass(frozen=True)
class BridgeFile:
    """The path of one server's file."""

    path: Path
    own_folder: bool = False  # this project's: the server creates it on demand and removes it when it is empty

    @classmethod
    def choose(cls, flag: str | None, environment: Mapping[str, str], temporary: Path | None = None) -> "BridgeFile":
        """Return the place from flag, VLLM_BRIDGE_CONFIG_PATH or $LOGDIR, in this order, or in the temporary folder.

        If the path is a folder, the file has its usual name in that folder.
        """
        if place := flag or environment.get("VLLM_BRIDGE_CONFIG_PATH"):
            path = Path(place).expanduser().absolute()
            return cls(path / FILE_NAME if path.is_dir() else path)
        if environment.get("LOGDIR"):
            return cls(Path(environment["LOGDIR"]).expanduser().absolute() / FILE_NAME)
        return cls((temporary or Path(tempfile.gettempdir())) / FOLDER / FILE_NAME, own_folder=True)

    def check(self) -> None:
        """Raise a FatalError if the file cannot be written here, or if it is the file of a running server."""
        folder = self.path.parent
        if self.own_folder:
            self._check_owner()
        elif not folder.is_dir():
            fix = f"mkdir -p {shlex.quote(str(folder))}"
            raise self._refused(f"{folder}, which is no folder", "a folder that exists", fix)
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise self._refused(f"{folder}, which is read-only", "a folder to write to", "choose another")
        number = (self._read(dict[str, Any]) or {}).get("schema_version")
        if isinstance(number, int) and number > SCHEMA_VERSION:
            got = f"a file of schema_version {number}, of a server of a newer version"
            fix = "choose another place; if that server has ended, remove the file"
            raise self._refused(got, f"none, or one of schema_version {SCHEMA_VERSION}", fix)
        if (other := self._read(BridgeConfigFile)) is None or other.machine != machine_id():
            return
        try:  # a process that is younger than the file is another one
            runs = psutil.Process(other.server_pid).create_time() <= self.path.stat().st_mtime
        except (psutil.Error, OSError):
            return
        if runs:
            got = f"the file of the server with process id {other.server_pid} ({other.server_url}), which runs"
            raise self._refused(got, "a file of this server alone", "end that server or choose another place")

    def write(self, config: BridgeConfigFile) -> None:
        """Write the file atomically, readable by this user only. Raise a FatalError if that fails; see `check`."""
        try:
            if self.own_folder:
                with contextlib.suppress(FileExistsError):
                    self.path.parent.mkdir(mode=0o700)
                self._check_owner()
            descriptor, name = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=self.path.parent)  # 0600
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(msgspec.json.format(msgspec.json.encode(config)))
                    stream.flush()
                    os.fsync(stream.fileno())
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._refused(str(error), "a place to write to", "choose another") from error

    def remove(self, boot_id: str) -> None:
        """Remove the file, unless another server has replaced it."""
        config = self._read(BridgeConfigFile)
        if config is not None and config.boot_id == boot_id:
            self.path.unlink(missing_ok=True)
        if self.own_folder:
            with contextlib.suppress(OSError):  # another server's file is in it
                self.path.parent.rmdir()

    def _read(self, kind: type[T]) -> T | None:
        """Return the file's content, or None if there is no file or it is of another kind. `write` overwrites that."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None

    def _check_owner(self) -> None:
        """Refuse a folder of another user: in a shared temporary folder another user may have created it first."""
        folder, user = self.path.parent, os.geteuid()
        try:
            found = folder.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
            got = f"{folder}, of user {found.st_uid} with mode {stat.filemode(found.st_mode)}"
            raise self._refused(
                got, f"a folder of user {user} alone (drwx------)", "choose another place, or remove it"
            )

    def _refused(self, got: str, wanted: str, fix: str) -> FatalError:
        return FatalError(field=f"--bridge-config-path {self.path}", got=got, wanted=wanted, fix=fix)


async def export(engine: Engine, args: Namespace, boot_id: str, workers: Sequence[WorkerInfo]) -> BridgeFile:
    """Share the weights of the workers (by rank) and write the bridge file. Raise a FatalError if one fails."""
    answers = await engine.collective_rpc("grpo_export_weights")
    for answer in answers:
        if "refused" in answer:
            raise FatalError(answer["refused"], field="--shared-weights")
    exported = [msgspec.json.decode(answer["exported"], type=Exported) for answer in answers]
    first, *others = sorted(exported, key=lambda each: each.rank)
    handles = first.handles
    scheme, host = "https" if args.ssl_keyfile else "http", _REACHED_BY.get(args.host or "", args.host or "")
    file = BridgeFile.choose(args.bridge_config_path, os.environ)
    file.write(
        BridgeConfigFile(
            model=str(engine.vllm_config.model_config.model),
            tp_degree=len(workers),
            dp_shard_degree=1,
            param_names=list(handles),
            param_mappings=_mappings(first),
            ipc_handles=handles,
            shared_weights_enabled=True,
            single_copy_enabled=True,
            num_params=len(handles),
            schema_version=SCHEMA_VERSION,
            kind="cuda_ipc" if seams.device_type() == "cuda" else "file",
            server_url=f"unix:{args.uds}" if args.uds else f"{scheme}://{address(host, args.port)}",
            server_pid=os.getpid(),
            boot_id=boot_id,
            machine=machine_id(),
            gpu_uuid=workers[0].gpu_uuid,
            vllm_version=seams.vllm_version(),
            torch_version=first.torch_version,
            further_ranks=[
                RankWeights(
                    rank=each.rank,
                    param_mappings=_mappings(each),
                    ipc_handles=each.handles,
                    gpu_uuid=workers[each.rank].gpu_uuid,
                )
                for each in others
            ],
        )
    )
    logger.info("Exported %d IPC handles for single-copy mode: %s", len(handles), file.path)
    return file


def _mappings(exported: Exported) -> dict[str, ParamMapping]:
    return {
        name: ParamMapping(vllm_name=name, shape=handle.shape, dtype=handle.dtype, device=exported.device)
        for name, handle in exported.handles.items()
    }
