"""Samples as data for the page's script: whole steps, spread over the run, as many as fit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_BYTES = 800_000
"""Of all samples on a page."""
SEPARATOR = "\x1f"
"""Between tokens; no tokenizer makes it of text."""
UNKNOWN, NOT_TRAINED, SAME = "~", "!", ord("P")
"""In the place of a ratio: it is not known, the token is not trained; a ratio of 1."""
UNIT, MOST_UNITS = 0.04, 28
"""A ratio is e to this, times the distance of its character from `SAME`: 4 % is what a reader can tell apart."""


def sample_data(rows: Sequence[Mapping[str, Any]], run: int, most: int = MOST_BYTES) -> dict[str, Any]:
    """The samples of one run: all of them, or those of steps that are evenly spread."""
    chosen = _fitting([_sample(row) for row in rows], most)
    return {"run": run, "of": len(rows), "samples": chosen}


def _fitting(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    sizes = {step: len(json.dumps(own, ensure_ascii=False).encode()) for step, own in by_step.items()}
    steps = sorted(by_step)
    kept = steps
    while len(kept) > 1 and (size := sum(sizes[step] for step in kept)) > most:
        kept = evenly(steps, max(1, min(len(kept) - 1, int(len(kept) * most / size))))
    return [sample for step in kept for sample in by_step[step]]


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """Return `count` steps at even distances, the first and the last included; if `count` is 1, the last."""
    if count == 1:
        return [steps[-1]]
    return [steps[round(at * (len(steps) - 1) / (count - 1))] for at in range(count)]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    pieces = zip(row["ratios"], row["trained"], strict=True)
    return {
        **{key: row[key] for key in ("step", "version", "environment", "group", "cut", "prompt")},
        **{key: round(row[key], 4) for key in ("reward", "advantage")},
        "pieces": SEPARATOR.join(piece.replace(SEPARATOR, "") for piece in row["pieces"]),
        "ratios": "".join(character(ratio, trained=trained) for ratio, trained in pieces),
    }


def character(ratio: float | None, *, trained: bool) -> str:
    """One character for a token: how much likelier the policy makes it than it was when it was sampled."""
    if not trained:
        return NOT_TRAINED
    if ratio is None:
        return UNKNOWN
    units = round(math.log(max(ratio, 1e-9)) / UNIT)
    return chr(SAME + max(-MOST_UNITS, min(MOST_UNITS, units)))
