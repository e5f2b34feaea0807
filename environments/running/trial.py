"""`try`: an environment without a server, so that its mistakes show in seconds and before anything is started.

It runs `setup`, takes an item, turns its prompt into tokens and scores two made-up answers. `grpo run` and
`grpo doctor` start it as a separate process. They read how far it is, and what failed, from a file, which
`REPORT_VARIABLE` names.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from environments.config import ConfigError, PromptTooLong, Settings, UnusableRow
from environments.threads import run, settled
from grpo_common.errors import Problem, UserError

if TYPE_CHECKING:
    from environments.base import BaseEnv
    from environments.peers.inference import Completion, Sampling

REPORT_VARIABLE = "GRPO_TRIAL_REPORT"
"""Environment variable with the path of the report, a JSON object: `doing`, a step such as `setup()`; `at`, the line of
the user's code that runs; `problems`, what failed; `found`, the result; `lone`, true if a group is one answer, which
can't be compared with others."""
MOST_ITEMS = 16
"""Items that are tried until a prompt leaves room for an answer; as many lost groups in a row end an environment."""
LOOK_EVERY_S = 0.5
LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), Path(__file__).parents[1])
)
"""Folders of code that is not the user's: Python, installed packages, and this package."""


class NeedsServer(UserError, RuntimeError):
    """The environment asks a server, which a trial does not have."""


class NoServer:
    """Stands in for the inference server."""

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Raise `NeedsServer`."""
        raise NeedsServer("a trial has no server")

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Raise `NeedsServer`."""
        raise NeedsServer("a trial has no server")

    async def close(self) -> None:
        """Do nothing."""


class Report:
    """Writes how far the trial is, for the process that started it; without such a process it writes nothing."""

    def __init__(self) -> None:
        """Read the path of the report from the variable."""
        path = os.environ.get(REPORT_VARIABLE)
        self._path = Path(path) if path else None
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {"doing": "", "at": "", "problems": [], "found": None, "lone": False}
        self._thread = threading.get_ident()
        if self._path is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def doing(self, what: str) -> None:
        """Begin a step."""
        self._write(doing=what, at="")

    def note(self, *, lone: bool) -> None:
        """Write whether a group is one answer, which can't be compared with others."""
        self._write(lone=lone)

    @property
    def step(self) -> str:
        """The step that was begun last."""
        return self._facts["doing"]

    def fail(self, problems: Sequence[Problem]) -> None:
        """End with what is wrong."""
        self._write(problems=[asdict(problem) for problem in problems])

    def succeed(self, found: str) -> None:
        """End with what was seen."""
        self._write(found=found)

    def _write(self, **facts: Any) -> None:
        with self._lock:
            if self._path is None or self._facts["problems"] or self._facts["found"] is not None:
                self._facts |= facts
                return
            self._facts |= facts
            partial = self._path.with_suffix(".partial")
            with suppress(OSError):  # its reader is gone
                partial.write_text(json.dumps(self._facts))
                partial.replace(self._path)

    def _watch(self) -> None:
        """Write which line of the user's code runs, again and again: a step may never end."""
        pause = threading.Event()
        while not pause.wait(LOOK_EVERY_S):
            at = next(filter(None, map(place, self._stacks())), "")
            if at != self._facts["at"]:
                self._write(at=at)

    def _stacks(self) -> Iterator[list[tuple[str, int]]]:
        """Yield the stacks of the threads in which functions such as `score` run, and then that of the event loop."""
        for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] == self._thread):
            frames = [*traceback.walk_stack(frame)][::-1]
            if ident == self._thread or any(each.f_code is run.__code__ for each, _ in frames):
                yield [(each.f_code.co_filename, line) for each, line in frames]


@cache
def report() -> Report:
    """Return the report of this process."""
    return Report()


def place(frames: Sequence[tuple[str, int]], *, all_code: bool = False) -> str:
    """Return the last place in the user's code, as FILE:LINE; empty: there is none.

    Args:
        frames: files and lines of a stack, the innermost last.
        all_code: without a frame of the user's code, return the last of all.
    """
    own = [(file, line) for file, line in frames if is_users(file)]
    for file, line in (own or (frames if all_code else []))[-1:]:
        path = Path(file)
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
    return ""


def is_users(file: str) -> bool:
    """Return whether code in this file is the user's: neither Python's, nor of an installed package, nor ours."""
    return not file.startswith("<") and not any(Path(file).resolve().is_relative_to(folder) for folder in LIBRARIES)


def user_code_failed(error: BaseException, step: str) -> ConfigError:
    """Return the error of a user's code as one message, with the file and the line.

    Args:
        step: what failed, such as `setup()`.
    """
    if isinstance(error, SyntaxError):
        where, source = place([(error.filename or "", error.lineno or 0)], all_code=True), error.text or ""
        said = f"{type(error).__name__}: {error.msg}"
    else:
        frames = [frame for each in _chain(error) for frame in _frames(each.__traceback__)]
        where = place(frames, all_code=True)
        source = next((linecache.getline(*frame) for frame in reversed(frames) if place([frame]) == where), "")
        said = f"{type(error).__name__}: {error}"
    line = f": {source.strip()[:120]}" if source.strip() else ""
    fix = "correct it there"
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        fix = "name the module by its package, such as --env my_envs.my_env, instead of the file"
    return ConfigError(f"{step} failed at {where}{line}", got=said[:500], fix=fix)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and what it was raised from, the last first."""
    return [error, *(_chain(error.__cause__) if error.__cause__ else [])]


def _frames(trace: TracebackType | None) -> list[tuple[str, int]]:
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(trace)]


async def try_out(env_cls: type[BaseEnv[Any, Any]], settings: Settings[Any], tokenizer: Any) -> str:
    """Try an environment, and return what was seen.

    Raises:
        ConfigError: something fails; the message has the file and the line of the user's code.
    """
    env: BaseEnv[Any, Any] | None = None
    try:
        report().doing(f"{env_cls.__name__}()")
        env = env_cls(settings.env, NoServer(), tokenizer)
        env.data, env.rewards = settings.data, settings.rewards
        report().note(lone=env.compares_answers and env.config.group_size == 1)
        report().doing("setup()")
        await settled(env.setup())
        found = await _try_items(env)
        report().doing("close()")
        closing, env = env, None
        await closing.close()
        return found
    except NeedsServer:
        return f"{report().step} asks a server, where the trial ends"
    except UserError as error:
        raise ConfigError.of(error.problems) from error
    except Exception as error:
        raise user_code_failed(error, report().step) from error
    finally:
        if env is not None:
            with suppress(Exception):
                await env.close()


async def _try_items(env: BaseEnv[Any, Any]) -> str:
    """Try items until a prompt leaves room for an answer."""
    for left in reversed(range(MOST_ITEMS)):
        report().doing("get_next_item()")
        item = await settled(env.get_next_item())
        if item is None:
            raise ConfigError(field=f"{env.name}: get_next_item()", got="None", wanted="a first item")
        try:
            return await env.rehearse(item, report().doing)
        except (PromptTooLong, UnusableRow):
            if not left:
                raise
    raise AssertionError("the last item returns or raises")


def fail_and_exit(error: UserError, prog: str) -> NoReturn:
    """Print an error, write it to the report of a trial, and exit with 2."""
    report().fail(error.problems)
    print(f"{prog}: {error}", file=sys.stderr)
    sys.exit(2)
