"""Flags together with a file: flags win, and another mode than the file's drops the options of the file's mode."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from grpo_trainer.config.options import build, override
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from tests.processes import ROOT

FILE = {"model-name": "m", "weight_bridge_mode": "lora_only", "lora-rank": 8, "lora_alpha": 32.0, "lr": 1e-3}

MIXED = {**FILE, "vllm_restart_interval": 5}
"""Wrong, whatever a flag says."""


def made(by: dict[str, Any], file: dict[str, Any] = FILE) -> TrainConfig:
    return build(TrainConfig, override(TrainConfig, file, by))


def test_a_flag_wins_by_whichever_of_its_names() -> None:
    bridge = made({"lora_r": 16, "lr": 1e-4})
    assert bridge.weight_bridge_mode == "lora_only" and (bridge.lora_r, bridge.lora_alpha) == (16, 32.0)


@pytest.mark.parametrize(
    ("by", "mode"),
    [
        ({"weight_bridge_mode": "none"}, "none"),
        ({"weight_bridge_mode": "shared_vllm"}, "shared_vllm"),
        ({"single_copy": True}, "shared_vllm"),
    ],
)
def test_another_mode_takes_the_files_options_of_its_own_along(
    by: dict[str, Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = made(by)
    assert config.weight_bridge_mode == mode and config.lr == 1e-3
    assert [record.args for record in caplog.records] == [("--weight-bridge-mode", mode, "lora-rank, lora_alpha")]


def test_the_same_mode_keeps_them_and_what_modes_share_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert made({"weight_bridge_mode": "lora_only"}) == made({})
    restart = made({"weight_bridge_mode": "lora_restart", "lora_r": 16}, {**FILE, "lora_keep_versions": 4})
    assert (restart.weight_bridge_mode, restart.lora_r, restart.lora_alpha) == ("lora_restart", 16, 32.0)
    (warning,) = caplog.records
    assert warning.args == ("--weight-bridge-mode", "lora_restart", "lora_keep_versions")


@pytest.mark.parametrize("file", [{"single_copy": True}, {"weight-bridge-mode": "shared_vllm", "in_flight": "abort"}])
def test_single_copy_is_a_mode_in_a_file_too_and_can_be_undone(file: dict[str, Any]) -> None:
    file = {"model": "m", **file}
    assert made({"weight_bridge_mode": "lora_only"}, file).weight_bridge_mode == "lora_only"
    assert made({"single_copy": False, "weight_bridge_mode": "none"}, file).weight_bridge_mode == "none"
    assert made({}, file).weight_bridge_mode == "shared_vllm"


def test_no_single_copy_undoes_the_files() -> None:
    assert made({"single_copy": False}, {"model": "m", "single_copy": True}).weight_bridge_mode == "none"
    assert made({"single_copy": False}).weight_bridge_mode == "lora_only"


@pytest.mark.parametrize(
    ("file", "by", "field", "got", "helps"),
    [
        (
            {**FILE, "weight_bridge_mode": "none"},
            {},
            *("--lora-r", "--weight-bridge-mode none", "--weight-bridge-mode lora_only, lora_restart"),
        ),
        # given for this very mode
        (FILE, {"weight_bridge_mode": "none", "lora_r": 4}, "--lora-r", "--weight-bridge-mode none", "lora_only"),
        (
            {**FILE, "vllm_restart_interval": 5},
            {"weight_bridge_mode": "lora_only"},
            *("--vllm-restart-interval", "--weight-bridge-mode lora_only", "--weight-bridge-mode none, lora_restart"),
        ),
        (
            {**FILE, "vllm_restart_interval": 5},
            {"weight_bridge_mode": "shared_vllm"},
            *("--vllm-restart-interval", "--weight-bridge-mode shared_vllm", "--weight-bridge-mode none, lora_restart"),
        ),
        ({**FILE, "lora_rnak": 4}, {"weight_bridge_mode": "none"}, "lora_rnak", "", "lora_r"),
        (FILE, {"weight_bridge_mode": "nine"}, "--weight-bridge-mode", "nine", "'shared_vllm'"),
    ],
)
def test_what_is_wrong_by_itself_stays_an_error(
    file: dict[str, Any], by: dict[str, Any], field: str, got: str, helps: str
) -> None:
    with pytest.raises(ConfigError) as error:
        made(by, file)
    assert (error.value.field, error.value.got) == (field, got)
    assert helps in f"{error.value.wanted}; {error.value.fix}"


@pytest.mark.parametrize("mode", ["none", "shared_vllm", "lora_restart", "lora_only"])
def test_the_quickstarts_file_serves_every_mode(mode: str) -> None:
    file = read_toml(ROOT / "configs" / "quickstart.toml")
    assert build_run(file, {"model_name": "m", "weight_bridge_mode": mode}, []).trainer.weight_bridge_mode == mode
