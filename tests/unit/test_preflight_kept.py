"""vLLM's word that it serves a model is kept, and asked for again once anything that it depends on has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.errors import ModelError
from grpo_trainer.launch import preflight as module
from grpo_trainer.launch.preflight import CACHE, preflight

pytestmark = pytest.mark.usefixtures("home")


class Vllm:
    """Answers, and counts how often it was asked."""

    def __init__(self, *, serves: bool = True) -> None:
        self.serves = serves
        self.asked: list[str] = []

    def __call__(self, model: str) -> Mapping[str, Any]:
        self.asked.append(model)
        if not self.serves:
            raise ModelError(f"--model-name {model}: not served")
        return {"model": model, "supported": True, "architectures": ["LlamaForCausalLM"], "device": "cpu"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / CACHE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


def test_a_model_that_is_served_is_asked_for_once_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    vllm = Vllm()
    first = preflight(str(model), vllm)
    copy = shutil.copytree(model, tmp_path / "copy")
    assert preflight(str(copy), vllm) == {**first, "model": str(copy)}
    assert vllm.asked == [str(model)]


def test_another_configuration_vllm_or_device_is_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Vllm()
    preflight(str(model), vllm)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    preflight(str(model), vllm)
    (model / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    preflight(str(model), vllm)
    package = tmp_path / "installed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_version.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "_BUILDS", {**module._BUILDS, "installed": "_version.py"})
    for time in (1, 2, 2):
        os.utime(package / "_version.py", (time, time))
        preflight(str(model), vllm)
    assert len(vllm.asked) == 5


def test_a_refusal_is_not_kept(model: Path, home: Path) -> None:
    with pytest.raises(ModelError):
        preflight(str(model), Vllm(serves=False))
    assert not home.exists()


@pytest.mark.parametrize("name", ["org/model", "code"])
def test_neither_is_what_can_change_unseen(name: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "code")
    (tmp_path / "code" / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.Own"}}')
    vllm, asked = Vllm(), str(tmp_path / name) if name == "code" else name
    assert preflight(asked, vllm) == preflight(asked, vllm)
    assert len(vllm.asked) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"supported": false}'])
def test_a_damaged_answer_is_replaced(model: Path, home: Path, damage: str) -> None:
    vllm = Vllm()
    preflight(str(model), vllm)
    (kept,) = home.iterdir()
    kept.write_text(damage)
    preflight(str(model), vllm)
    assert len(vllm.asked) == 2 and json.loads(kept.read_text())["supported"] is True


def test_where_nothing_can_be_kept_it_is_asked_each_time(model: Path, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.touch()  # a file where the folder would be
    vllm = Vllm()
    assert preflight(str(model), vllm) == preflight(str(model), vllm)
    assert len(vllm.asked) == 2
