"""scripts/plot_runs.py: curves of several runs in one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def plot_runs() -> ModuleType:
    return load_script("plot_runs")


def metrics(path: Path, rewards: Sequence[float | None]) -> Path:
    """A file of steps that take 2 seconds each."""
    rows = [{"step": n, "train/seconds": 2.0, "reward/mean": reward} for n, reward in enumerate(rewards, 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_runs_make_a_picture(plot_runs: ModuleType, tmp_path: Path) -> None:
    one = metrics(tmp_path / "one.jsonl", [0.1, 0.3, 0.5])
    metrics(tmp_path / "two" / "metrics.jsonl", [0.2, None, 0.6])
    out = tmp_path / "pictures" / "curves.png"
    plot_runs.main([f"one={one}", f"two={tmp_path / 'two'}", "--out", str(out), "--title", "t", "--smooth", "2"])
    picture = out.read_bytes()
    assert picture.startswith(b"\x89PNG")
    # Width and height stand in bytes 16 to 24: two panels side by side, 10 by 3.7 inches at 130 points.
    assert [int.from_bytes(picture[at : at + 4], "big") for at in (16, 20)] == [1300, 481]


def test_runs_of_one_label_are_of_one_colour_with_one_entry(
    plot_runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    files = [metrics(tmp_path / f"{n}.jsonl", [0.1 * n, 0.2]) for n in range(3)]
    labels = ("a", "a", "b")
    runs = [f"{label}={file}" for label, file in zip(labels, files, strict=True)]
    plot_runs.main([*runs, "--out", str(tmp_path / "x.png"), "--smooth", "1", "--x", "time"])
    (axis,) = drawn[0].axes
    colours = [line.get_color() for line in axis.get_lines()]
    assert colours == [plot_runs.COLOURS[0], plot_runs.COLOURS[0], plot_runs.COLOURS[1]]
    assert axis.get_legend_handles_labels()[1] == ["a", "b"]
    assert np.asarray(axis.get_lines()[0].get_xdata()).tolist() == [2.0, 4.0]  # 2 seconds a step


def test_the_mean_is_of_the_values_around(plot_runs: ModuleType) -> None:
    assert plot_runs.smoothed([1.0, 3.0, 8.0], 3) == [2.0, 4.0, 5.5]  # (1 + 3) / 2; (1 + 3 + 8) / 3; (3 + 8) / 2
    assert plot_runs.smoothed([1.0, 2.0, 4.0], 1) == [1.0, 2.0, 4.0]
    assert plot_runs.smoothed([1.0, 2.0, 4.0], 2) == [1.5, 3.0, 4.0]  # with the next


def test_an_evaluation_is_drawn_at_its_steps_with_its_interval(
    plot_runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    file = tmp_path / "metrics.jsonl"
    found = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.7}
    rows = [{"step": step, "train/seconds": 2.0} | (found if step % 2 == 0 else {}) for step in range(1, 6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_runs.main([f"a={file}", "--out", str(tmp_path / "x.png"), "--x", "step", "--y", "accuracy"])
    (axis,) = drawn[0].axes
    (line,) = axis.get_lines()  # no smoothed one with it
    assert np.asarray(line.get_xydata()).tolist() == [[2.0, 0.5], [4.0, 0.5]]
    (band,) = axis.collections
    assert band.get_paths()[0].get_extents().get_points().tolist() == [[2.0, 0.4], [4.0, 0.7]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--y", "reward/maen"], ("metrics.jsonl: reward/maen ", "reward/mean?")),
        (["--y", "xyz"], ("metrics.jsonl: xyz ", "reward/mean, step, train/seconds")),
        (["nowhere=missing.jsonl"], ("nowhere: ", " missing.jsonl; ", "LABEL=FILE")),
        (["unlabelled"], ("'unlabelled'", "LABEL=FILE")),
        (["--smooth", "0"], ("--smooth", "'0'")),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(
    plot_runs: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: tuple[str, ...],
) -> None:
    file, out = metrics(tmp_path / "metrics.jsonl", [0.1]), tmp_path / "x.png"
    with pytest.raises(SystemExit) as ended:
        plot_runs.main([f"run={file}", *options, "--out", str(out)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in words)
    assert not out.exists()
