"""What nobody else should read in configurations and logs."""

from __future__ import annotations

import re

SECRET = re.compile(r"(?m)^(\s*\S*(?:api_key|token|secret|password)\S*\s*=\s*)(.+)$")
"""A line of TOML that nobody else should read."""
NO_SECRET = frozenset({"token_budget"})


def without_secrets(toml: str) -> str:
    """The same with keys to servers replaced."""
    return SECRET.sub(lambda match: match[0] if _is_harmless(match) else f'{match[1]}"…"', toml)


def _is_harmless(match: re.Match[str]) -> bool:
    """Numbers, and names of tokenizers and budgets, are no secrets."""
    key, value = match[1].strip().rstrip("=").strip(), match[2].strip()
    return "tokenizer" in key or value.replace(".", "").isdigit() or key in NO_SECRET
