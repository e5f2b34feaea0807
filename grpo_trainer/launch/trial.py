"""Tries a run's environments before any process of the run starts: `python -m MODULE try`, a process for each.

A trial imports the environment, runs `setup`, takes an item, and scores two made-up answers to its prompt, all without
a server. Its settings are those of the run, except for ports. It writes how far it is to a file
(`environments.running.trial`), so that a step that does not end can be named.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from environments.running.settings_check import BUILT_IN
from grpo_common.errors import Problem
from grpo_trainer.config.processes import EnvironmentProcess, RunConfig, environment_command
from grpo_trainer.config.rules import LONE_ANSWERS
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import replace_file
from grpo_trainer.launch.plan import ProcessSpec, environment_settings
from grpo_trainer.launch.process import Process

LIMIT_S = 20.0
"""Seconds after which a trial is given up with a warning."""
SLOW_S = 5.0
"""Seconds after which a trial says what it waits for."""
END_S = 3.0
"""Seconds that a trial has to end by itself."""
POLL_S = 0.05
REPORT_VARIABLE = "GRPO_TRIAL_REPORT"


@dataclass(frozen=True)
class Outcome:
    """The result of one trial.

    Attributes:
        environment: as `--env` names it.
        problems: what is wrong.
        found: what was seen; empty: something is wrong, or the trial was given up.
        doing: the step that was running when the trial was given up, with its place in the user's code.
    """

    environment: str
    seconds: float
    problems: tuple[Problem, ...] = ()
    found: str = ""
    doing: str = ""

    def __str__(self) -> str:
        """Return the result as one line."""
        if self.found:
            return f"environment {self.environment}: {self.found} (tried in {self.seconds:.1f} s)"
        if self.doing:
            return (
                f"environment {self.environment}: not tried to its end, {self.doing} runs longer than "
                f"{self.seconds:.0f} s; the run starts, --no-try leaves the trial out"
            )
        return "\n".join(map(str, self.problems))


class Trials:
    """The trials of a run's environments, which run at the same time.

    Args:
        everything: also try the built-in environments of which only the settings can be wrong.
    """

    def __init__(self, config: RunConfig, *, everything: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="grpo-try-"))
        self._running: list[_Trial] = []
        try:
            for name, environment, tables in environment_settings(config):
                built_in = BUILT_IN.get(environment.name)
                if everything or built_in is None or built_in.is_tried:
                    learns_alone = config.trainer.learns_from_lone_answers
                    self._running.append(_Trial(self._folder, name, environment, tables, learns_alone=learns_alone))
        except BaseException:
            self.close()
            raise

    def outcomes(self, say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
        """Wait for all trials, and return their results.

        Args:
            say: called with a line about each trial that takes long.
        """
        said: set[str] = set()
        while any(trial.outcome is None for trial in self._running):
            for trial in self._running:
                trial.look()
                if trial.outcome is None and trial.seconds > SLOW_S and trial.name not in said:
                    said.add(trial.name)
                    say(f"environment {trial.environment}: {trial.seconds:.0f} s of its trial, still in {trial.doing}")
            time.sleep(POLL_S)
        return [trial.outcome for trial in self._running if trial.outcome is not None]

    def close(self) -> None:
        """End the processes and remove their files."""
        for trial in self._running:
            trial.end()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def trying(config: RunConfig, *, everything: bool = False) -> Iterator[Trials]:
    """Try the environments in the background of a block, unless the options say otherwise."""
    if not config.options.try_environments:
        config = config.model_copy(update={"environments": ()})
    trials = Trials(config, everything=everything)
    try:
        yield trials
    finally:
        trials.close()


def refuse_failed(outcomes: Sequence[Outcome], say: Callable[[str], None]) -> None:
    """Show the results of trials.

    Raises:
        ConfigError: an environment failed.
    """
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    if problems:
        raise ConfigError.of(problems)
    for outcome in outcomes:
        say(str(outcome))


class _Trial:
    """One environment's trial."""

    def __init__(
        self, folder: Path, name: str, environment: EnvironmentProcess, tables: Any, *, learns_alone: bool
    ) -> None:
        self.name, self.environment, self._learns_alone = name, environment.name, learns_alone
        self.outcome: Outcome | None = None
        self._report = folder / f"{name}.json"
        settings = folder / f"{name}.toml"
        replace_file(settings, tomli_w.dumps(dict(tables)).encode(), mode=0o600)  # it may hold an API key
        argv = (sys.executable, "-m", *environment_command(environment.name), "try", "--config", str(settings))
        env = {REPORT_VARIABLE: str(self._report), "PYTHONUNBUFFERED": "1"}
        self._process = Process(ProcessSpec(name, argv, env=env), folder / f"{name}.log")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._process.started

    @property
    def doing(self) -> str:
        """The step that runs, with its place in the user's code."""
        report = self._read()
        return f"{report.get('doing') or 'import'}{' at ' + report['at'] if report.get('at') else ''}"

    def look(self) -> None:
        """Set `outcome` if the trial has ended, or takes too long."""
        if self.outcome is not None:
            return
        code = self._process.exit_code
        report = self._read()
        if report.get("problems") or report.get("found") is not None:
            problems = [Problem(**problem) for problem in report["problems"]]
            if report["lone"] and not self._learns_alone:
                problems.append(LONE_ANSWERS)
            named, found = tuple(map(self._named, problems)), report["found"] or ""
            self.outcome = Outcome(self.environment, self.seconds, named, found)
        elif code is not None:
            self._process.drain()
            lines = [line.strip() for line in self._process.last_lines if line.strip()]
            got = f"exit code {code}{': ' + lines[-1][:300] if lines else ''}"
            problem = Problem(summary=f"{self.doing} ended its process", got=got, fix="correct it, or add --no-try")
            self.outcome = Outcome(self.environment, self.seconds, (self._named(problem),))
        elif self.seconds > LIMIT_S:
            self.outcome = Outcome(self.environment, self.seconds, doing=self.doing)
        if self.outcome is not None:
            self.end()

    def _named(self, problem: Problem) -> Problem:
        """Return a problem whose subject begins with the environment's name."""
        subject = f"--env {self.environment}"
        if problem.field.startswith("--env "):
            return problem
        return replace(problem, field=f"{subject}: {problem.field}" if problem.field else subject)

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self._report.read_bytes())
        except (OSError, ValueError):
            return {}

    def end(self) -> None:
        """End its process, which may tidy up first, and all that it started."""
        self._process.end(END_S)
