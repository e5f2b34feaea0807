"""Copies of checkpoints at `--checkpoint-url`: a folder of another disk, or a URL that fsspec knows (s3://, gs://, …).

A copy has the files of the checkpoint, state.json last, so a copy that broke off is none. The machine of the run may be
lost: `--resume auto` on another one fetches the newest copy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from grpo_common.formats import FormatError, check_format
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import whole_folder
from grpo_trainer.saving.finding import saved_checkpoints
from grpo_trainer.saving.manifest import FORMAT, STATE_FILE

log = logging.getLogger(__name__)


class CheckpointCopies:
    """The copies at one URL.

    Args:
        keep: number of copies to keep besides final ones; 0: all.
        final_name: name of the final checkpoint, which is never deleted.
    """

    def __init__(self, url: str, keep: int, final_name: str) -> None:
        self._url = url
        self._keep = keep
        self._final_name = final_name
        files, root = url_to_fs(url)
        self._files: Any = files
        self._root = root.rstrip("/")

    def add(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint, then delete the oldest copies. If that fails, warn: the next one is copied."""
        there = f"{self._root}/{checkpoint.name}"
        try:
            if self._files.exists(there):
                self._files.rm(there, recursive=True)
            paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
            for path in sorted(paths, key=lambda path: path.name == STATE_FILE):
                target = f"{there}/{path.relative_to(checkpoint).as_posix()}"
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(path), target)
            log.info("copied %s to %s", checkpoint.name, self._url)
            self._prune(checkpoint.name)
        except Exception as error:  # a driver's own: without a network, s3fs raises botocore's, which are no OSError
            log.warning("--checkpoint-url %s: %s was not copied: %s", self._url, checkpoint.name, error)

    def _steps(self) -> list[tuple[int, str]]:
        """Return step and name of each complete copy, oldest first."""
        self._files.invalidate_cache()
        found = []
        for there in self._files.ls(self._root, detail=False) if self._files.exists(self._root) else ():
            state = f"{str(there).rstrip('/')}/{STATE_FILE}"
            if self._files.exists(state):
                content = json.loads(self._files.cat_file(state))
                check_format(state, content, FORMAT)
                found.append((int(content["step"]), state.split("/")[-2]))
        return sorted(found)

    def _prune(self, newest: str) -> None:
        names = [name for _, name in self._steps() if name not in (self._final_name, newest)]
        others = self._keep - (newest != self._final_name)
        for name in names[: max(0, len(names) - others)] if self._keep else ():
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def check_empty(self) -> None:
        """Check that a new run does not mix with another one.

        Raises:
            ConfigError: there are copies, or they can't be read.
        """
        with self._readable():
            names = [name for _, name in self._steps()]
        if names:
            raise ConfigError(
                "holds checkpoints of another run",
                field="--checkpoint-url",
                got=", ".join(names[-3:]),
                wanted="a place without checkpoints",
                fix="choose another, or continue that run with --resume auto",
            )

    def fetch(self, folder: Path, say: Callable[[str], None]) -> None:
        """Copy the newest checkpoint into a folder unless it has one of as many steps; report it by `say`.

        Raises:
            ConfigError: the copies can't be read.
        """
        with self._readable():
            copies = self._steps()
            here = [found.state.progress.step for found in saved_checkpoints(folder)]
            if not copies or copies[-1][0] <= max(here, default=-1):
                return
            there = f"{self._root}/{copies[-1][1]}"
            with whole_folder(folder / copies[-1][1]) as writing:
                for source in self._files.find(there):
                    target = writing / str(source).removeprefix(f"{there}/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(source, str(target))
        say(f"fetched {copies[-1][1]} from {self._url}")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except FormatError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the copies of checkpoints can't be read: {error}",
                field="--checkpoint-url",
                got=self._url,
                wanted="a place that can be read",
                fix="mend the connection, or leave --checkpoint-url out to continue from --save-path",
            ) from None
