"""What Perfetto's importer of Chrome's JSON asks of a timeline ("Trace Event Format", Google, sections on phases)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def check_format(events: Sequence[Mapping[str, Any]]) -> None:
    """Each event has what its phase needs, and each asynchronous stage that began has ended."""
    open_stages: Counter[tuple[int, str, str]] = Counter()
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str), event
        match event["ph"]:
            case "M":
                assert event["name"] in {"process_name", "process_sort_index"} and event["args"], event
            case "X":
                assert event["dur"] >= 0 and event["ts"] >= 0 and isinstance(event["tid"], int), event
            case "b" | "e" as phase:
                assert event["cat"] and event["ts"] >= 0, event
                open_stages[event["pid"], event["name"], event["id2"]["local"]] += 1 if phase == "b" else -1
            case phase:
                raise AssertionError(f"phase {phase}")
    assert not +open_stages and not -open_stages
