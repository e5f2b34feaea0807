"""Costs that `scripts/check_simulation.py` makes of measured lines, against those of which the lines were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script
from tests.unit.test_simulate_scale import scale

check = load_script("check_simulation")


def line(sequences: int, mean: float, running: float, cpu_ms: dict[str, float]) -> dict[str, Any]:
    """A step takes 2 s; prompts have 16 tokens."""
    return {
        "sequences": sequences,
        "completion_tokens_mean": mean,
        "trained_tokens_per_s": sequences * (mean + 16) / 2,
        "completion_tokens_per_s": 1000.0,
        "step_s": 2.0,
        "server": {"running_mean": running, "can_hold": 127},
        "cpu_ms_per_group": {"supervisor": 10.0, "bench": 15.0, **cpu_ms},
    }


# A decode step of n sequences takes 4 + 0.1 n ms: 0.2 ms a token at 40, 0.14 ms at 100; groups of 160 and 320 tokens.
# A training step takes 100 ms and 0.2 ms a token: 560.8 ms for 64 x 36 tokens in 8 groups, 1,533.6 for 128 x 56 in 16.
# A group takes the environment 1 ms and 0.05 ms a token, the API 0.5 ms and 0.001 ms a token.
OF_FIRST = {"server_front_end": 2.0, "server_engine": 30.0, "trainer": 70.1, "environment": 9.0, "api": 0.66}
OF_SECOND = {"server_front_end": 4.8, "server_engine": 40.0, "trainer": 95.85, "environment": 17.0, "api": 0.82}
FIRST, SECOND = line(64, 20.0, 40.0, OF_FIRST), line(128, 40.0, 100.0, OF_SECOND)
TWO = check.Workload(96, 49, 2)
"""Completions of 98 / 49 = 2 tokens on average before truncation at 2, so 1.5 after it, and 12 of a group."""


def test_costs_are_on_the_lines_through_two_runs() -> None:
    costs = check.costs_from(check.Run(FIRST), check.Run(SECOND), TWO)
    assert costs.server_groups == 15, "127 sequences are 15 whole groups"
    assert costs.server_tokens == pytest.approx(120 / 0.016) and costs.growing == pytest.approx(0.75)
    assert (costs.trainer_tokens, costs.publish) == (pytest.approx(5000.0), pytest.approx(0.1))
    assert costs.environment == pytest.approx(0.0016) and costs.api == pytest.approx(0.000512)


def test_what_measures_takes_cores_from_the_run() -> None:
    assert check.Run(FIRST).others == pytest.approx(0.1), "8 groups x 25 ms in 2 s"
    assert check.Run(SECOND).others == pytest.approx(0.2)
    fewer = check.predicted(check.Run(FIRST), check.Run(SECOND), TWO, 2, cores=1)
    more = check.predicted(check.Run(FIRST), check.Run(SECOND), TWO, 2, cores=8)
    alone = scale.simulate(check.setup_of(TWO, 2, 0.85), check.costs_from(check.Run(FIRST), check.Run(SECOND), TWO))
    assert fewer == pytest.approx(alone.tokens, rel=0.05)
    # With a core for each process training limits: 144 of the 96 x 17.5 tokens of a step, at 5,000 a second and 0.1 s.
    assert more == pytest.approx(144 / 0.436)


def test_the_table_has_the_medians_of_the_rounds_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, speed in enumerate((1000.0, 3000.0, 1200.0), 1):
        held = {**FIRST, "completion_tokens_per_s": speed}
        lines = {"calibration-1": FIRST, "calibration-2": SECOND, "held-1": held, "held-2": held}
        for name, each in lines.items():
            (tmp_path / f"{number}-{name}.json").write_text(json.dumps(each))
    check.main([str(tmp_path), "--rounds", "3"])
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "2"]
    for _, expected, found, error, by_round in rows:
        assert found == "1,200"
        tokens = float(expected.replace(",", ""))
        errors = [float(each.rstrip("%")) / 100 for each in (error, *by_round.split(", "))]
        assert errors == pytest.approx([tokens / speed - 1 for speed in (1200, 1000, 3000, 1200)], abs=0.002)
