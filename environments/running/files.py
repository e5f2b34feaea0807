"""Write groups as lines of a JSONL file."""

from pathlib import Path
from typing import IO

import msgspec

from environments.api import wire
from environments.config import ConfigError

_OPTION = "--env.data_path_to_save_groups"


class GroupFile:
    """A JSONL file of scored groups; without a file, groups are discarded."""

    def __init__(self, file: IO[bytes] | None) -> None:
        """Create one by `append` or `create`."""
        self._file = file

    @classmethod
    def append(cls, path: Path | None) -> "GroupFile":
        """Open a file to append to; without a path, discard groups.

        Raises:
            ConfigError: The file cannot be written.
        """
        return cls(None if path is None else _open(path, "ab"))

    @classmethod
    def create(cls, path: Path) -> "GroupFile":
        """Create a new file.

        Raises:
            ConfigError: It exists already, or cannot be written.
        """
        return cls(_open(path, "xb"))

    def write(self, group: wire.ScoredData) -> None:
        """Write one group as one line and flush it, so that it survives a crash of this process."""
        if self._file is not None:
            self._file.write(msgspec.json.encode(group) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _open(path: Path, mode: str) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode)
    except FileExistsError:
        raise ConfigError(
            field=_OPTION, got=f"{path}, which exists", wanted="a new file", fix="name another file, or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(
            "cannot be written",
            field=f"{_OPTION} {path}",
            got=error.strerror,
            fix="name a file in a folder that you may write to",
        ) from None
