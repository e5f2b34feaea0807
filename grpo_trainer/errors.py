"""The errors that end a command with one message instead of a traceback.

Each message names the field, what came, what was wanted and the fix. `exit_code` follows the shell's custom:
2 for a command that was asked for wrongly, 1 for one that failed on the way, 128 + signal for one that was stopped.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_common.errors import UserError


class GrpoError(UserError):
    """Base of the trainer's errors."""

    spoils_weights = False
    """Whether the weights that the trainer holds can't be relied on after it, and are not to be saved."""

    def add(self, *, summary: str = "", fix: str = "") -> None:
        """Say more in the last problem: after its summary, and after its fix."""
        last = self.problems[-1]
        fixes = "; ".join(filter(None, [last.fix, fix]))
        self._take([*self.problems[:-1], replace(last, summary=last.summary + summary, fix=fixes)])
        self.args = ("\n".join(map(str, self.problems)),)


class ConfigError(GrpoError, ValueError):
    """An option, a configuration file or a combination of both is wrong."""

    exit_code = 2


class ModelError(GrpoError, ValueError):
    """The model can't be trained or served."""

    exit_code = 2


class PortBusyError(GrpoError, OSError):
    """A port that a process of ours needs is taken."""

    exit_code = 2


class ServerError(GrpoError, RuntimeError):
    """The inference server or the rollout API refused, vanished or answered nonsense."""


class BridgeError(GrpoError, RuntimeError):
    """The server does not generate with the weights that the trainer published."""


class LostError(BridgeError):
    """A connection to the server broke, or was not made: the weights are not at fault, and the next one may work."""


class DriftError(BridgeError):
    """Samples are not of the policy that the trainer believes the server to generate with."""


class TrainingError(GrpoError, RuntimeError):
    """Training can't continue: too many bad steps in a row, or no data."""


class PeerGoneError(TrainingError):
    """Another process of this trainer has ended. A supervisor may start all of them again."""

    exit_code = os.EX_TEMPFAIL


class WeightsError(TrainingError):
    """The weights themselves are wrong."""

    spoils_weights = True


class HungError(TrainingError):
    """A step took longer than `--step-timeout`."""

    exit_code = 124  # as `timeout` has it


class ProcessFailedError(GrpoError, RuntimeError):
    """A child process of a run ended when it should not have."""


class DiskFullError(GrpoError, OSError):
    """No space is left where the run writes."""


class FolderGoneError(GrpoError, OSError):
    """A folder that a run writes into was deleted under it, or replaced by another one."""


class StoppedError(GrpoError):
    """A signal such as SIGINT or SIGTERM asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.exit_code - 128,), vars(self)


def from_os_error(error: OSError, doing: str) -> GrpoError | None:
    """Return the error for an operating system's error that a user can mend, or None when it is none of those.

    The message says that the program could not do what it was `doing`, e.g. "write metrics", and has the error's notes.
    """
    if (known := _known(error, doing)) is not None:
        for note in getattr(error, "__notes__", ()):
            known.add(fix=note)
    return known


def _known(error: OSError, doing: str) -> GrpoError | None:
    where = error.filename or "the run folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = ""
        if isinstance(path := error.filename, str):
            folder = next(each for each in (Path(path), *Path(path).parents) if each.is_dir())
            free = f" ({shutil.disk_usage(folder).free / 1e6:.1f} MB free)"
        return DiskFullError(
            f"disk full: could not {doing}",
            field=str(where),
            got=f"{error.strerror}{free}",
            fix="free space, or put the run elsewhere (--run-dir, --save-path, --log-dir)",
        )
    if error.errno == errno.ENOENT and error.filename and not Path(os.fsdecode(error.filename)).parent.is_dir():
        return FolderGoneError(f"could not {doing}", field=str(where), got="no folder there", wanted="the run's folder")
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return ConfigError(
            f"could not {doing}", field=str(where), got=error.strerror, fix="choose a folder that is yours"
        )
    return None


def warn_once(log: logging.Logger, text: str, *values: object) -> None:
    """Log what all processes of the trainer find; only rank 0 warns of it, so that a user sees it once."""
    import torch.distributed as dist  # loaded already, where there are several

    leads = not dist.is_initialized() or dist.get_rank() == 0
    log.log(logging.WARNING if leads else logging.INFO, text, *values, stacklevel=2)
