"""`python -m environments.maths.judge_worker`: judges answers, one JSON object a line in and one out.

A process of its own: math-verify stops itself by SIGALRM, which only the main thread hears and long arithmetic in C
does not; whoever asks (`environments.maths.judge`) ends this process when no answer comes, and starts another.

In:  {"gold": "18", "answer": "… \\boxed{18}", "form": "boxed"}
Out: {"strict": true, "lenient": true}
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any, Final

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from environments.maths.answer_form import AnswerForm, in_the_asked_form, last_number

PATIENCE_S: Final = 2
"""For each parse and each comparison."""
MEMORY_BYTES: Final = 4 << 30
"""An answer such as 9^(9^9) may want any amount."""


def equal(gold: list[Any], text: str) -> bool:
    """Whether math-verify reads the gold answer in a text."""
    configs = (LatexExtractionConfig(), ExprExtractionConfig())
    found = parse(text, extraction_config=configs, parsing_timeout=PATIENCE_S)
    return bool(verify(gold, found, timeout_seconds=PATIENCE_S))


def judge(gold: str, answer: str, form: AnswerForm) -> dict[str, bool]:
    """Strict: equal, and in the form that was asked for. Lenient: equal to what anyone would read as the answer."""
    wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=PATIENCE_S)
    final = in_the_asked_form(answer, form)
    strict = final is not None and equal(wanted, f"\\boxed{{{final}}}")
    number = last_number(answer)
    lenient = strict or equal(wanted, answer) or (number is not None and equal(wanted, number))
    return {"strict": strict, "lenient": lenient}


def main() -> None:
    """Judges until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("{}", flush=True)  # ready: the imports took most of a second
    for line in sys.stdin:
        print(json.dumps(judge(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
