"""Pages and configurations that are shipped say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from grpo_trainer.run_config import build_run, read_toml

ROOT = Path(__file__).parents[2]


def test_the_readmes_table_of_options_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("options_table", ROOT / "scripts" / "options_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    assert module.insert(readme) == readme, "run: python scripts/options_table.py --write"
    assert "`--lora-target-modules`" in readme


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
