r"""Find the result in an answer, and read it as a number. Everything here that compares numbers reads them with this.

`read_number` reads text that is a number and nothing else, with one unit, currency sign or word at most: `18`,
`$1,800`, `18 dollars`, `\frac{1}{2}`, `5\%`. It reads no sums and no equations: a reward for `\boxed{1+17}` teaches the
policy to leave the sum to the judge. `last_number` reads the last number of any text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

AnswerForm = Literal["boxed", "hashes"]
"""`\\boxed{18}`, or `#### 18` on a separate line."""

LONGEST: Final = 60
"""Characters of a number. Longer ones are read as none: an answer may have thousands of digits."""
SPACES: Final = " \u00a0\u2009\u202f"
"""Each of them separates thousands, also within other text: `5 000 apples` are not 0."""
SCALES: Final = frozenset(
    (
        *("hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "bn", "mn", "lakh", "crore"),
        *("half", "halve", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
        *("hundredth", "thousandth", "squared", "cubed", "factorial", "percent", "pi"),
        *("and", "or", "not", "no", "to", "plus", "minus", "times", "over"),
    )
)
"""Words after a number that are no units: they change its value, or leave it open."""
SHORT_UNITS: Final = ("m", "g", "l", "L", "s", "h", "t")
"""Units of one letter; another letter may be a variable, or mean thousands."""
GROUPED: Final = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[1-9][0-9]{{0,2}}(?:[{SPACES}][0-9]{{3}})+)(?![0-9])"
"""A number with separators of thousands: all of them commas, or all of them spaces."""
VALUE: Final = (
    rf"(?:(?:(?P<whole>[0-9]+)[{SPACES}](?!0))?(?<!/)(?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?![0-9/])"
    rf"|(?P<digits>{GROUPED}|[0-9]+)(?P<decimals>\.[0-9]+)?|(?<![\w.])(?P<bare>\.[0-9]+))"
)
"""A number without a sign."""
SIGN: Final = "[-+\u2212]"
CURRENCY: Final = r"(?:(?:US|A|C|NZ)?\$|[€£¥₹₩₽¢]|USD\b|EUR\b|GBP\b|CHF\b|INR\b|JPY\b|CNY\b|Rs\b\.?)"
PERCENT: Final = r"(?:%|per\s?cent\b)"
WORD: Final = r"[^\W\d_]+(?:['’-][^\W\d_]+)*(?:\s*+\^\{?[23]\}?|[²³])?"
UNIT: Final = rf"(?:°[CF]?|{WORD}(?:\s*+/\s*+{WORD})?)"
ALONE: Final = re.compile(
    rf"(?P<sign>{SIGN})?\s*+(?P<before>{CURRENCY})?\s*+(?P<inner>{SIGN})?{VALUE}\s*+"
    rf"(?:(?P<percent>{PERCENT})|(?P<after>{CURRENCY})|(?P<unit>{UNIT}))?\.?",
    re.IGNORECASE,
)
# Not after a letter, nor in an exponent: "m^2" and "cm2" end without a number.
WITHIN: Final = re.compile(
    rf"(?P<sign>{SIGN})?(?:\$|[€£¥])?(?<![A-Za-z0-9_^])(?<!\^\{{){VALUE}(?:\s?(?P<percent>{PERCENT}))?",
    re.IGNORECASE,
)
TEXT: Final = r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)"
LATEX: Final = (
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;: ]|~"), "\u202f"),
    (re.compile(rf"(?:{TEXT})?\{{,\}}"), ","),
    # 2\frac12 is 2 1/2, and -\frac12 is one number.
    (re.compile(rf"(?<![-+\u2212\s])(?=\\[dt]?frac|{TEXT})"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2 "),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2 "),
    (re.compile(rf"{TEXT}\s*\{{([^{{}}]*)\}}"), r"\1 "),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\^\s*\{?\\circ\}?|\\degree\b"), "°"),
)
WRAPPINGS: Final = ("**", "$$", "$")


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read."""

    value: Fraction
    """1/20 for 5 %."""
    percent: bool
    text: str
    """As it was written, without unit, currency and separators of thousands."""

    def accepts(self, answer: Number | None) -> bool:
        """Return whether an answer is this number. The sign of a percentage may be left out: 5 is right for 5 %."""
        if answer is None:
            return False
        bare = self.percent and not answer.percent
        return answer.value == self.value or (bare and answer.value == 100 * self.value)


