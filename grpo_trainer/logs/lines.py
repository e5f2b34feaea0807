"""A run's lines as text: a step, its evaluations, the live line. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from grpo_trainer.metrics.health import REWARD, WINDOW, flagged
from grpo_trainer.metrics.remaining import duration, seconds_left
from grpo_trainer.phases import Wait

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 16
"""Blocks of a whole sparkline."""


def live_line(
    step: int, total: int, numbers: dict[str, float], rewards: Sequence[float], recent: Sequence[float]
) -> str:
    """Return the run as of its last step: seconds a step, time left, reward with its course, and health.

    Args:
        numbers: of the last step.
        rewards: of all steps.
        recent: seconds of the last steps.
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

    Args:
        left: seconds that the run still takes, if they are known.
    """
    served = "publish/served_version" if "publish/served_version" in numbers else "publish/version"

    def part(form: str, key: str) -> str:
        return form.format(numbers[key]) if key in numbers else ""

    learnt = [part("loss {:+.4f}", "train/loss"), part("ratio {:.3f}", "grpo/mean_ratio")]
    seconds = [
        part("wait {:.2f}", "train/data_fetch_time"),
        part("step {:.2f}", "train/step_time"),
        part("publish {:.3f} s", "train/sync_time"),
    ]
    parts = [
        f"Step {step:>{len(str(total))}}/{total}",
        part("reward {:.3f}", "reward/mean"),
        *(learnt if "grpo/mean_ratio" in numbers else ["nothing to learn: no group has a spread of rewards"]),
        part("stale {:.1f}", "rollout/staleness_mean"),
        part("zero-var {:.0%}", "batch/zero_variance_share"),
        part("{:,.0f} tok/s", "train/tokens_per_second"),
        " ".join(filter(None, seconds)),
        part("v{:.0f}", served),  # older than what was published, where restarts are far between
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
    return [_evaluation_line(name, figures) for name, figures in found.items()]


def _evaluation_line(name: str, figures: dict[str, float]) -> str:
    parts = []
    for key, value in figures.items():
        base, _, bound = key.rpartition("_")
        if key == "step" or (bound in ("low", "high") and base in figures):
            continue
        low, high = figures.get(f"{key}_low"), figures.get(f"{key}_high")
        parts.append(
            f"{key} {value:.4g}" + (f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else "")
        )
    return f"Evaluation of {name} at step {figures.get('step', 0):.0f}: {', '.join(parts)}"
