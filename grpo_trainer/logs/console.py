"""What a user sees of a run: on a terminal one live line below all others, elsewhere a line a step."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from grpo_trainer.logs.lines import evaluation_lines, live_line, step_line, waits_line
from grpo_trainer.metrics.health import REWARD, Row
from grpo_trainer.metrics.remaining import RECENT, seconds_left
from grpo_trainer.phases import STARTING, Wait, report_at

BAR_WIDTH = 20
REFRESHES_PER_SECOND = 4
FIRST_SECONDS = 1.0
"""A phase of the start that takes less is not printed."""


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

    Args:
        console: on a terminal there is a live line, elsewhere each step is a line.
        waits: returns what the processes do now, until the first step is trained.
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
            handlers = logging.getLogger().handlers if sys.stderr.isatty() else ()
            streams = [each for each in handlers if isinstance(each, logging.StreamHandler)]
            self._handlers = [each for each in streams if each.stream is sys.stderr]
            for handler in self._handlers:
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
        """Show a step, and its evaluations.

        Args:
            numbers: None stands for a number that is not finite, as in metrics.jsonl.
        """
        self.remember(numbers)
        known = {key: math.nan if value is None else value for key, value in numbers.items()}
        if "train/seconds" in known:
            self._recent.append(known["train/seconds"])
        left = seconds_left(self._total - step, self._recent)
        self._step, self._line = step, live_line(step, self._total, known, self._rewards, self._recent)
        if not self._is_live:
            self.say(step_line(step, self._total, known, left))
            self._explain_loss(known)
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

    def _explain_loss(self, numbers: dict[str, float]) -> None:
        learnt = "grpo/mean_ratio" in numbers
        if not self._explained and learnt and abs(numbers.get("train/loss", 1.0)) < 1e-3:
            self._explained = True
            self.say(
                "(a loss near 0 is right: the ratio is about 1 and advantages sum to 0; watch the reward)", style="dim"
            )

    def _render(self) -> Table:
        """Return the live line; the thread that refreshes it calls this."""
        row = Table.grid(padding=(0, 1))
        row.add_column()
        row.add_column()
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(self._total, self._step, width=BAR_WIDTH, pulse=not self._step)
        row.add_row(self._spinner, bar, Text(self._line or waits_line(self._waits())))
        return row
