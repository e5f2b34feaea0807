"""The example configurations are what their definition says, and fit the GPUs that they name."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_trainer.config.rules import Hardware, check
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.doctor.machine import Gpu, Machine
from grpo_trainer.doctor.run_checks import check_length, check_spread, server_spread
from grpo_trainer.launch.plan import plan_run
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]


EXAMPLES = load_script("make_configs")
PORTS = {"api": 1, "server": 2, "trainers": 3}


def test_all_examples_are_there_and_no_others() -> None:
    shipped = {path.name for path in (ROOT / "configs").glob("*.toml")}
    assert shipped == {"quickstart.toml", *(example.path.name for example in EXAMPLES.EXAMPLES)}
    kinds = {(example.kind, example.gpus) for example in EXAMPLES.EXAMPLES}
    assert {kind for kind, _ in kinds} == set(EXAMPLES.MODES) and {gpus for _, gpus in kinds} == {1, 2, 4}


@pytest.mark.parametrize("example", EXAMPLES.EXAMPLES, ids=lambda example: example.path.stem)
def test_an_example_is_valid_and_fits_the_gpus_that_it_names(example: Any) -> None:
    made: ModuleType = EXAMPLES
    path = example.path
    assert path.read_text() == made.text(example, made.said(example)), "run: python scripts/make_configs.py"
    config = build_run(read_toml(path), {})
    (fits,) = map(int, re.findall(r"fits (\d+) GB", path.read_text()))
    assert all(made.fits(config, example, size) == (size >= fits) for size in made.GPUS)
    shape = made.SHAPES[example.size]
    gpus = example.gpus
    machine = Machine("3.12.0", 1, gpus=(Gpu("H200", "u", 141 * 10**9, 141 * 10**9),) * gpus)
    assert check(config, Hardware(on_gpu=True, gpus=gpus)) == []
    for finding in (
        check_length(config, shape),
        check_spread(server_spread(config), shape, machine),
    ):
        assert finding.status == "ok", finding
    started = [process.name for process in plan_run(config, PORTS, python="p", on_gpu=True).processes]
    assert f"env-{example.task.environment}" in started and ("server" in started) == (not config.trainer.owns_server)


def test_the_parameters_are_those_of_the_models() -> None:
    known = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688, "7B": 7_615_616_512, "135M": 134_515_008}
    assert {size: shape.parameters for size, shape in EXAMPLES.SHAPES.items()} == known
