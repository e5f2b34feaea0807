"""`try`: an environment without a server, so that its mistakes show in seconds and before anything is started.

It runs `setup`, takes an item, turns its prompt into tokens, scores made-up answers, and evaluates such answers if
the class has `evaluate`. `grpo run` and `grpo doctor` start it as a separate process. They read how far it is, and what
failed, from a file, which `REPORT_VARIABLE` names.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from environments.config import ConfigError, PromptTooLong, Settings, UnusableRow
from environments.running.groups import EnvironmentFailed, set_up
from environments.scoring import settled
from environments.user_modules import place, user_code_failed, users_frames
from grpo_common.errors import UserError

if TYPE_CHECKING:
    from environments.base import BaseEnv
    from environments.peers.http import Answer
from environments.peers.inference import Completion, Sampling

REPORT_VARIABLE: Final = "GRPO_TRIAL_REPORT"
"""Environment variable with the path of the report, a JSON object: `doing`, a step such as `setup()`; `at`, the line of
the user's code that runs; `problems`, what failed; `found`, the result; `group_size`, of an environment whose answers
to an item are compared."""
MOST_ITEMS: Final = 16
"""Items that are tried until a prompt leaves room for an answer; as many lost groups in a row end an environment."""
MOST_REQUESTS: Final = 16
"""Requests of `evaluate` that are answered."""
OF_ATROPOS: Final = ("config_init", "collect_trajectory", "wandb_log")
"""Methods that a ported class may have kept."""
LOOK_EVERY_S: Final = 0.5


class NeedsServer(UserError, RuntimeError):
    """The environment asks a server, which a trial does not have."""


class NoServer:
    """Stands in for the inference server: each request raises `NeedsServer`, and a wrong call a TypeError as there."""

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        raise NeedsServer("a trial has no server")

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise NeedsServer("a trial has no server")

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        raise NeedsServer("a trial has no server")

    async def close(self) -> None:
        return


class MadeUpAnswers(NoServer):
    """Stands in for the inference server in an evaluation: the first requests get made-up answers."""

    def __init__(self, env: BaseEnv[Any, Any]) -> None:
        self._env, self._left = env, MOST_REQUESTS

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        if not self._left:
            raise NeedsServer("a trial answers the first requests only")
        self._left -= 1
        return self._env.made_up(prompt_token_ids, n)


class Report:
    """Writes how far the trial is, for the process that started it; without such a process it writes nothing."""

    def __init__(self) -> None:
        path = os.environ.get(REPORT_VARIABLE)
        self._path = Path(path) if path else None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._facts: dict[str, Any] = {"doing": "", "at": "", "problems": [], "found": None, "group_size": None}
        if self._path is not None:
            watch = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="trial", daemon=True)
            watch.start()

    def doing(self, step: str) -> None:
        self.write(doing=step, at="")

    @property
    def step(self) -> str:
        return self._facts["doing"]

    def write(self, **facts: Any) -> None:
        """Write facts, unless the trial has ended."""
        with self._lock:
            is_over = self._over.is_set()
            self._facts |= facts
            if self._path is not None and not is_over:
                partial = self._path.with_suffix(".partial")
                with suppress(OSError):  # its reader is gone
                    partial.write_text(json.dumps(self._facts))
                    partial.replace(self._path)
            if self._facts["problems"] or self._facts["found"] is not None:
                self._over.set()

    def _watch(self, loop_thread: int) -> None:
        """Write which line of the user's code runs, again and again until the trial has ended: a step may never end."""
        while not self._over.wait(LOOK_EVERY_S):
            # Functions such as `score` run in other threads than the event loop, which waits for them.
            threads = sorted(sys._current_frames().items(), key=lambda each: each[0] == loop_thread)
            stacks = filter(None, (users_frames(traceback.extract_stack(frame)) for _, frame in threads))
            at = next((place(frames[-1]) for frames in stacks), "")
            if at != self._facts["at"]:
                self.write(at=at)


@cache
def report() -> Report:
    return Report()


def fail_and_exit(error: UserError, prog: str) -> NoReturn:
    """Print an error, write it to the report of a trial, and exit with its code."""
    report().write(problems=[asdict(problem) for problem in error.problems])
    print(f"{prog}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


async def try_out(env_cls: type[BaseEnv[Any, Any]], settings: Settings[Any], tokenizer: Any) -> str:
    """Try an environment, and return what was seen; raise a ConfigError with the file and line of code that fails."""
    env: BaseEnv[Any, Any] | None = None
    doing = report().doing
    try:
        doing(f"{env_cls.__name__}()")
        env = env_cls(settings.env, NoServer(), tokenizer)
        env.data, env.rewards = settings.data, settings.rewards
        report().write(group_size=env.config.group_size if env.compares_answers else None)
        doing("setup()")
        await set_up(env)
        found = await _try_items(env)
        if not type(env).evaluate.__module__.startswith("environments."):
            doing("evaluate()")
            found += await _try_evaluation(env)
        for name in OF_ATROPOS:
            found += f"; {name}() of Atropos is not called here" if hasattr(env_cls, name) else ""
        doing("close()")
        closing, env = env, None
        await closing.close()
        return found
    except Exception as error:
        if _needs_server(error):
            return f"{report().step} asks a server, where the trial ends"
        if isinstance(error, UserError):
            raise ConfigError.of(error.problems) from error
        raise user_code_failed(error, report().step) from error
    finally:
        if env is not None:
            with suppress(Exception):
                await env.close()


async def _try_evaluation(env: BaseEnv[Any, Any]) -> str:
    """Evaluate made-up answers; return what was seen."""
    env.server = MadeUpAnswers(env)
    try:
        metrics = await env.evaluate()
    except Exception as error:
        if _needs_server(error):
            return f"; evaluate() was tried until it asked for more than the {MOST_REQUESTS} answers that a trial gives"
        raise (error.__cause__ if isinstance(error, EnvironmentFailed) else None) or error from None
    return f"; evaluate() returns {', '.join(map(str, metrics))}"


def _needs_server(error: BaseException | None) -> bool:
    """Return whether a request to a server is behind an error, which the user's code may have wrapped or grouped."""
    for _ in range(10):
        if error is None or isinstance(error, NeedsServer | BaseExceptionGroup):
            break
        error = error.__cause__ or error.__context__
    if isinstance(error, BaseExceptionGroup):
        return all(map(_needs_server, error.exceptions))
    return isinstance(error, NeedsServer)


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
