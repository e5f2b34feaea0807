"""Papers in docs/training.md: every paper's flags are options, and make the loss that the row names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_trainer.config.options import build, options_of
from grpo_trainer.config.train import TrainConfig
from tests.unit.factories import values_of

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text().partition("## Papers")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (.+?) \| `(--[^`]+)` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("paper", "flags"), ROWS, ids=[re.sub(r"\W+", " ", paper) for paper, _ in ROWS])
def test_every_papers_flags_build_a_configuration(paper: str, flags: str) -> None:
    build(TrainConfig, {"model_name": "m", **values_of(flags)})


def test_the_papers_are_all_there() -> None:
    found = {build(TrainConfig, {"model_name": "m", **values_of(flags)}).loss for _, flags in ROWS}
    assert found == {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"}


def test_every_flag_that_the_page_names_is_there() -> None:
    known = {flag for leaf in options_of(TrainConfig) for flag in leaf.flags}
    assert set(re.findall(r"--[a-z][a-z-]+(?![a-z.-])", PAGE)) <= known  # without --env.KEY
