"""Tries a run's environments before any process of the run starts: `python -m MODULE try`, a process for each.

A trial imports the environment, runs `setup`, takes an item, and scores two made-up answers to its prompt, all without
a server. Its settings are those of the run, except for ports. It writes how far it is to a file
(`environments.running.trial`), so that a step that does not end can be named.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
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
from grpo_trainer.signals import running_time

LIMIT_S = 20.0
"""Seconds after which a trial is given up with a warning, where a run waits for it."""
PATIENT_LIMIT_S = 120.0
"""The same for `grpo doctor` and a dry run, for which nothing waits."""
SLOW_S = 5.0
"""Seconds after which a trial says what it waits for."""
END_S = 3.0
"""Seconds that a trial has to end by itself."""
POLL_S = 0.05
REPORT_VARIABLE = "GRPO_TRIAL_REPORT"


class Trial:
    """One environment's trial, and its result."""

    def __init__(
        self, folder: Path, name: str, environment: EnvironmentProcess, tables: Any, config: RunConfig, patient: bool
    ) -> None:
        self.environment, self._config, self._is_patient = environment.name, config, patient
        self.doing = "import"  # the present step, with its place in the user's code
        self.problems: tuple[Problem, ...] = ()
        self.found = ""  # what was seen; empty: something is wrong, or the trial was given up
        self.seconds = 0.0
        self.is_over = self.is_slow = False
        self._report = folder / f"{name}.json"
        settings = folder / f"{name}.toml"
        replace_file(settings, tomli_w.dumps(dict(tables)).encode(), mode=0o600)  # it may hold an API key
        argv = (sys.executable, "-m", *environment_command(environment.name), "try", "--config", str(settings))
        env = {REPORT_VARIABLE: str(self._report), "PYTHONUNBUFFERED": "1"}
        self._process = Process(ProcessSpec(name, argv, env=env), folder / f"{name}.log")

    @property
    def limit_s(self) -> float:
        return PATIENT_LIMIT_S if self._is_patient else LIMIT_S

    def look(self) -> None:
        """Take the result if the trial has ended; end it if it takes too long."""
        code, report = self._process.exit_code, dict[str, Any]()
        with suppress(OSError, ValueError):
            report = json.loads(self._report.read_bytes())
        self.seconds = running_time() - self._process.started
        self.doing = f"{report.get('doing') or 'import'}{' at ' + report['at'] if report.get('at') else ''}"
        if report.get("problems") or report.get("found") is not None:
            problems = [Problem(**problem) for problem in report["problems"]]
            if (size := report["group_size"]) is not None:
                problems += self._problems_of_groups(size)
            self.problems, self.found = tuple(map(self._named, problems)), report["found"] or ""
        elif code is not None:
            self._process.drain()
            last = self._process.progress
            got = f"exit code {code}{': ' + last if last else ''}"
            problem = Problem(summary=f"{self.doing} ended its process", got=got, fix="correct it, or add --no-try")
            self.problems = (self._named(problem),)
        elif self.seconds <= self.limit_s:
            return
        self.end()

    def _problems_of_groups(self, size: int) -> Iterator[Problem]:
        """Yield what is wrong with groups of this size, which may be the default of the user's class."""
        trainer, prompts = self._config.trainer, self._config.options.prompts_per_step
        if size == 1 and not trainer.learns_from_lone_answers:
            yield LONE_ANSWERS
        if len(self._config.environments) > 1:  # groups of several sizes may add up to a step
            return
        sequences = trainer.sequences_per_step
        answers = sequences // prompts if prompts else size
        if size != answers or sequences % size:
            wanted = f"{answers}, as the run has planned" if size != answers else f"a divisor of {sequences}"
            got, fix = f"{size}, of the environment's class", f"add --env.group_size {size}"
            yield Problem("--env.group_size", got, wanted, fix)

    def _named(self, problem: Problem) -> Problem:
        """Return a problem whose subject begins with the environment's name."""
        subject = f"--env {self.environment}"
        if problem.field.startswith("--env "):
            return problem
        return replace(problem, field=f"{subject}: {problem.field}" if problem.field else subject)

    def end(self) -> None:
        """End its process, which may tidy up first, and all that it started."""
        if not self.is_over:
            self.is_over = True
            self._process.end(END_S)

    def __str__(self) -> str:
        """Return the result as one line, or a line for each problem."""
        if self.problems:
            return "\n".join(map(str, self.problems))
        if self.found:
            return f"environment {self.environment}: {self.found} (tried in {self.seconds:.1f} s)"
        return (
            f"environment {self.environment}: not tried to its end, {self.doing} runs longer than "
            f"{self.seconds:.0f} s, so its scores and the size of its groups are not checked; "
            f"`grpo env {self.environment} try` waits longer, --no-try leaves the trial out"
        )


class Trials(list[Trial]):
    """The trials of a run's environments, which run at the same time."""

    def outcomes(self, say: Callable[[str], None] = lambda line: None) -> list[Trial]:
        """Wait for all trials, and return them; `say` takes a line about each that takes long."""
        while waiting := [trial for trial in self if not trial.is_over]:
            for trial in waiting:
                trial.look()
                if not (trial.is_over or trial.is_slow) and trial.seconds > SLOW_S:
                    trial.is_slow = True
                    say(f"environment {trial.environment}: {trial.seconds:.0f} s of its trial, still in {trial.doing}")
            time.sleep(POLL_S)
        return self

    def check(self, say: Callable[[str], None]) -> None:
        """Wait for all trials, and show their results; raise a `ConfigError` if an environment failed."""
        if problems := [problem for trial in self.outcomes(say) for problem in trial.problems]:
            raise ConfigError.of(problems)
        for trial in self:
            say(str(trial))


@contextmanager
def trying(config: RunConfig, *, everything: bool = False, patient: bool = False) -> Iterator[Trials]:
    """Try the environments in the background of a block, unless the options say otherwise.

    With `everything`, also the built-in environments of which only the settings can be wrong; `patient`: nothing waits
    for them.
    """
    trials = Trials()
    with TemporaryDirectory(prefix="grpo-try-", ignore_cleanup_errors=True) as folder:
        try:
            for name, environment, tables in environment_settings(config) if config.options.try_environments else ():
                built_in = BUILT_IN.get(environment.name)
                if everything or built_in is None or built_in.is_tried:
                    trials.append(Trial(Path(folder), name, environment, tables, config, patient))
            yield trials
        finally:
            for trial in trials:
                trial.end()
