"""What a user sees of a run: on a terminal one live line below all others, elsewhere a line a step."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from grpo_trainer.metrics.health import RECENT, REWARD, WINDOW, Row, duration, flagged, seconds_left
from grpo_trainer.phases import STARTING, Wait, report_at

BAR_WIDTH = 20
REFRESHES_PER_SECOND = 4
FIRST_SECONDS = 1.0
"""A phase of the start that takes less is not printed."""
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 16
"""Blocks of a whole sparkline."""


class Output(Console):
    """A console that is silent once nobody reads it. Rich's own ends the program: a trainer would save nothing."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _LogStream:
    """Stream of a logging handler: prints each record above the live line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def write(self, text: str) -> None:
        self._say(text.removesuffix("\n"))

    def flush(self) -> None:
        """Do nothing: each record is printed at once."""


class RunConsole:
    """Shows the start of a run and its steps. A context manager: its exit ends the live line.

    `grpo train` writes its steps to it. `grpo run`, whose trainer is another process, writes the rows of metrics.jsonl.
    Only a terminal has the live line. `waits` returns what the processes do now, until the first step is trained.
    """

    def __init__(self, console: Console, total_steps: int, waits: Callable[[], Sequence[Wait]] = tuple) -> None:
        self._console = console
        self._is_live = console.is_interactive and console.file.isatty()  # with FORCE_COLOR rich says it of a pipe
        self._total = total_steps
        self._waits = waits
        self._reported: dict[str, tuple[str, float]] = {}
        self._step = 0
        self._line = ""
        self._rewards: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._explained = False
        self._spinner: RenderableType = Spinner("dots")
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stderr=False,  # progress bars of libraries would become a line for each of their refreshes
        )
        self._handlers: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> RunConsole:
        if self._is_live:
            self._live.start(refresh=True)
            for handler in logging.getLogger().handlers if sys.stderr.isatty() else ():
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                    self._handlers.append(handler)
                    handler.setStream(_LogStream(self.say))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live line. The last step stays on the terminal."""
        while self._handlers:
            self._handlers.pop().setStream(sys.stderr)
        self._live.transient = not self._step
        self._spinner = ""
        self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """Print a line, on a terminal above the live line."""
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def remember(self, numbers: Row) -> None:
        """Take the reward of a step of an earlier process."""
        reward = numbers.get(REWARD)
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)

    def write(self, step: int, numbers: Row) -> None:
        """Show a step, and its evaluations; None stands for a number that is not finite, as in metrics.jsonl."""
        self.remember(numbers)
        known = {key: math.nan if value is None else value for key, value in numbers.items()}
        if "train/seconds" in known:
            self._recent.append(known["train/seconds"])
        left = seconds_left(self._total - step, self._recent)
        self._step, self._line = step, live_line(step, self._total, known, self._rewards, self._recent)
        if not self._is_live:
            self.say(step_line(step, self._total, known, left))
            learnt = "grpo/mean_ratio" in known
            if not self._explained and learnt and abs(known.get("train/loss", 1.0)) < 1e-3:
                self._explained = True
                text = "(a loss near 0 is right: the ratio is about 1 and advantages sum to 0; watch the reward)"
                self.say(text, style="dim")
        for evaluation in evaluation_lines(known):
            self.say(evaluation)

    def say_waits(self) -> None:
        """Print what the start waits for, if there is no live line: each phase once, long ones again."""
        for wait in () if self._is_live else self._waits():
            what, reported = self._reported.get(wait.name, (STARTING, 0.0))
            is_new = wait.what != what
            if wait.logged and not is_new:
                continue
            if wait.seconds >= (FIRST_SECONDS if is_new else report_at(reported)):
                self._reported[wait.name] = wait.what, 0.0 if is_new else wait.seconds
                self.say(waits_line([wait]), style="dim")

    def _render(self) -> Table:
        """Return the live line; the thread that refreshes it calls this."""
        row = Table.grid(padding=(0, 1))
        row.add_column()
        row.add_column()
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(self._total, self._step, width=BAR_WIDTH, pulse=not self._step)
        row.add_row(self._spinner, bar, Text(self._line or waits_line(self._waits())))
        return row


