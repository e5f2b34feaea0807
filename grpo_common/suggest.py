"""The known name of which a wrong one is a misspelling, for the fix of an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKENESS = 0.78
"""Least share of equal characters (`difflib`'s ratio) of a misspelling: `lerning_rate`, but not `group_size` for
`world_size` (0.6) or `temperature` for `distill_temperature` (0.73)."""
OF_FILES = 0.7
"""Least likeness of files' and folders' names, which people also cut short: `reverse` for `reverse_text`."""


def nearest(name: str, known: Iterable[str], likeness: float = LIKENESS) -> str | None:
    """Return the known name of which `name` is a misspelling; None: none is near enough to be suggested."""
    # In a short name one wrong letter is a large share.
    least = min(likeness, 1 - 1.001 / len(name)) if len(name) > 2 else likeness
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=least)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, prefix: str = "") -> str:
    """Return the fix of an unknown option or function: `did you mean X?`, or `otherwise` where no known name is near.

    Names that differ only in their table come first: `env.group_size` for `group_size` or `openai.group_size`. The
    `prefix`, such as `--`, stands before each suggested name.
    """
    known, last = list(known), name.rpartition(".")[2]
    near = [each for each in known if each.rpartition(".")[2] == last and each != name]
    near = near or [each for each in (nearest(name, known),) if each is not None]
    return f"did you mean {' or '.join(prefix + each for each in near)}?" if near else otherwise
