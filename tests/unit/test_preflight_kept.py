"""vLLM's word that it serves a model is kept, and asked for again once anything that it depends on has changed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from grpo_trainer.cache import CACHE_VARIABLE
from grpo_trainer.errors import ModelError
from grpo_trainer.launch import preflight as module
from grpo_trainer.launch.preflight import preflight
from tests.reports import served_by_vllm
from vllm_server.protocol import PreflightReport


class Vllm:
    """Answers, and counts how often it was asked."""

    def __init__(self, *, by_tables: bool = True) -> None:
        self.serves = True
        self.by_tables = by_tables
        self.asked: list[str] = []

    def __call__(self, model: str) -> PreflightReport:
        self.asked.append(model)
        if not self.serves:
            raise ModelError(f"--model-name {model}: not served")
        return msgspec.structs.replace(served_by_vllm(model, "cpu"), by_tables=self.by_tables)

    def was_asked(self) -> bool:
        """Return the questions since the last call."""
        asked, self.asked = self.asked, []
        return bool(asked)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the answers."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "served"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where packages of these names are looked for first."""
    folder = tmp_path / "installed"
    for name in ("vllm", "torch", "vllm_server"):
        (folder / name).mkdir(parents=True)
        for file in ("__init__.py", "_version.py", "version.py"):
            (folder / name / file).write_text("first")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_model_that_is_served_is_asked_for_once_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    vllm = Vllm()
    first = preflight(str(model), vllm)
    copy = shutil.copytree(model, tmp_path / "copy")
    assert preflight(str(copy), vllm) == msgspec.structs.replace(first, model=str(copy))
    assert vllm.asked == [str(model)]


def test_an_editable_installation_is_found_from_any_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not (Path(each) / "vllm_server").is_dir()])
    vllm = Vllm()
    for _ in range(2):
        preflight(str(model), vllm)
    assert len(vllm.asked) == 1


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS"])
def test_in_another_environment_it_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    vllm = Vllm()
    for value in ("", "7"):
        monkeypatch.setenv(variable, value)
        assert preflight(str(model), vllm).supported and vllm.was_asked()
        assert preflight(str(model), vllm).supported and not vllm.was_asked()


@pytest.mark.parametrize("changed", ["vllm/_version.py", "torch/version.py", "vllm_server/deep/down.py"])
def test_of_another_installation_it_is_asked_for(model: Path, installed: Path, changed: str) -> None:
    vllm = Vllm()
    preflight(str(model), vllm)
    file = installed / changed
    file.parent.mkdir(exist_ok=True)
    file.write_text("second")
    vllm.was_asked()
    preflight(str(model), vllm)
    assert vllm.was_asked()
    preflight(str(model), vllm)
    assert not vllm.was_asked()


def test_another_configuration_or_device_is_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Vllm()
    monkeypatch.setattr(module, "_DEVICES", tmp_path)
    preflight(str(model), vllm)
    (tmp_path / "nvidia0").touch()
    vllm.was_asked()
    preflight(str(model), vllm)
    assert vllm.was_asked()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "head_dim": 7}')
    preflight(str(model), vllm)
    assert vllm.was_asked()


def test_a_refusal_is_not_kept_and_takes_an_older_yes_away(model: Path, kept: Path) -> None:
    vllm = Vllm()
    preflight(str(model), vllm)
    vllm.serves = False
    assert preflight(str(model), vllm).supported, "it was asked"
    with pytest.raises(ModelError):
        preflight(str(model), vllm, again=True)
    assert not list(kept.iterdir())
    with pytest.raises(ModelError):
        preflight(str(model), vllm)


@pytest.mark.parametrize("name", ["org/model", "code", "tried out"])
def test_neither_is_what_can_change_unseen(name: str, model: Path, tmp_path: Path) -> None:
    vllm = Vllm(by_tables=name != "tried out")
    asked = name if name == "org/model" else str(model)
    if name == "code":
        (model / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.Own"}}')
    for _ in range(2):
        assert preflight(asked, vllm).supported and vllm.was_asked()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"supported": true}', b"\xff"])
def test_a_damaged_answer_is_replaced(model: Path, kept: Path, damage: bytes) -> None:
    vllm = Vllm()
    whole = preflight(str(model), vllm)
    (answer,) = kept.iterdir()
    answer.write_bytes(damage)
    assert preflight(str(model), vllm) == whole and len(vllm.asked) == 2
    assert msgspec.json.decode(answer.read_bytes(), type=PreflightReport) == whole


def test_where_nothing_can_be_kept_it_is_asked_each_time(model: Path, kept: Path) -> None:
    kept.parent.mkdir()
    kept.touch()  # a file where the folder would be
    vllm = Vllm()
    for _ in range(2):
        assert preflight(str(model), vllm).supported and vllm.was_asked()
    vllm.serves = False
    with pytest.raises(ModelError):
        preflight(str(model), vllm)
