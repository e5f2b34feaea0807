"""What pydantic finds wrong with values, as problems of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError

from grpo_common.errors import Problem, UserError, wanted_by_pydantic

Place = tuple[str | int, ...]


def problems_of(error: ValidationError, flag_at: Callable[[Place], tuple[str, bool]]) -> list[Problem]:
    """Return each finding with the option as it was written, what came, and what was wanted.

    A validator may raise a `UserError`; it need not know the field and the value.

    Args:
        flag_at: what a place in the values is called, and whether one option stands there; otherwise it is a section,
            whose values are not shown: a key may be among them.
    """
    problems: list[Problem] = []
    for finding in error.errors():
        flag, is_option = flag_at(finding["loc"])
        context = finding.get("ctx", {})
        raised = context.get("error")
        if finding["type"] == "missing":
            problems.append(Problem(flag, "nothing", "a value: it is required"))
        elif finding["type"] == "union_tag_invalid":
            problems.append(Problem(flag, str(context.get("tag")), f"one of {context.get('expected_tags')}"))
        elif isinstance(raised, UserError):
            got = str(finding["input"]) if is_option else ""
            problems += [replace(each, field=each.field or flag, got=each.got or got) for each in raised.problems]
        else:
            wanted = wanted_by_pydantic(finding["msg"])
            problems.append(Problem(flag, str(finding["input"]) if is_option else "", wanted[0].lower() + wanted[1:]))
    return problems