# Lines as text, pure functions ------------------------------------------------------------------------------


def live_line(
    step: int, total: int, numbers: dict[str, float], rewards: Sequence[float], recent: Sequence[float]
) -> str:
    """Return the run as of its last step: seconds a step, time left, reward with its course, and health.

    `numbers` are the last step's, `rewards` those of all steps, and `recent` has the seconds of the last ones.
    """
    seconds, left = seconds_left(1, recent), seconds_left(total - step, recent)
    health = "healthy" if len(rewards) >= WINDOW else ""
    parts = [
        f"step {step}/{total}",
        "" if seconds is None else f"{f'{seconds:.2f} s' if seconds < 10 else duration(seconds)} a step",
        f"{duration(left)} left" if left else "",
        f"reward {numbers[REWARD]:.3f} {sparkline(rewards)}" if REWARD in numbers else "",
        f"OUT OF RANGE: {', '.join(unusual)}" if (unusual := flagged(numbers)) else health,
    ]
    return "  ".join(filter(None, parts))


def sparkline(values: Sequence[float]) -> str:
    """Return the means of at most `SPARKS` equal parts of some values, as blocks from the lowest to the highest."""
    bounds = [part * len(values) // SPARKS for part in range(SPARKS + 1)]
    means = [fmean(values[begin:end]) for begin, end in pairwise(bounds) if begin < end]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(BLOCKS[round((mean - low) / (high - low or 1.0) * (len(BLOCKS) - 1))] for mean in means)


def waits_line(waits: Sequence[Wait]) -> str:
    """Return all that a start waits for in one line, with the last line of a server's log at its end."""
    notes = [wait.note for wait in waits if wait.note]
    return ": ".join(filter(None, ["; ".join(map(str, waits)), *notes[-1:]]))


def step_line(step: int, total: int, numbers: dict[str, float], left: float | None = None) -> str:
    """A step in one line: reward, loss, ratio, staleness, groups without a spread, tokens/s, seconds, time left, and
    which figures are out of their usual range.

    What there is no number of is left out; a step that taught nothing says so in the place of loss and ratio.
    """

    def part(form: str, *keys: str) -> str:
        return next((form.format(numbers[key]) for key in keys if key in numbers), "")

    learnt = [part("loss {:+.4f}", "train/loss"), part("ratio {:.3f}", "grpo/mean_ratio")]
    seconds = (
        part("wait {:.2f}", "train/data_fetch_time"),
        part("step {:.2f}", "train/step_time"),
        part("publish {:.3f} s", "train/sync_time"),
    )
    parts = [
        f"Step {step:>{len(str(total))}}/{total}",
        part("reward {:.3f}", "reward/mean"),
        *(learnt if "grpo/mean_ratio" in numbers else ["nothing to learn: no group has a spread of rewards"]),
        part("stale {:.1f}", "rollout/staleness_mean"),
        part("zero-var {:.0%}", "batch/zero_variance_share"),
        part("{:,.0f} tok/s", "train/tokens_per_second"),
        " ".join(filter(None, seconds)),
        part("v{:.0f}", "publish/served_version", "publish/version"),  # restarts serve older ones than were published
        f"{duration(left)} left" if left else "",
        f"OUT OF RANGE: {', '.join(unusual)}" if (unusual := flagged(numbers)) else "",
    ]
    return "  ".join(filter(None, parts))


def evaluation_lines(numbers: dict[str, float]) -> list[str]:
    """A line for each environment that was evaluated: at which step, and each figure with its confidence interval."""
    found: dict[str, dict[str, float]] = {}
    for key, value in numbers.items():
        if key.startswith("eval/"):
            _, name, figure = key.split("/", 2)
            found.setdefault(name, {})[figure] = value
    lines = []
    for name, figures in found.items():
        parts = []
        for key, value in figures.items():
            base, _, bound = key.rpartition("_")
            if key == "step" or (bound in ("low", "high") and base in figures):
                continue
            low, high = figures.get(f"{key}_low"), figures.get(f"{key}_high")
            interval = f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""
            parts.append(f"{key} {value:.4g}{interval}")
        lines.append(f"Evaluation of {name} at step {figures.get('step', 0):.0f}: {', '.join(parts)}")
    return lines
