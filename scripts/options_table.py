"""The README's table of options, from their one definition: `python scripts/options_table.py --write`."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_trainer.config import TrainConfig
from grpo_trainer.options import Leaf, Section, choices, shown, unique_leaves
from grpo_trainer.run_config import ApiProcess, RunOptions, ServerProcess

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- options: made by scripts/options_table.py -->\n", "<!-- end of options -->\n"


def tables() -> str:
    """Markdown: one table per group of options, the trainer's first, then what `grpo run` has besides."""
    parts = [*_tables(TrainConfig, ""), "\n`grpo run` has these besides:\n"]
    for section, prefix in ((RunOptions, ""), (ServerProcess, "server."), (ApiProcess, "api.")):
        parts += _tables(section, prefix)
    parts.append(
        "\n| option | default | |\n|---|---|---|\n"
        "| `--env` | `arithmetic` | The environment: a built-in one, or a module of yours. |\n"
        "| `--env.KEY`, `--openai.KEY` | | Options of the environment: `grpo env arithmetic serve --help`. |\n"
    )
    return "".join(parts)


def _tables(root: type[Section], prefix: str) -> list[str]:
    panels: dict[str, list[Leaf]] = {}
    for leaf in unique_leaves(root):
        panels.setdefault(leaf.panel, []).append(leaf)
    return [
        f"\n| {panel} | default | |\n|---|---|---|\n" + "".join(_row(leaf, root, prefix) for leaf in leaves)
        for panel, leaves in panels.items()
    ]


def _row(leaf: Leaf, root: type[Section], prefix: str) -> str:
    names = ", ".join(f"`--{prefix}{flag.removeprefix('--')}`" for flag in leaf.flags)
    given = None if leaf.field.is_required() else leaf.field.get_default(call_default_factory=True)
    default = "required" if leaf.field.is_required() else f"`{shown(given)}`" if given not in (None, ()) else ""
    allowed = choices(leaf, root)
    text = (" ".join(f"`{choice}`" for choice in allowed) + ". " if len(allowed) > 1 else "") + str(
        leaf.field.description
    )
    return f"| {names} | {default} | {text} |\n"


def insert(readme: str) -> str:
    """The README with the tables of today between its markers."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return before + START + tables() + END + after


if __name__ == "__main__":
    page = insert(README.read_text())
    if sys.argv[1:] == ["--write"]:
        README.write_text(page)
    else:
        print(tables())
