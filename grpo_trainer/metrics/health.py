"""Is a run healthy, did it learn, and how long does it still take? Pure functions of the rows of metrics.jsonl.

A figure is unhealthy when its median over the last steps leaves its usual range. Ranges are those of the runs in
docs/training.md: what learns stays within them, what collapses leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Literal

Row = Mapping[str, float | None]

WINDOW = 3
"""Steps of which the median is taken: one step alone, a spike, says little."""
REWARD = "reward/mean"
ENTROPY = "grpo/entropy"
GRAD_NORM = "train/grad_norm"
USUAL_GROWTH = 10.0
"""Times its median in the first steps, a run's gradient norm may be: what is usual differs by model and loss."""
SAME_ANSWERS, SAME_IN_GROUP = "batch/same_answers", "batch/same_answers_in_group"
FEWEST_STEPS = 10
"""With fewer, the rewards of beginning and end are too few to compare."""
LEAST = 5
"""Steps of the beginning, and of the end, at least."""


@dataclass(frozen=True)
class Check:
    """The usual range of one figure."""

    name: str  # of its flag: the metric `health/NAME` is 1 while the figure is out of its range, else 0
    title: str
    key: str  # of metrics.jsonl
    low: float  # a KL of 0 may be rounded to below 0, so it has no lower end
    high: float
    says: str  # what it means when it leaves the range
    fix: str  # the first thing to try
    harms: bool = True  # a run with such a figure at its end is not healthy, whatever its reward


INF = math.inf
LOWER_LR = "a lower --lr; then fewer stale samples (--max-staleness)"
# fmt: off
CHECKS = (
    Check("kl", "KL", "alignment/kl_rollout", -INF, 1.0,
          "the policy moves far from the one that sampled", LOWER_LR),
    Check("kl_reference", "KL to the reference", "alignment/kl_reference", -INF, 5.0,
          "the policy is far from the model it started as", "a lower --lr; then a larger --kl-beta"),
    Check("entropy_low", "entropy", ENTROPY, 0.02, INF,
          "the policy hardly explores: the answers of a group are alike",
          "--clip-eps-high 0.28, or a lower --lr", harms=False),
    Check("collapse", "equal answers to different prompts", SAME_ANSWERS, -INF, 0.2,
          "the policy has collapsed: it answers without regard to the prompt", LOWER_LR),
    Check("entropy_high", "entropy", ENTROPY, -INF, 1.0,
          "the policy becomes random", LOWER_LR),
    Check("grad_norm", "gradient norm", GRAD_NORM, -INF, 10.0,
          "the updates' directions are erratic",
          "a lower --lr; then more sequences in a step (--gradient-accumulation-steps)"),
    Check("zero_variance", "zero-variance groups", "batch/zero_variance_share", -INF, 0.8,
          "most groups have equal rewards and teach nothing",
          "tasks that the model solves sometimes; then larger groups (--env.group_size)", harms=False),
    Check("ratio", "ratio", "grpo/mean_ratio", 0.8, 1.25,
          "the samples are not of the policy that trains on them", LOWER_LR),
)
# fmt: on


@dataclass(frozen=True)
class Sign:
    """A figure out of its usual range."""

    check: Check
    value: float
    low: float
    high: float

    @property
    def short(self) -> str:
        return f"{self.check.title} {self.value:.3g}"

    def __str__(self) -> str:
        """Return the banner: the figure, its usual range, what it means, and the first thing to try."""
        usual = f"at most {self.high:.3g}" if self.value > self.high else f"at least {self.low:.3g}"
        return f"{self.short} (usual: {usual}): {self.check.says}; first try {self.check.fix}"


def baseline(rows: Sequence[Row]) -> Row:
    """Return the figures of a run's beginning by which later ones are judged.

    Those of its first step, as a collapse may begin with the second, and the median of its first gradient norms.
    """
    first = {key: found[0] for key in (ENTROPY, SAME_ANSWERS) if (found := _finite(rows, key))}
    norms = _finite(rows, GRAD_NORM)[:WINDOW]
    return first | ({GRAD_NORM: median(norms)} if norms else {})


def signs(recent: Sequence[Row], first: Row) -> list[Sign]:
    """Return what is out of its range, by a run's `baseline`, in the last `WINDOW` rows; fewer say nothing yet."""
    if len(recent) < WINDOW:
        return []
    found = []
    for check in CHECKS:
        values, high = _finite(recent[-WINDOW:], check.key), _high(check, recent[-WINDOW:], first)
        if len(values) == WINDOW and not check.low <= (value := median(values)) <= high:
            found.append(Sign(check, value, check.low, high))
    return found


def _high(check: Check, recent: Sequence[Row], first: Row) -> float:
    """Return the upper end of a figure's range in a run.

    A gradient norm is erratic only with more than `USUAL_GROWTH` times that of the first steps.
    A policy is random only with more than twice the entropy of the first step. It has collapsed if answers to different
    prompts are equal about as often as answers to one prompt, and twice as often as in the first step, with less than
    half the entropy: where few answers are right, as with yes and no, those to one prompt are alike more often.
    """
    entropy = first.get(ENTROPY) or 0.0
    if check.name == "entropy_high":
        return max(check.high, 2 * entropy)
    if check.name == "grad_norm":
        return max(check.high, USUAL_GROWTH * (first.get(GRAD_NORM) or 0.0))
    if check.name != "collapse":
        return check.high
    now, in_group = _finite(recent, ENTROPY), _finite(recent, SAME_IN_GROUP)
    if not in_group or (now and entropy and 2 * median(now) > entropy):
        return math.inf
    return max(check.high, 0.8 * median(in_group), 2 * (first.get(SAME_ANSWERS) or 0.0))


