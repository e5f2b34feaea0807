"""Sets of small numbers as people write them: `0-3,28-31`."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_trainer.errors import ConfigError


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
