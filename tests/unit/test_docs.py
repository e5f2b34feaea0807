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


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    broken = [
        (page.name, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert not broken
