"""Where `vllm_bridge_config.json` goes, and its coming and going: whole or not at all, for its owner only."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from vllm_server.errors import FatalError
from vllm_server.protocol import machine_id
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile

FOLDER = "atropos_bridge"  # in the system temporary folder


@dataclass(frozen=True)
class BridgeFile:
    """The place of one server's file. `own_folder`: it is ours, made on demand and removed when it is empty."""

    path: Path
    own_folder: bool = False

    @classmethod
    def choose(cls, flag: str | None, environment: Mapping[str, str], temporary: Path | None = None) -> "BridgeFile":
        """By flag, VLLM_BRIDGE_CONFIG_PATH or $LOGDIR, in this order, or else in the temporary folder.

        A path that is a folder stands for the file of the usual name in it.
        """
        said = flag or environment.get("VLLM_BRIDGE_CONFIG_PATH")
        if said:
            path = Path(said).expanduser().absolute()
            return cls(path / FILE_NAME if path.is_dir() else path)
        if environment.get("LOGDIR"):
            return cls(Path(environment["LOGDIR"]).expanduser().absolute() / FILE_NAME)
        return cls((temporary or Path(tempfile.gettempdir())) / FOLDER / FILE_NAME, own_folder=True)

    def check(self) -> None:
        """Raise a FatalError if the file cannot be written here, or a server that lives has written it."""
        folder = self.path.parent
        if self.own_folder:
            self._check_owner(folder)
        elif not folder.is_dir():
            raise self._refused(f"{folder}, which is no folder", "a folder that exists", f"mkdir -p {folder}")
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise self._refused(f"{folder}, which is read-only", "a folder to write to", "choose another")
        other = self._read()
        if other is not None and _is_alive(other, self.path):
            raise self._refused(
                f"the file of the server with process id {other.server_pid} ({other.server_url}), which runs",
                "a file of this server alone", "end that server or choose another place",
            )  # fmt: skip

    def write(self, config: BridgeConfigFile) -> None:
        """Put the file in its place, for this user's eyes only.

        Raises:
            FatalError: it cannot be written; see `check`.
        """
        folder = self.path.parent
        try:
            if self.own_folder:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                self._check_owner(folder)
            descriptor, name = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=folder)  # 0600
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
        """Take the file away, unless another server's stands there now."""
        config = self._read()
        if config is not None and config.boot_id == boot_id:
            self.path.unlink(missing_ok=True)
        if self.own_folder:
            with contextlib.suppress(OSError):  # another server's file is in it
                self.path.parent.rmdir()

    def _read(self) -> BridgeConfigFile | None:
        """What stands there; None if nothing or something else does, which is overwritten."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=BridgeConfigFile)
        except (OSError, msgspec.DecodeError):
            return None

    def _check_owner(self, folder: Path) -> None:
        """In a folder that everyone may write to, somebody else may have been there first."""
        try:
            found = folder.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise self._refused(
                f"{folder}, of user {found.st_uid} with mode {stat.filemode(found.st_mode)}",
                f"a folder of user {os.geteuid()} alone (drwx------)", "choose another place, or remove it",
            )  # fmt: skip

    def _refused(self, got: str, wanted: str, fix: str) -> FatalError:
        return FatalError(field=f"--bridge-config-path {self.path}", got=got, wanted=wanted, fix=fix)


def _is_alive(config: BridgeConfigFile, path: Path) -> bool:
    """Whether the server that wrote the file runs; a process that is younger than the file is another."""
    if config.machine != machine_id():
        return False
    try:
        return psutil.Process(config.server_pid).create_time() <= path.stat().st_mtime
    except (psutil.Error, OSError):
        return False
