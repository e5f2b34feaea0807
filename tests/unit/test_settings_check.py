"""Settings of built-in environments, checked before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from environments.config import ConfigError
from environments.running.settings_check import check, check_server, group_size


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("arithmetic", {"group_size": "4", "operation": "*", "max_num_workers": 3}),  # as typed; an older name
        ("gsm8k", {"dataset_path": "/data", "reward": "lenient", "use_wandb": "False"}),
        ("verifiers", {"env_args": '{"taskset": {"num_tasks": 5}}'}),  # env_id is the environment's to miss
        ("my_envs.capitals", {"whatever": 1}),  # the user's own: known only when it runs
    ],
)
def test_sound_settings_pass(name: str, values: dict[str, object]) -> None:
    check(name, values)


@pytest.mark.parametrize(
    ("name", "values", "field", "parts"),
    [
        ("arithmetic", {"group_sise": 8}, "env.group_sise", {"fix": "env.group_size"}),
        ("gsm8k", {"reward": "kind"}, "--env.reward", {"got": "'kind'", "wanted": "'lenient'"}),
        ("verifiers", {"harnes": "bash"}, "env.harnes", {"fix": "env.harness"}),
        ("arithmetic", {"group_size": "0"}, "--env.group_size", {"got": "'0'", "wanted": "1"}),
        ("verifiers", {"env_args": "{taskset"}, "--env.env_args", {"got": "'{taskset'"}),
    ],
)
def test_a_mistake_is_named_with_the_way_out(
    name: str, values: dict[str, object], field: str, parts: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(name, values)
    assert caught.value.field == field
    assert all(part in getattr(caught.value, key) for key, part in parts.items())


def test_the_servers_table_is_checked_too() -> None:
    check_server({"base_url": "http://127.0.0.1:9001/v1"})
    with pytest.raises(ConfigError) as caught:
        check_server({"model_nam": "m"})
    assert caught.value.field == "openai.model_nam" and "openai.model_name" in caught.value.fix


def test_the_group_size_is_known_where_settings_or_defaults_tell_it() -> None:
    assert group_size("gsm8k", {"group_size": "16"}) == group_size("my.own", {"group_size": 16}) == 16
    assert group_size("arithmetic", {}) == 8
    assert group_size("my.own", {}) is None


def test_nothing_heavy_is_imported() -> None:
    code = """
import sys
from environments.running.settings_check import check
for name in ("arithmetic", "gsm8k", "verifiers", "word_problems"):
    check(name, {})
heavy = ("torch", "transformers", "vllm", "numpy", "datasets", "verifiers")
print([module for module in heavy if module in sys.modules])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "[]\n"
