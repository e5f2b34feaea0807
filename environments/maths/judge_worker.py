"""`python -m environments.maths.judge_worker`: judge answers, one JSON object per line in and out.

This is a separate process because math-verify stops itself by SIGALRM. Only the main thread handles that signal, and
long arithmetic in C delays it. If no answer comes, the environment (`environments.maths.judge`) kills this process and
starts another.

    in:  {"gold": "18", "answer": "… \\boxed{18}", "form": "boxed"}
    out: {"strict": true, "lenient": true}

It also searches texts for a regular expression, which may take any time, too:

    in:  {"pattern": "a+", "texts": ["baa", "b"]}
    out: {"found": [true, false]}
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from typing import Any, Final

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from environments.maths.answer_form import AnswerForm, in_the_asked_form, last_number, read_number
from grpo_common.processes import end_with_parent

PATIENCE_S: Final = 2
"""Time limit of each parse and each comparison."""
MEMORY_BYTES: Final = 4 << 30
"""Memory limit: an answer such as 9^(9^9) could use any amount."""


def equal(gold: list[Any], text: str) -> bool:
    configs = (LatexExtractionConfig(), ExprExtractionConfig())
    found = parse(text, extraction_config=configs, parsing_timeout=PATIENCE_S)
    return bool(verify(gold, found, timeout_seconds=PATIENCE_S))


def judge(gold: str, answer: str, form: AnswerForm) -> dict[str, bool]:
    """Return the verdicts. Strict: right, and in the form that was asked for. Lenient: right in any form.

    If the right answer is a number, a strict answer is one number too; math-verify would also evaluate 17+1.
    """
    number, final = read_number(gold), in_the_asked_form(answer, form)
    wanted = parse(f"\\boxed{{{gold if number is None else number.text.rstrip('%')}}}", parsing_timeout=PATIENCE_S)
    if number is None:
        strict = final is not None and equal(wanted, f"\\boxed{{{final}}}")
    else:
        strict = final is not None and number.accepts(read_number(final))
    lenient = strict or equal(wanted, answer) or (number is not None and number.accepts(last_number(answer)))
    return {"strict": strict, "lenient": lenient}


def search(pattern: str, texts: list[str]) -> dict[str, list[bool]]:
    return {"found": [re.search(pattern, text) is not None for text in texts]}


def main() -> None:
    """Judge until the input ends, or the environment does, which may be killed while a search never ends."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a line that a library prints would be taken for a verdict, and each verdict for that of the next
    judge("x", "\\boxed{y}", "boxed")  # the first of all takes seconds on a busy machine, as math-verify imports more
    print("{}", file=replies, flush=True)  # the sign that the worker is ready
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps((search if "pattern" in request else judge)(**request)), file=replies, flush=True)


if __name__ == "__main__":
    main()
