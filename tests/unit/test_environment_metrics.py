"""What an environment tells of its work."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb

from environments.api import wire
from environments.config import BaseEnvConfig
from environments.running.metrics import Reporter, Tally, open_wandb


def group(scores: list[float], trained: int, version: int) -> wire.ScoredData:
    return wire.ScoredData(
        tokens=[[5] * 4 for _ in scores],
        masks=[[-100] * (4 - trained) + [5] * trained for _ in scores],
        scores=scores,
        policy_versions=[version] * len(scores),
    )


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, data: dict[str, Any], step: int) -> None:
        self.rows.append((step, data))

    def finish(self) -> None:
        self.finished = True


def test_a_steps_tally_is_told_and_then_starts_anew() -> None:
    sink = Kept()
    reporter = Reporter("sums_0", [sink])
    reporter.tally.add(group([1.0, 0.0], trained=1, version=3))
    reporter.tally.add(group([1.0, 1.0], trained=3, version=4))
    reporter.tally.dropped["all scores equal"] += 2
    # groups, mean score, mean length, oldest and newest version, groups dropped
    assert re.findall(r"[\d.]+", reporter.tally.line()) == ["2", "0.750", "2.0", "3", "4", "2"]
    reporter.end_step(7, {})
    reporter.end_step(8, {"strict": 0.5})
    reporter.close()
    first = {
        "sums_0/groups_sent": 2,
        "sums_0/groups_dropped": 2,
        "sums_0/groups_dropped/all scores equal": 2,
        "sums_0/score_mean": 0.75,  # (1 + 0 + 1 + 1) / 4
        "sums_0/completion_length_mean": 2.0,  # (1 + 1 + 3 + 3) / 4
        "sums_0/policy_version_oldest": 3,
    }
    assert sink.rows == [(7, first), (8, {"sums_0/groups_sent": 0, "sums_0/groups_dropped": 0, "sums_0/strict": 0.5})]
    assert sink.finished


def test_an_empty_tally_says_so() -> None:
    assert re.findall(r"[\d.]+", Tally().line()) == ["0"]


def test_wandb_gets_the_trainers_project_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()  # or what an earlier test has begun keeps its folder
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")

    class Judged(BaseEnvConfig):
        judge_password: str = "secret"

    config = Judged(tokenizer_name="model", rollout_api_key="secret", teacher_api_key="secret")
    run: Any = open_wandb(config, "sums_0", wire.WandbInfo(group="group", project="project"))
    try:
        assert (run.project, run.group, run.name) == ("project", "group", "sums_0")
        assert run.config["tokenizer_name"] == "model"
        assert "secret" not in json.dumps(dict(run.config))
    finally:
        run.finish()
    assert list(tmp_path.rglob("*.wandb"))


def wandb_ids(config: BaseEnvConfig, names: Sequence[str]) -> list[str]:
    """The ids of the W&B runs that environments of these names open one after another."""
    ids = []
    for name in names:
        run: Any = open_wandb(config, name, wire.WandbInfo(group="group", project="project"))
        ids.append(run.id)
        run.finish()
    return ids


def test_wandb_id_is_not_the_trainers_and_stays_at_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    configs = [
        BaseEnvConfig(tokenizer_name="demo", metrics_path=tmp_path / name / "env.metrics.jsonl") for name in "ab"
    ]
    first, again = wandb_ids(configs[0], ["sums", "sums"])
    assert first == again and [first] != wandb_ids(configs[1], ["sums"])
    monkeypatch.setenv("WANDB_RUN_ID", "x")
    assert wandb_ids(configs[0], ["sums", "sums", "a/b"]) == ["x-sums", "x-sums", "x-a-b"]
