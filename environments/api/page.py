"""The pages for a browser: status at `/`, reference at `/docs`."""

from pathlib import Path

from grpo_common.pages.document import document, plotting

STATIC = Path(__file__).parent / "static"


def _page(name: str, title: str, *, plots: bool = False) -> str:
    """The page of `NAME.html` and `NAME.js`; its scripts ask the API alone."""
    style, scripts = plotting()
    body, script = ((STATIC / f"{name}.{kind}").read_text() for kind in ("html", "js"))
    common = scripts if plots else []
    return document(title, body, style=style, scripts=[*common, (STATIC / "ask.js").read_text(), script], asks="'self'")


STATUS_HTML = _page("status", "Rollout API", plots=True)
DOCS_HTML = _page("docs", "Rollout API: reference")
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself says the rest
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
