"""Write JSONL files."""

from pathlib import Path
from typing import Literal

from environments.config import ConfigError


class JsonlFile:
    """A JSONL file, each line of which survives a crash of this process."""

    def __init__(self, option: str, path: Path, mode: Literal["ab", "xb"] = "ab") -> None:
        """Open a file to append to (`ab`), or create a new one (`xb`).

        Raises:
            ConfigError: It can't be written, or should be new and exists; the message names the option.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open(mode)
        except FileExistsError:
            raise ConfigError(
                field=option, got=f"{path}, which exists", wanted="a new file", fix="name another file, or remove it"
            ) from None
        except OSError as error:
            fix = "name a file in a folder that you may write to"
            raise ConfigError("cannot be written", field=f"{option} {path}", got=error.strerror, fix=fix) from None

    def write(self, line: bytes) -> None:
        """Write one line and flush it."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
