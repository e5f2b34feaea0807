"""Values as people write them: numbers as `0-3,28-31`, words between commas, secrets in environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from grpo_trainer.errors import ConfigError

LARGEST_PORT = 65_535


def at_home(path: Path) -> Path:
    """Replace a leading `~` as a shell does. In a file no shell does it, and in `--run-dir=~/runs` none either."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path  # of no known user


def parse_ranges(text: str) -> tuple[int, ...]:
    """`"28-29,0"` as `(0, 28, 29)`: ascending, each once.

    Raises:
        ConfigError: it is no list of numbers and rising ranges.
    """
    numbers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(got=part or "nothing", wanted="numbers and ranges, such as 0-3,28-31")
        start, end = int(first), int(last) if dash else int(first)
        if not start <= end < 10_000:
            raise ConfigError(got=part, wanted="rising ranges below 10000, such as 0-3,28-31")
        numbers.update(range(start, end + 1))
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """`(0, 28, 29)` as `"0,28-29"`: what `parse_ranges` reads back."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


Ranges = Annotated[str, AfterValidator(lambda text: format_ranges(parse_ranges(text)))]
"""Numbers that `parse_ranges` reads, in their shortest form."""


def split_arguments(text: str) -> tuple[str, ...]:
    """Split at commas, but not within quotes, brackets or braces: an argument may be JSON.

    `--seed,7` gives two words, `--compilation-config={"level":3,"backend":""}` one.
    """
    words, depth, quoted = [""], 0, False
    for position, sign in enumerate(text):
        if sign == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not quoted and depth <= 0:
            words.append("")
        else:
            words[-1] += sign
    return tuple(word for word in words if word)


Arguments = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: split_arguments(value) if isinstance(value, str) else value)
]
"""Further arguments of a process."""


def _split(value: Any) -> Any:
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


COMMA_SEPARATED = BeforeValidator(_split)
"""Of a tuple of words."""


def from_variable(name: str) -> BeforeValidator:
    """Of a secret: without a value it is that of an environment variable, which no list of processes shows."""
    return BeforeValidator(lambda value: value or os.environ.get(name) or None)
