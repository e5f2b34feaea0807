"""Metrics combine rightly and land where they should."""

from __future__ import annotations

import json
import math
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.logs.sinks import JsonlSink, MetricLog, machine_metrics
from grpo_trainer.metrics.health import duration, seconds_left
from grpo_trainer.metrics.types import EffectiveShare, Max, Mean, Sum, merge, reduce


def test_means_keep_their_weights() -> None:
    merged = merge([{"a": Mean(2.0, 1), "b": Max(1.0), "c": Sum(1)}, {"a": Mean(0.0, 3), "b": Max(5.0), "c": Sum(2)}])
    assert reduce(merged) == {"a": 0.5, "b": 5.0, "c": 3.0}


def test_tensors_are_read_only_at_the_end_and_nothing_is_zero() -> None:
    assert reduce(merge([{"a": Mean(torch.tensor(3.0), torch.tensor(2))}, {"a": Mean(torch.tensor(1.0), 2)}])) == {
        "a": 1
    }
    assert Mean(0.0, 0).value() == 0.0


@given(st.lists(st.floats(0.01, 100.0), min_size=1), st.integers(0, 50))
def test_any_split_gives_the_same_effective_share(weights: list[float], at: int) -> None:
    def share(part: list[float]) -> EffectiveShare:
        return EffectiveShare(torch.tensor(sum(part), dtype=torch.float64), sum(w * w for w in part), len(part))

    found = reduce(merge([{"a": share(weights[:at])}, {"a": share(weights[at:]).numbers()}]))["a"]
    assert found == pytest.approx(sum(weights) ** 2 / len(weights) / sum(w * w for w in weights), rel=1e-9)
    assert 1 / len(weights) * (1 - 1e-9) <= found <= 1 + 1e-9  # one outweighs all others; all are equal


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 50))
def test_any_split_gives_the_same_mean(values: list[float], at: int) -> None:
    parts = [values[:at], values[at:]]
    merged = merge([{"a": Mean(sum(part), len(part))} for part in parts])
    assert math.isclose(reduce(merged)["a"], sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-6)


def test_one_json_object_a_step_whatever_the_numbers(tmp_path: Path) -> None:
    log = MetricLog([JsonlSink(tmp_path / "new" / "metrics.jsonl")])
    log.log(1, {"reward/mean": Mean(1.0)}, {"reward/std": Mean(0.5)})
    log.log(2, {"reward/mean": Mean(float("nan"))})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["reward/mean"] == 1.0 and rows[1]["reward/mean"] is None  # NaN is no JSON
    assert rows[0]["reward/std"] == 0.5


def test_neither_the_start_nor_the_last_evaluation_is_in_a_steps_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 100.0, 102.0, 105.0, 168.0])  # made, started, a step, another one, one that is evaluated
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    log = MetricLog([])
    log.start()
    tokens = {"batch/tokens": Sum(30)}
    trained = log.log(1, tokens | {"batch/sequences_trained": Sum(4)})
    assert trained["train/seconds"] == 2.0 and trained["train/tokens_per_second"] == 15.0
    untrained = log.log(2, tokens | {"batch/sequences_trained": Sum(0)})
    assert untrained["train/seconds"] == 3.0 and "train/tokens_per_second" not in untrained
    assert log.log(3, {"train/evaluation_time": Sum(60.0)})["train/seconds"] == 3.0


def test_a_start_that_failed_leaves_no_run_behind(tmp_path: Path) -> None:
    MetricLog([JsonlSink(tmp_path / "metrics.jsonl")]).close()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_steps_that_a_resumed_run_takes_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "old": 1}) + "\n" for step in range(1, 6)))
    log = MetricLog([JsonlSink(path, steps_done=3)])
    log.log(4, {"reward/mean": Mean(1.0)})
    log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], "old" in row) for row in rows] == [(1, True), (2, True), (3, True), (4, False)]


def test_the_first_row_of_a_resumed_run_says_so(tmp_path: Path) -> None:
    log = MetricLog([JsonlSink(tmp_path / "metrics.jsonl", 1)], [{"reward/mean": 0.5}])
    log.log(4, {})
    log.log(5, {})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("train/resumed") for row in rows] == [1.0, None]


def test_each_row_has_the_memory_and_the_utilisation_of_the_machine(tmp_path: Path) -> None:
    numbers = MetricLog([]).log(1, {})
    assert numbers["host/memory_trainer_gib"] > 0 and numbers["host/memory_used_gib"] > 0
    assert 0 <= numbers["host/cpu"] <= 1


class NotMeasuredError(Exception):
    """What NVIDIA's library raises for a slice of a GPU."""


@pytest.mark.parametrize("problem", [None, NotMeasuredError(), RuntimeError()])
def test_a_gpu_whose_utilisation_is_not_known_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    library = ModuleType("pynvml")
    library.__spec__ = ModuleSpec("pynvml", None)
    vars(library)["NVMLError"] = NotMeasuredError
    monkeypatch.setitem(sys.modules, "pynvml", library)

    def utilisation() -> int:
        if problem:
            raise problem
        return 75

    for name, answer in (("is_initialized", True), ("mem_get_info", (1 << 30, 4 << 30)), ("memory_reserved", 2 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "utilization", utilisation)
    found = {key: value for key, value in machine_metrics().items() if key.startswith("gpu/")}
    memory = {"gpu/memory_used_gib": 3.0, "gpu/memory_trainer_gib": 2.0}
    assert found == memory | ({} if problem else {"gpu/utilisation": 0.75})


@pytest.mark.parametrize(
    ("steps", "recent", "seconds"),
    [
        (9, [], None),
        (9, [5.0], None),  # the first step may be an outlier
        (8, [100.0, 5.0], 40.0),  # 100 counts as 5: 8 x (5 + 5) / 2
        (9, [4.0, 6.0, 5.0], 42.0),  # 6 counts as 5: 9 x (4 + 5 + 5) / 3
        (10, [1.0, 1.0, 11.0, 1.0, 1.0, 11.0], 260.0 / 6),  # a restart every three steps: 10 x (4 + 22) / 6
        (0, [4.0, 4.0], 0.0),
    ],
)
def test_time_left_is_steps_left_times_the_mean_of_recent_steps(
    steps: int, recent: list[float], seconds: float | None
) -> None:
    assert seconds_left(steps, recent) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119.4, "119 s"), (120.0, "2 min"), (7190.0, "120 min"), (12_240.0, "3.4 h")],
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
