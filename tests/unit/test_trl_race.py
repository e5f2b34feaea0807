"""scripts/trl_learn.py: what a race says of its runs. The race itself needs TRL and a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_trainer.metrics.rows import read_rows

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("trl_learn")


def run(race: ModuleType, *accuracies: float, every: float = 2.0) -> Any:
    """A run with a checkpoint each 5 steps, which take `every` seconds."""
    checkpoints = [race.Checkpoint(5 * n, every * n, found, 0.0, 1.0) for n, found in enumerate(accuracies)]
    return race.Run("grpo", 1e-4, checkpoints)


def test_a_target_is_reached_by_the_first_checkpoint_that_has_it(race: ModuleType) -> None:
    found = run(race, 0.1, 0.5, 0.4, 0.6)
    assert [found.reached(target).step for target in (0.1, 0.5, 0.55)] == [0, 5, 15]
    assert found.reached(0.7) is None


def test_the_best_run_is_the_first_at_the_highest_target_then_at_the_next_then_the_last_accuracy(
    race: ModuleType,
) -> None:
    ranked = [
        run(race, 0.1, 0.4, 0.9),  # 0.8 after 4 s
        run(race, 0.1, 0.6, 0.7, 0.8),  # after 6 s
        run(race, 0.1, 0.6, 0.7),  # never; 0.5 after 2 s
        run(race, 0.1, 0.3, 0.5),  # after 4 s
        run(race, 0.1, 0.3, 0.4),  # never
        run(race, 0.1, 0.3, 0.2),
    ]
    ranks = [each.rank([0.5, 0.8]) for each in ranked]
    assert ranks == sorted(set(ranks))


def test_a_curve_has_the_seconds_between_its_checkpoints(race: ModuleType, tmp_path: Path) -> None:
    run(race, 0.1, 0.5, 0.9, every=3.0).write(tmp_path / "curve.jsonl")
    rows = read_rows(tmp_path / "curve.jsonl")
    assert [(row["step"], row["train/seconds"], row["accuracy"]) for row in rows] == [
        (0, 0, 0.1),
        (5, 3, 0.5),
        (10, 3, 0.9),
    ]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["checkpoints/adapter_step_5", "checkpoints/adapter_step_10", "checkpoints/adapter_final"], [0, 5, 10, 12]),
        (["checkpoints/step_5", "checkpoints/model_final"], [0, 5, 12]),
        (["checkpoint-5", "checkpoint-12"], [0, 5, 12]),  # TRL's
    ],
)
def test_checkpoints_are_found_by_step(race: ModuleType, tmp_path: Path, names: list[str], steps: list[int]) -> None:
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    found = race.folders_of(tmp_path, Path("model"), 12)
    assert sorted(found) == steps and found[0] == Path("model") and found[12] == tmp_path / names[-1]
