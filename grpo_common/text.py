"""Text of unknown origin (samples, an environment's output, names from requests), made safe for a terminal or a log."""

from __future__ import annotations

import logging
from typing import Any

LONGEST = 500
"""Characters of a line that a person reads."""
BIDI = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""For `str.translate`: characters that turn the direction of all that follows, as a page shows them."""


def printable(text: str, limit: int | None = LONGEST) -> str:
    """Return one line that changes nothing but the place where it is shown.

    Control characters, line feeds, escape sequences and marks that turn the direction of writing are shown as Python
    writes them, such as `\\x1b`. Tabs stay. `limit` characters of `text` are kept, and the rest is counted; None: all.
    """
    rest = 0 if limit is None else len(text) - limit
    text = text if rest <= 0 else text[:limit]
    if not text.isprintable():
        text = "".join(
            each if each.isprintable() or each == "\t" else each.encode("unicode_escape").decode() for each in text
        )
    return text if rest <= 0 else f"{text}… ({rest:,} more characters)"


class Lines(str):
    """The last argument of a log record if its line feeds are meant, such as a stack."""

    __slots__ = ()


class PrintableFormatter(logging.Formatter):
    """Formats each record as one printable line: names from requests may hold anything.

    Tracebacks and a last argument of `Lines` keep their lines, each of them printable.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        last = record.args[-1] if isinstance(record.args, tuple) and record.args else None
        if isinstance(last, Lines) and message.endswith(last):
            return f"{printable(message.removesuffix(last).rstrip(), None)}\n{printable_lines(last)}"
        return printable(message, None)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


class PrintableRecords(logging.Filter):
    """Makes records printable before another library's handler formats them; tracebacks keep their lines.

    Messages of loggers that `ours` names are one line; messages of others keep their lines.
    """

    def __init__(self, *ours: str) -> None:
        super().__init__()
        self._ours = ours

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "uvicorn.access":  # its formatter reads the arguments: client, method, path, …
            parts = record.args if isinstance(record.args, tuple) else ()
            record.args = tuple(printable(part, None) if isinstance(part, str) else part for part in parts)
        else:
            try:
                text = record.getMessage()
            except Exception:  # arguments that do not fit: logging prints them with the call, and raises nothing
                return True
            one_line = record.name.startswith(self._ours)
            record.msg, record.args = printable(text.rstrip(), None) if one_line else printable_lines(text), None
        vars(record).pop("color_message", None)  # uvicorn's second form of the message, with the same arguments
        if record.exc_info and not record.exc_text:
            record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
        return True


def printable_lines(text: str) -> str:
    """Return the text with each of its lines `printable`."""
    return "\n".join(printable(line, None) for line in text.split("\n"))
