"""Find the result in an answer: in the form that was asked for, or as the last number."""

from __future__ import annotations

import re
from typing import Final, Literal

AnswerForm = Literal["boxed", "hashes"]
"""`\\boxed{18}`, or `#### 18` on a separate line."""

NUMBER: Final = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def in_the_asked_form(answer: str, form: AnswerForm) -> str | None:
    """Return the text in the last `\\boxed{…}` or after the last ####; None if the answer does not have this form."""
    if form == "hashes":
        _, marker, after = answer.rpartition("####")
        lines = after.strip().splitlines()
        return lines[0].strip() if marker and lines else None
    start = answer.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[place], 0)
        if depth == 0:
            return answer[start + len("\\boxed{") : place].strip() or None
    return None


def last_number(text: str) -> str | None:
    """Return the last number in a text, without thousands separators and dollar signs."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "").replace("$", "") if numbers else None
