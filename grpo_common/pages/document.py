"""A page as one document that makes no external request.

Pages carry text from models. So HTML is escaped, scripts insert text as text only, and the page's own policy allows no
script or style but those of the document, which it names by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from grpo_common.text import BIDI

STATIC = Path(__file__).parent / "static"
PAGE_STYLE = (STATIC / "page.css").read_text()
"""The design of every page: colours in light and dark, tiles, tables, plots."""


def plotting() -> tuple[str, list[str]]:
    """Return the style and the scripts of a page with plots; the page's own script calls `buildFigures`."""
    names = ("uPlot.LICENSE", "uPlot.min.js", "numbers.js", "plots.js")
    licence, *scripts = ((STATIC / name).read_text() for name in names)
    return (STATIC / "uPlot.min.css").read_text() + PAGE_STYLE, [f"/* {licence} */", *scripts]


def document(
    title: str,
    body: str,
    *,
    style: str = PAGE_STYLE,
    scripts: Sequence[str] = (),
    data: Any = None,
    asks: str = "'none'",
    refresh_seconds: int = 0,
) -> str:
    """Return the whole page.

    Args:
        body: HTML, without scripts and without `style` attributes.
        scripts: run in this order after the body.
        data: for the scripts, as JSON in the element `data`; None: there is no such element.
        asks: whom the scripts may ask for more (`connect-src` of the policy).
        refresh_seconds: the browser loads the page again after this time; 0: it does not.
    """
    allowed = f"style-src {_hashes([style])}; script-src {_hashes(scripts)}; connect-src {asks}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    element = ""
    if data is not None:
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        text = text.translate({code: f"\\{shown}" for code, shown in BIDI.items()})  # JSON doubles a backslash
        element = f'<script type="application/json" id="data">{text}</script>'
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title.translate(BIDI))}</title><style>{style}</style></head>"
        f"<body>{body}{element}"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _hashes(inline: Sequence[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inline)
    return " ".join(f"'sha256-{each}'" for each in found) or "'none'"
