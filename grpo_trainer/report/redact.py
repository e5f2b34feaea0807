"""What nobody else should read in configurations and logs."""

from __future__ import annotations

import re
from collections.abc import Sequence

SECRET = re.compile(r"(?m)^(\s*\S*(?:api_key|token|secret|password)\S*\s*=\s*)(.+)$")
"""A line of TOML that nobody else should read."""
NO_SECRET = frozenset({"token_budget"})

SECRET_FLAG = re.compile(r"--?\S*(?:api[-_]?key|token|secret|password)$")
"""A flag whose value nobody else should read, unless that is a number or the flag names a tokenizer."""
HIDDEN = "…"


def without_secrets(toml: str) -> str:
    """The same with keys to servers replaced."""
    return SECRET.sub(lambda match: match[0] if _is_harmless(match) else f'{match[1]}"{HIDDEN}"', toml)


def _is_harmless(match: re.Match[str]) -> bool:
    """Numbers, and names of tokenizers and budgets, are no secrets."""
    key, value = match[1].strip().rstrip("=").strip(), match[2].strip()
    return "tokenizer" in key or value.replace(".", "").isdigit() or key in NO_SECRET


def arguments_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line in which the values of secret flags are hidden, as `--flag VALUE` and as `--flag=VALUE`."""
    shown: list[str] = []
    for position, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        before = words[position - 1] if position else ""
        if equals and SECRET_FLAG.match(flag):
            shown.append(f"{flag}={HIDDEN}")
        elif SECRET_FLAG.match(before) and not word.startswith("--") and not word.isdigit():
            shown.append(HIDDEN)
        else:
            shown.append(word)
    return tuple(shown)
