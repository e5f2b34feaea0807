"""Pages and configurations that are shipped say what the code says."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_trainer.cli import app
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.rules import unusual_lr
from grpo_trainer.config.run import build_run
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO_PARAMETERS = 760_000


def test_the_page_of_options_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert load_script("options_table").insert(page) == page, "run: python scripts/options_table.py --write"
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


def commands(text: str) -> list[list[str]]:
    """The arguments of each `grpo run` and `grpo doctor` of a page's shell blocks.

    Commands with a placeholder, or on an earlier run, are left out.
    """
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in blocks.splitlines() if re.match("grpo (run|doctor) ", line)]
    return [
        line[2:] for line in lines if line[2:] and not re.search(r"[…$]|\b[A-Z]{3,}\b|--resume runs/", " ".join(line))
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page.read_text())], ids=lambda page: page.name)
def test_commands_of_a_page_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but starting: options, configuration files, what goes together, and a learning rate that suits the mode."""
    accepted: list[RunConfig] = []
    monkeypatch.setattr("grpo_trainer.run.run", lambda config, console: accepted.append(config))
    monkeypatch.chdir(ROOT)
    found = [[word for word in words if word != "--json"] for words in commands(page.read_text())]
    for words in found:
        CliRunner().invoke(app, ["run", *words], catch_exceptions=False)
    assert len(accepted) == len(found)
    for config in accepted:
        name = config.trainer.model_name
        assert unusual_lr(config.trainer, DEMO_PARAMETERS if name == "runs/demo-model" else None) is None


def test_file_of_a_run_that_the_docs_show_is_accepted() -> None:
    tables = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "operating.md").read_text(), flags=re.DOTALL)
    (table,) = [table for table in tables if "run_dir" in table]
    assert build_run(tomllib.loads(table), {}).run_dir == Path("runs/sums-2")


def test_readme_fits_on_a_few_screens_and_begins_with_what_to_type() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 160 and len(text.split()) <= 1_600
    first = ("![", "bash scripts/quickstart.sh", "bash scripts/test.sh", "it learnt:", "--reward my_rewards.py", "\n|")
    places = [text.index(each) for each in first]
    assert places == sorted(places) and text[: text.index("it learnt:")].count("\n") < 25


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    """To a file, and to a heading of it where the link names one."""
    links = [
        (page, (page.parent / name).resolve() if name else page, anchor)
        for page in PAGES
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    ]
    assert any(anchor for _, _, anchor in links)
    assert not [
        (page.name, target.name, anchor)
        for page, target, anchor in links
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
