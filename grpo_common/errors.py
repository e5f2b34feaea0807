"""Errors that a user can fix: the facts as data, and one rendering of them for all packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from grpo_common.redaction import HIDDEN, is_secret, redacted_text


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. Parts may be empty."""

    field: str = ""  # the subject: a flag (`--dtype`), a key of a request, a file, a process
    got: str = ""  # the value received, or the state found
    wanted: str = ""  # the value or state that would have been right
    fix: str = ""  # what the user can do, as an imperative
    summary: str = ""  # what happened, where `got` and `wanted` do not say it

    def __post_init__(self) -> None:
        """Hide secrets in what comes from users and other programs, so that no way of showing it can forget to."""
        is_value = is_secret(self.field) and self.got[:1] in tuple("'\"[{0123456789")
        for name, text in (("field", self.field), ("got", self.got), ("summary", self.summary)):
            clean = HIDDEN if name == "got" and is_value else redacted_text(text)
            if clean != text:
                object.__setattr__(self, name, clean)

    def __str__(self) -> str:
        """Return `FIELD: SUMMARY; got GOT, wanted WANTED; FIX` without the parts that are empty."""
        facts = [f"got {self.got}" if self.got else "", f"wanted {self.wanted}" if self.wanted else ""]
        parts = [self.summary, ", ".join(filter(None, facts)), self.fix]
        return ": ".join(filter(None, [self.field, "; ".join(filter(None, parts))]))


def wanted_by_pydantic(message: str) -> str:
    """Return the wanted value that a pydantic message names.

    For `Input should be greater than 0` that is `a number greater than 0`.
    """
    text = message.removeprefix("Value error, ").removeprefix("Input should be ").partition(", unable to parse")[0]
    return f"a number {text}" if text.startswith(("greater", "less")) else text


class UserError(Exception):
    """Base of every error that a user can fix. A command prints its message instead of a traceback.

    Attributes:
        problems: at least one. `field`, `got`, `wanted`, `fix` and `summary` are those of the first.
        exit_code: of the command that it ends.
    """

    exit_code = 1

    def __init__(
        self, summary: str = "", *, field: str = "", got: object = "", wanted: str = "", fix: str = ""
    ) -> None:
        problem = Problem(field, str(got), wanted, fix, summary)
        self._take([problem])
        super().__init__(str(problem))

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Self:
        """Return one error for several problems, at least one; its message has a line for each."""
        error = cls("\n".join(map(str, problems)))
        error._take(problems)
        return error

    def _take(self, problems: Sequence[Problem]) -> None:
        self.problems, first = tuple(problems), problems[0]
        self.field, self.got, self.wanted = first.field, first.got, first.wanted
        self.fix, self.summary = first.fix, first.summary


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add what is wrong within the block to a list instead of raising it, so that an error can name everything."""
    try:
        yield
    except UserError as error:
        problems += error.problems
