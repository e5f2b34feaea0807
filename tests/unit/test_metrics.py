"""Metrics combine rightly and land where they should."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from unittest.mock import Mock

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_trainer.config.options import build
from grpo_trainer.config.rules import unusual_lr
from grpo_trainer.config.train import ADAPTER_LR, ALL_WEIGHTS_LR, TrainConfig
from grpo_trainer.errors import from_os_error
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.logs.sinks import JsonlSink, MetricLog, machine_metrics
from grpo_trainer.metrics.health import (
    CHECKS,
    ENTROPY,
    REWARD,
    Row,
    baseline,
    episodes,
    flags,
    last_line,
    outcome,
    seconds_left,
    signs,
)
from grpo_trainer.metrics.rows import read_rows
from grpo_trainer.metrics.types import EffectiveShare, Max, Mean, Sum, merge, reduce


def test_metrics_merge() -> None:
    assert all(math.isnan(Max(a).merge(Max(b)).value()) for a, b in ((math.nan, 0.1), (0.1, math.nan)))
    merged = merge([{"a": Mean(2.0, 1), "b": Max(1.0), "c": Sum(1)}, {"a": Mean(0.0, 3), "b": Max(5.0), "c": Sum(2)}])
    assert reduce(merged) == {"a": 0.5, "b": 5.0, "c": 3.0}

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


def rows_of(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_writes_a_row_a_step_and_no_file_before_the_first(tmp_path: Path) -> None:
    log = MetricLog([JsonlSink(path := tmp_path / "new" / "metrics.jsonl")])
    assert not path.exists()
    log.log(1, {"reward/mean": Mean(1.0)}, {"reward/std": Mean(0.5)})
    log.log(2, {"reward/mean": Mean(float("nan"))})  # NaN is no JSON
    log.close()
    rows = rows_of(path)
    assert [(row["step"], row["reward/mean"], row.get("reward/std")) for row in rows] == [
        (1, 1.0, 0.5),
        (2, None, None),
    ]
    assert all((row["host/memory_used_gib"] or 0) > (row["host/memory_trainer_gib"] or 0) > 0 for row in rows)
    assert all(0 <= (row["host/cpu"] or 0) <= 1 for row in rows)


def test_a_full_disk_hides_neither_the_end_of_a_run_nor_other_trackers(tmp_path: Path) -> None:
    full, other = JsonlSink(tmp_path / "metrics.jsonl"), Mock()
    full._file = open("/dev/full", "w")  # noqa: PTH123, SIM115
    log = MetricLog([full, other])
    with pytest.raises(OSError) as raised:
        log.log(1, {})
    raised.value.add_note("saved, continue with --resume auto")
    log.close()
    assert other.close.called and "--resume auto" in str(from_os_error(raised.value, "write metrics"))


def test_log_of_a_resumed_run_replaces_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "old": 1}) + "\n" for step in range(1, 6)))
    log = MetricLog([JsonlSink(path, steps_done=3)], [{"reward/mean": 0.5}])
    log.log(4, {})
    log.log(5, {})
    log.close()
    found = [(row["step"], "old" in row, "train/resumed" in row) for row in rows_of(path)]
    assert found == [*((step, True, False) for step in (1, 2, 3)), (4, False, True), (5, False, False)]


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


@pytest.mark.parametrize("problem", [None, pynvml.NVMLError(1), RuntimeError()])
def test_metrics_of_a_gpu(monkeypatch: pytest.MonkeyPatch, problem: Exception | None) -> None:
    for name, answer in (("is_initialized", True), ("mem_get_info", (1 << 30, 4 << 30)), ("memory_reserved", 2 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "utilization", Mock(side_effect=problem, return_value=75))
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
def test_metrics_time_left(steps: int, recent: list[float], seconds: float | None) -> None:
    assert seconds_left(steps, recent) == (None if seconds is None else pytest.approx(seconds))


# health --------------------------------------------------------------------------------------------------------------


HEALTHY: Row = {
    "alignment/kl_rollout": 0.01,
    "alignment/kl_reference": 0.1,
    "grpo/entropy": 0.5,
    "train/grad_norm": 1.0,
    "batch/zero_variance_share": 0.3,
    "grpo/mean_ratio": 1.0,
}


def names(rows: list[Row], entropy: float | None = 0.5) -> list[str]:
    return [sign.check.name for sign in signs(rows, {ENTROPY: entropy})]


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("alignment/kl_rollout", 41.0, "kl"),
        ("alignment/kl_reference", 5.1, "kl_reference"),
        ("grpo/entropy", 0.01, "entropy_low"),
        ("grpo/entropy", 1.1, "entropy_high"),
        ("train/grad_norm", 16.6, "grad_norm"),
        ("batch/zero_variance_share", 0.9, "zero_variance"),
        ("grpo/mean_ratio", 0.7, "ratio"),
        ("grpo/mean_ratio", 1.3, "ratio"),
    ],
)
def test_a_figure_out_of_its_range_is_a_sign_with_its_value_and_what_to_try(key: str, value: float, name: str) -> None:
    assert names([HEALTHY] * 3) == []
    (sign,) = signs([{**HEALTHY, key: value}] * 3, {ENTROPY: 0.5})
    assert sign.check.name == name and sign.value == pytest.approx(value) and sign.check.fix
    assert f"{value:.3g}" in str(sign)


def test_the_median_of_three_steps_counts_by_the_runs_own_first_steps() -> None:
    def row(norm: float) -> Row:
        return {"train/grad_norm": norm}

    assert baseline([row(2.0), row(14.0), row(13.0), row(99.0)]) == {"train/grad_norm": 13.0}
    assert baseline([{}, {ENTROPY: 1.5}, {ENTROPY: 4.0}]) == {ENTROPY: 1.5} and baseline([{}]) == {}
    assert [names([{ENTROPY: value}] * 3, 1.5) for value in (2.9, 3.1)] == [[], ["entropy_high"]]  # at most 2 * 1.5
    assert [each.check.name for each in signs([row(131.0)] * 3, {"train/grad_norm": 13.0})] == ["grad_norm"]
    assert signs([row(129.0)] * 3, {"train/grad_norm": 13.0}) == []  # at most 10 * 13
    assert names([row(20.0), row(20.0)]) == [], "too few steps"
    assert names([row(99.0), row(99.0), row(1.0), row(2.0), row(99.0)]) == []  # 2 of 1, 2, 99: one spike
    assert names([row(1.0), row(11.0), row(28.0)]) == ["grad_norm"]  # 11 of 1, 11, 28
    assert names([row(math.nan), row(math.inf), row(9.0)]) == [], "what is not finite has other alarms"
    assert names([{"train/grad_norm": None}] * 3) == []
    rounded = {**HEALTHY, "alignment/kl_rollout": -3e-9, "alignment/kl_reference": -3e-9}
    assert names([rounded] * 3) == [], "a KL of 0 may be rounded to below 0"


def answers(entropy: float, across: float, in_group: float) -> Row:
    return {**HEALTHY, ENTROPY: entropy, "batch/same_answers": across, "batch/same_answers_in_group": in_group}


@pytest.mark.parametrize(
    ("first", "last", "collapsed"),
    [
        # two answers to all 400 prompts: half of all pairs are equal, whatever the prompt
        (answers(1.03, 0.02, 0.05), answers(0.25, 0.5, 0.52), True),
        # one of ten digits, nearly always the right one: a tenth of the pairs of different prompts, all of one prompt
        (answers(1.03, 0.02, 0.05), answers(0.1, 0.1, 0.95), False),
        # yes or no, nearly always right
        (answers(1.03, 0.02, 0.05), answers(0.1, 0.5, 0.95), False),
        # long answers, no two of which are equal
        (answers(1.03, 0.0, 0.0), answers(0.25, 0.0, 0.0), False),
        # as alike before training
        (answers(0.3, 0.4, 0.45), answers(0.1, 0.5, 0.5), False),
        # alike, but as random as before
        (answers(0.3, 0.02, 0.05), answers(0.2, 0.5, 0.5), False),
    ],
)
def test_health_collapse(first: Row, last: Row, collapsed: bool) -> None:
    rows = [{**(first if step < 5 else last), REWARD: 0.011 if step < 5 else 0.124} for step in range(12)]
    found = outcome(rows)
    assert found is not None and found.verdict == ("not healthy" if collapsed else "it learnt")
    assert (found.harm is not None and found.harm.check.name == "collapse") == collapsed


def test_episodes_of_a_run() -> None:
    norms = [1.0, 1.0, 20.0, 20.0, 30.0, 1.0, 1.0, 40.0, 40.0]
    found = episodes([{**HEALTHY, "train/grad_norm": norm} for norm in norms])
    assert [*found] == ["grad_norm"]
    # medians of three, from row 2 on: 1, 20, 20, 20, 1, 1, 40
    assert [(each.first, each.last, each.sign.value) for each in found["grad_norm"]] == [(3, 5, 20.0), (8, 8, 40.0)]


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.30, 0.33, 0.35, 0.37, 0.40, 0.85, 0.88, 0.90, 0.92, 0.95], "it learnt"),
        ([0.85, 0.88, 0.90, 0.92, 0.95, 0.30, 0.33, 0.35, 0.37, 0.40], "it got worse"),
        # 0.35 to 0.39; squared deviations sum to 0.0058, so the variance is 0.00145, and two standard errors are
        # 2 * sqrt(2 * 0.00145 / 5) = 0.048.
        ([0.30, 0.33, 0.35, 0.37, 0.40, 0.34, 0.37, 0.39, 0.41, 0.44], "no clear change"),
    ],
)
def test_whether_a_run_learnt(rewards: list[float], verdict: str) -> None:
    found = outcome([{"reward/mean": reward} for reward in rewards])
    assert found is not None and found.verdict == verdict
    assert (found.first, found.steps, found.of) == (pytest.approx(sum(rewards[:5]) / 5), 5, 10)
    assert (found.first_spread, found.last_spread) == pytest.approx((math.sqrt(0.00145),) * 2)


@pytest.mark.parametrize(
    ("key", "value", "steps", "verdict"),
    [
        ("alignment/kl_rollout", 2e3, range(6, 12), "not healthy"),
        ("alignment/kl_rollout", 2e3, range(6), "it learnt"),  # it came back
        ("alignment/kl_rollout", 2e3, range(4, 10), "it learnt"),  # the median of the last three is usual
        ("alignment/kl_rollout", 2e3, range(4, 11), "not healthy"),
        ("train/grad_norm", 12.0, range(7, 10), "it learnt"),
        ("train/grad_norm", 12.0, range(7, 12), "not healthy"),
        ("batch/zero_variance_share", 0.9, range(6, 12), "it learnt"),  # as where nearly all is solved
    ],
)
def test_a_rise_in_a_run_that_is_not_healthy_is_no_learning(key: str, value: float, steps: range, verdict: str) -> None:
    rows = [{**HEALTHY, REWARD: step / 12, **({key: value} if step in steps else {})} for step in range(12)]
    found = outcome(rows)
    assert found is not None and found.verdict == verdict
    sign = next(check for check in CHECKS if check.key == key)
    assert sign.title in last_line(rows) and sign.fix in last_line(rows)


def test_the_tenths_grow_with_the_run_and_few_steps_say_nothing() -> None:
    found = outcome([{"reward/mean": float(step >= 50)} for step in range(100)])
    assert found is not None and (found.steps, found.first, found.last, found.first_spread) == (10, 0.0, 1.0, 0.0)
    assert outcome([{"reward/mean": 0.5}] * 9) is None
    # a gradient norm that was high from the start is usual
    found = outcome([{**HEALTHY, REWARD: step / 12, "train/grad_norm": 14.0} for step in range(12)])
    assert found is not None and found.verdict == "it learnt"


def test_the_log_flags_them_and_says_each_once(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    with (tmp_path / "out").open("w") as file:
        log = MetricLog([JsonlSink(path), RunConsole(Console(file=file, width=300), 5)], say=said.append)
        for step in range(1, 6):
            log.log(step, {"train/grad_norm": Mean(1.0 if step <= 2 else 16.6), "reward/mean": Mean(0.35)})
        log.close()
    assert [row["health/grad_norm"] for row in read_rows(path)] == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert set(flags([])) <= set(read_rows(path)[0]) and len(flags([])) == len(CHECKS)
    assert len(said) == 1 and "16.6" in said[0]
    lines = (tmp_path / "out").read_text().splitlines()
    assert ["gradient norm" in line for line in lines] == [False, False, False, True, True]
    resumed = MetricLog([], read_rows(path), said.append)
    resumed.log(6, {"train/grad_norm": Mean(16.6)})
    assert len(said) == 1, "it was said before the run was resumed"


def config(mode: str, **flags: object) -> TrainConfig:
    return build(TrainConfig, {"model_name": "m", "weight_bridge_mode": mode, **flags})


def test_health_default_learning_rate_suits_what_is_trained() -> None:
    for mode, rate in (("none", ALL_WEIGHTS_LR), ("shared_vllm", ALL_WEIGHTS_LR), ("lora_only", ADAPTER_LR)):
        assert config(mode).lr == config(mode, weight_decay=0.1).lr == rate
        assert config(mode, lr=3e-4).lr == 3e-4


@pytest.mark.parametrize(
    ("mode", "rate", "parameters", "better"),
    [
        ("shared_vllm", 5e-4, 1_000_000, "1e-04"),
        ("none", 5e-4, None, "1e-06"),
        ("none", 1e-4, 500_000_000, "1e-06"),
        ("none", 1e-4, 135_000_000, "3e-05"),
        ("none", 1e-9, None, "1e-06"),
        ("lora_only", 0.05, None, "1e-05"),
        ("lora_only", 0.05, 1_000_000, "0.0005"),
        ("lora_restart", 2e-3, 135_000_000, "0.0003"),  # it collapses
        ("lora_only", 1e-8, None, "1e-05"),
        ("none", 1e-4, 1_000_000, ""),  # the quickstart's model learns with it
        ("none", 3e-5, 135_000_000, ""),
        ("none", 1e-5, 500_000_000, ""),
        ("lora_only", 5e-4, 500_000_000, ""),
        ("lora_restart", 5e-4, None, ""),
        ("lora_only", 1e-3, 1_000_000, ""),
    ],
)
def test_health_unusual_learning_rate(mode: str, rate: float, parameters: int | None, better: str) -> None:
    problem = unusual_lr(config(mode, lr=rate), parameters)
    assert (problem is not None) == bool(better)
    if problem is not None:
        assert problem.field == "--lr" and f"--lr {float(better):g}" in problem.fix
        assert ("lora_only" in problem.fix) == (mode in ("none", "shared_vllm") and rate > 1e-6)