def flags(found: Sequence[Sign]) -> dict[str, float]:
    """Return `health/NAME` for every check: 1 while its figure is out of its range, else 0."""
    names = {sign.check.name for sign in found}
    return {f"health/{check.name}": float(check.name in names) for check in CHECKS}


def flagged(numbers: Row) -> list[str]:
    """Return the titles of the figures that a step's row has out of their range."""
    return list(dict.fromkeys(check.title for check in CHECKS if numbers.get(f"health/{check.name}")))


@dataclass(frozen=True)
class Episode:
    """Consecutive rows during which a figure was out of its usual range."""

    sign: Sign  # of the first of them
    first: int  # index of a row
    last: int


def episodes(rows: Sequence[Row]) -> dict[str, list[Episode]]:
    """Return the episodes of a run by name of the check; the figure that left its range first comes first."""
    first = baseline(rows)
    found: dict[str, list[Episode]] = {}
    for at in range(WINDOW - 1, len(rows)):
        for sign in signs(rows[at + 1 - WINDOW : at + 1], first):
            own = found.setdefault(sign.check.name, [])
            if own and own[-1].last == at - 1:
                own[-1] = replace(own[-1], last=at)
            else:
                own.append(Episode(sign, at, at))
    return found


def _finite(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := row.get(key)) is not None and math.isfinite(value)]


@dataclass(frozen=True)
class Outcome:
    """The reward of a run's first and last tenth: mean and standard deviation over steps."""

    first: float
    first_spread: float
    last: float
    last_spread: float
    steps: int  # in each tenth, five at least
    of: int
    harm: Sign | None = None  # what is out of its usual range at the end of the run, so that its reward says little

    @property
    def verdict(self) -> Literal["it learnt", "it got worse", "no clear change", "not healthy"]:
        """Whether the means differ by more than two standard errors of their difference."""
        rise = self.last - self.first
        is_clear = abs(rise) > 2 * math.sqrt((self.first_spread**2 + self.last_spread**2) / self.steps)
        if is_clear and rise < 0:
            return "it got worse"
        return "not healthy" if self.harm is not None else "it learnt" if is_clear else "no clear change"

    def __str__(self) -> str:
        harm = f", {self.harm.short}" if self.verdict == "not healthy" and self.harm else ""
        return (
            f"{self.verdict}{harm}: reward "
            f"{self.first:.3f} ± {self.first_spread:.3f} in the first {self.steps} of {self.of} steps, "
            f"{self.last:.3f} ± {self.last_spread:.3f} in the last {self.steps}"
        )


def outcome(rows: Sequence[Row]) -> Outcome | None:
    """Return what a run's rewards and health say; None: it has too few steps."""
    rewards = [reward for row in rows if (reward := row.get(REWARD)) is not None]
    if len(rewards) < FEWEST_STEPS:
        return None
    steps = max(LEAST, len(rewards) // 10)
    first, last = rewards[:steps], rewards[-steps:]
    late = [own[-1].sign for own in episodes(rows).values() if own[-1].last == len(rows) - 1]
    harm = next((sign for sign in late if sign.check.harms), None)
    return Outcome(fmean(first), stdev(first), fmean(last), stdev(last), steps, len(rewards), harm)


def learnt(rows: Sequence[Row]) -> str:
    """Return whether a run learnt, as one line."""
    found = outcome(rows)
    return str(found) if found else f"too few steps to say whether it learnt: {len(rows)}, of at least {FEWEST_STEPS}"


def last_line(rows: Sequence[Row], sample: str = "") -> str:
    """Return whether a run learnt, which figures left their usual range, and the first thing to try.

    A sample in words is shown if the reward did not move.
    """
    left = [own[0].sign.check for own in episodes(rows).values()]
    names = ", ".join(dict.fromkeys(check.title for check in left))
    found = outcome(rows)
    shown = f"\na sample: {sample}" if sample and found and found.verdict == "no clear change" else ""
    tried = f"; out of the usual range: {names}; first try {left[0].fix}" if left else ""
    return f"{learnt(rows)}{tried}{shown}"


# ---------------------------------------------------------------- time

RECENT = 50
"""Number of last steps for the estimate."""


def seconds_left(steps: int, recent: Sequence[float]) -> float | None:
    """Return the seconds that `steps` more steps take, each the mean of the recent ones; None: they are fewer than two.

    The longest of `recent` counts as the second longest. So a single outlier (the first step, which waits for
    the first rollouts and compiles) does not matter, but repeated ones (saves, restarts) do.
    """
    if len(recent) < 2:
        return None
    *others, second, _ = sorted(recent)
    return steps * (sum(others) + 2 * second) / len(recent)


def duration(seconds: float) -> str:
    """Return `119 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
