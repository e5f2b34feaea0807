"""The status page, for a browser at `/`."""

from pathlib import Path

from grpo_common.pages.document import document, plotting

_STATIC = Path(__file__).parent / "static"
_STYLE, _SCRIPTS = plotting()

STATUS_HTML = document(
    "Rollout API",
    (_STATIC / "status.html").read_text(),
    style=_STYLE,
    scripts=[*_SCRIPTS, (_STATIC / "status.js").read_text()],
    asks="'self'",
)
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself says the rest
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
