"""What a model's name means: a folder, the hub's name, or a path with a typing error."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_common.models import CONFIG_FILE, missing_path, nearest_folder
from vllm_server import checks, seams
from vllm_server.checks import check_model_path
from vllm_server.errors import FatalError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has one model: runs/demo-model."""
    (tmp_path / "runs" / "demo-model").mkdir(parents=True)
    (tmp_path / "runs" / "demo-model" / CONFIG_FILE).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("runs/demo-modle", "runs/demo-model"),
        ("rnus/demo-model", "runs/demo-model"),  # could be the hub's, but for the model that is called nearly so
        ("runs/nothing-alike", "the models runs/demo-model"),
        ("./nothing/alike", "the models runs/demo-model"),  # two levels down
        ("./runs/demo_model", "runs/demo-model"),
    ],
)
def test_a_path_that_is_not_there_names_the_nearest_folder(name: str, fix: str) -> None:
    problem = missing_path(name)
    assert problem is not None and problem.got == name and fix in problem.fix
    with pytest.raises(FatalError) as refused:
        check_model_path(name)
    assert fix in refused.value.fix


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "runs/demo-model"])
def test_names_of_the_hub_and_folders_are_left_alone(name: str) -> None:
    assert missing_path(name) is None


def test_the_path_ends_where_nothing_is_alike(here: Path) -> None:
    assert nearest_folder(Path("runs/demo-modle/checkpoints")) == Path("runs/demo-model")
    assert nearest_folder(here / "nothing" / "demo-model") == here


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 2}, False),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 16}, True),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4}}, True),
        ({"head_dim": 32, "text_config": {"head_dim": 16}}, True),
        ({"text_config": {"head_dim": 32}}, False),
        ({}, False),
    ],
)
def test_head_size_of_each_part_of_a_model(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], refused: bool
) -> None:
    """vLLM's CPU kernels have some sizes only; a conditional model has its text part's in `text_config`."""
    backend = SimpleNamespace(get_supported_head_sizes=lambda: [32, 64])
    monkeypatch.setattr(seams, "device_type", lambda: "cpu")
    monkeypatch.setattr(seams, "require", lambda module, name: backend)
    with pytest.raises(FatalError, match="size 16,") if refused else nullcontext():
        checks._check_head_size("m", config)
    monkeypatch.setattr(seams, "device_type", lambda: "cuda")
    checks._check_head_size("m", config)
