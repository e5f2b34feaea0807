"""The example configurations load, and fit the GPUs that they name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_trainer.bench.models import SHAPES
from grpo_trainer.config.rules import Hardware, check
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.doctor.checks import Case, sequence_length, servers_gpus
from grpo_trainer.launch.plan import plan_run
from grpo_trainer.machine import Gpu, Machine
from grpo_trainer.memory import Devices, Server, Setup
from grpo_trainer.model.shape import ModelShape

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
SMOLLM2 = ModelShape(576, 1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49_152, tied=True, positions=8192)
COUNTS = {"two_gpus": 2, "four_gpus": 4}


def test_configs_are_at_most_nine() -> None:
    assert 0 < len(CONFIGS) <= 9


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_keeps_the_rules(path: Path) -> None:
    config = build_run(read_toml(path), {"model_name": "m"} if path.stem == "quickstart" else {})
    gpus = 8 if path.stem == "several_machines" else COUNTS.get(path.stem, 1)
    assert check(config, Hardware(on_gpu=True, gpus=gpus)) == []
    ports = dict.fromkeys(("api", "trainers", *config.server.names), 1)
    processes = {each.name for each in plan_run(config, ports, python="p", on_gpu=True).processes}
    assert {f"env-{each.name}" for each in config.environments} < processes


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if re.search(r"GPUs? of \d+ GB", path.read_text())], ids=lambda path: path.stem
)
def test_a_config_fits_the_gpus_that_it_names(path: Path) -> None:
    text, config = path.read_text(), build_run(read_toml(path), {})
    size = re.search(r"Qwen2.5-(\d\.?\d?B)", text)
    shape = SHAPES[size[1].lower()] if size else SMOLLM2
    gpus = COUNTS.get(path.stem, 1)
    (gigabytes,) = map(int, re.findall(r"GPUs? of (\d+) GB", text))
    spread = Server.of(config)
    devices = Devices("cuda", gigabytes * 10**9, gpus)
    plan = Setup(config.trainer, shape, spread, devices, config.options.trainer_gpus).plan()
    assert not plan.problems and not plan.is_tight, plan
    small = Setup(config.trainer, shape, spread, replace(devices, total=4 * 10**9), config.options.trainer_gpus).plan()
    assert small.problems or small.is_tight
    gpu = Gpu("G", "u", gigabytes * 10**9, gigabytes * 10**9)
    machine = Machine("3.12.0", 1, gpus=(gpu,) * gpus)
    case = Case(machine, config)
    case.shape = (shape, "")
    case.run = config
    for finding in (sequence_length(case), servers_gpus(case)):
        assert finding is not None and finding.status == "ok", finding