def read_number(text: str) -> Number | None:
    """Return the number that a text is; None if it is none, several, or something to calculate.

    A fraction must be in lowest terms: 36/2 is a division.
    """
    text = text.strip()
    for mark in WRAPPINGS:
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text.removeprefix(mark).removesuffix(mark).strip()
    found = ALONE.fullmatch(_plain(text).strip())
    if found is None or (found["before"] and (found["percent"] or found["after"] or found["unit"])):
        return None
    unit = (found["unit"] or "").rstrip(".")
    is_variable = len(unit) == 1 and unit.isalpha() and unit not in SHORT_UNITS
    if is_variable or {unit.casefold(), unit.casefold().removesuffix("s")} & SCALES:
        return None
    if found["sign"] and found["inner"]:
        return None
    number = _number(found, found["sign"] or found["inner"] or "")
    if number is None or found["top"] is None:
        return number
    top, bottom = int(found["top"]), int(found["bottom"])
    proper = found["whole"] is None or top < bottom
    return number if proper and Fraction(top, bottom).denominator == bottom > 1 else None


def last_number(text: str) -> Number | None:
    """Return the last number in a text. The end of 10-12 is 12, and not -12."""
    text = _plain(text)
    found = next(iter([*WITHIN.finditer(text)][-1:]), None)
    if found is None:
        return None
    before = text[: found.start()]
    subtracted = before[-1:].isalpha() or before.rstrip(SPACES)[-1:] in tuple("0123456789)]}%")
    return _number(found, "" if subtracted else found["sign"] or "")


def final_number(answer: str) -> Number | None:
    r"""Return the number in an answer's last `\boxed{…}`, or its last number if it has no box."""
    boxed = in_the_asked_form(answer, "boxed")
    return last_number(answer) if boxed is None else read_number(boxed)


def in_the_asked_form(answer: str, form: AnswerForm) -> str | None:
    """Return the text in the last `\\boxed{…}` or after the last ####; None if the answer does not have this form."""
    if form == "hashes":
        _, marker, after = answer.rpartition("####")
        lines = after.strip().splitlines()
        return lines[0].strip() if marker and lines else None
    _, marker, after = answer.rpartition("\\boxed{")
    depth = 1
    for place, sign in enumerate(after if marker else ""):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return after[:place].strip() or None
    return None


def _plain(text: str) -> str:
    """Return text without the LaTeX that numbers are written with."""
    for pattern, plain in LATEX if "\\" in text or "{,}" in text or "~" in text else ():
        text = pattern.sub(plain, text)
    return text


def _number(found: re.Match[str], sign: str) -> Number | None:
    """Return the number of a match; None if it is too long or divides by zero."""
    if len(found[0]) > LONGEST or (found["bottom"] is not None and not int(found["bottom"])):
        return None
    if found["top"] is not None:
        text = f"{found['whole'] or ''} {found['top']}/{found['bottom']}".strip()
        value = int(found["whole"] or 0) + Fraction(int(found["top"]), int(found["bottom"]))
    else:
        text = found["bare"] or re.sub(r"[^0-9]", "", found["digits"]) + (found["decimals"] or "")
        value = Fraction(text)
    minus, percent = sign not in ("", "+"), found["percent"] is not None
    value = (-value if minus else value) / (100 if percent else 1)
    return Number(value, percent, ("-" if minus else "") + text + ("%" if percent else ""))
