"""What `grpo train` alone needs: the commands that start it are whole."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

import pytest

from environments.api.__main__ import parse as parse_api
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.launch.by_hand import commands_to_start
from tests.processes import free_port
from vllm_server.flags import early


def trainer(**flags: Any) -> TrainConfig:
    return build(TrainConfig, {"model_name": "my models/m", "weight_bridge_mode": "lora_only", "seq_len": 64, **flags})


def words(config: TrainConfig, what: str) -> list[list[str]]:
    found = commands_to_start(config, on_gpu=False, there=lambda _: False)
    (commands,) = [commands for name, commands in found.items() if what in name]
    return [shlex.split(command) for command in commands]


def pairs(command: list[str]) -> dict[str, str]:
    return dict(pairwise(command))


def test_the_server_has_the_trainers_model_port_length_and_adapters() -> None:
    (command,) = words(trainer(vllm_port=9007, lora_r=8, log_dir="/logs"), "inference server")
    given = pairs(command)
    assert command[:2] == ["grpo", "serve"]
    assert (given["--model"], given["--port"], given["--max-model-len"]) == ("my models/m", "9007", "64")
    assert (given["--max-lora-rank"], given["--lora-root"]) == ("8", "/logs/adapters")
    assert early(command[2:]).port == 9007


def test_a_server_of_shared_weights_is_started_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    shared = trainer(weight_bridge_mode="shared_vllm", vllm_config_path="/b.json")
    (command,) = words(shared, "inference server")
    assert "--shared-weights" in command and pairs(command)["--bridge-config-path"] == "/b.json"
    assert command[0].startswith("VLLM_API_KEY=") and "secret" not in " ".join(command)


def test_the_api_listens_where_the_trainer_asks() -> None:
    api, environment = words(trainer(rollout_url="http://localhost:8123"), "rollout API")
    assert api[:2] == ["grpo", "api"] and parse_api(api[2:]).port == 8123
    assert pairs(environment)["--env.rollout_server_url"] == "http://localhost:8123"


def test_what_is_there_or_the_trainer_starts_itself_is_not_named() -> None:
    assert commands_to_start(trainer(), on_gpu=False, there=lambda _: True) == {}
    owned = commands_to_start(trainer(weight_bridge_mode="none"), on_gpu=False, there=lambda _: False)
    assert [name.split(" at ")[0] for name in owned] == ["rollout API"]
    nobody = trainer(vllm_port=free_port(), rollout_url=f"http://127.0.0.1:{free_port()}")
    assert len(commands_to_start(nobody, on_gpu=False)) == 2
