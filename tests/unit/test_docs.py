"""Pages and configurations that are shipped say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from grpo_trainer.config.run import build_run, read_toml

ROOT = Path(__file__).parents[2]


def test_the_page_of_options_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("options_table", ROOT / "scripts" / "options_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "options.md").read_text()
    assert module.insert(page) == page, "run: python scripts/options_table.py --write"
    assert "`--lora-target-modules`" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert not [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 4], "a bar in a text ends its cell"


def test_every_page_is_found_from_the_readme() -> None:
    """Directly, or by the index of the pages."""
    linked = {
        (page.parent / target).resolve()
        for page in (ROOT / "README.md", ROOT / "docs" / "README.md")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    }
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page.resolve() not in linked]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    config = build_run(read_toml(path), {"model_name": "m"})
    assert config.trainer.training_steps > 0


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    """To a file, and to a heading of it where the link names one."""
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").glob("*.md")]
    links = [
        (page, (page.parent / name).resolve() if name else page, anchor)
        for page in pages
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    ]
    assert any(anchor for _, _, anchor in links)
    assert not [
        (page.name, target.name, anchor)
        for page, target, anchor in links
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
