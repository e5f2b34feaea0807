"""Losses and estimates of advantages of the user's own, by import path: those of docs/training.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_trainer import import_paths
from grpo_trainer.batch.batching import group_advantages, import_own_parts
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.options import build
from grpo_trainer.errors import ConfigError
from grpo_trainer.losses import batch_loss
from tests.processes import ROOT
from tests.unit.test_losses import inputs, one


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's module, in which the command is started."""
    (text,) = re.findall(r"```python\n(import torch.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    (tmp_path / "my_parts.py").write_text(text + "\nnumber = 1\n\n\ndef short(rewards):\n    return rewards[1:]\n")
    (tmp_path / "broken_parts.py").write_text("import nowhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    import_paths.load.cache_clear()


def test_the_pages_loss_has_the_unclipped_gradient(parts: Path) -> None:
    config = LossConfig(loss="my_parts:my_loss")
    case = inputs([one([-1.0, -1.0], 2.0, roll=[-1.0, -3.0])], config)
    (slope_N,) = torch.autograd.grad(batch_loss(case, config).loss, case.scores.logprobs_N)
    # ratios 1 and exp(2) = 7.389, which a clip at 1.2 would hold: -2 x ratio / 2
    assert slope_N.tolist() == pytest.approx([-1.0, -7.389], abs=1e-3)


def test_the_pages_advantages_are_ranks(parts: Path) -> None:
    assert group_advantages([0.1, 0.9, 0.5], estimator="my_parts:ranks") == [-1.0, 1.0, 0.0]
    assert group_advantages([0.5, 0.5], estimator="my_parts:ranks") == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"loss": "my_parts:nothing"}, "--loss"),
        ({"loss": "my_parts:number"}, "--loss"),
        ({"loss": "broken_parts:loss"}, "--loss"),
        ({"advantage_estimator": "my_parts:number"}, "--advantage-estimator"),
    ],
)
def test_what_is_not_there_or_of_another_kind_is_named_before_training(
    parts: Path, options: dict[str, str], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        import_own_parts(LossConfig(**options))  # type: ignore[arg-type]
    assert caught.value.field == field and caught.value.got


def test_advantages_that_are_too_few_are_refused(parts: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        group_advantages([0.0, 1.0], estimator="my_parts:short")
    assert caught.value.field == "--advantage-estimator"


@pytest.mark.parametrize(
    "name", ["no_such_package:loss", "my_parts:", ":loss", "my parts:loss", "a:b:c", "dappo", "my_parts.my_loss"]
)
def test_what_can_be_neither_a_name_nor_a_path_is_refused_with_the_options(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(LossConfig, {"loss": name})
    assert caught.value.field == "--loss" and caught.value.got and caught.value.wanted
