"""The demo model: what it writes, how well it adds, and what it does to folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from environments.arithmetic import ProblemSet
from environments.demo_model import __main__ as command
from environments.demo_model.__main__ import main
from environments.demo_model.folder import MARKER, DemoModelError, Recipe, claim, write_whole
from environments.demo_model.model import (
    build_model,
    build_tokenizer,
    encode,
    warm_up,
)
from tests.unit.factories import refusing

PROBLEMS = ProblemSet.of(10, 49)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that spin while they wait slow each other down where other processes use the cores."""
    torch.set_num_threads(1)


def test_the_model_is_what_it_says(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (demo_model / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    assert model.dtype == torch.float32
    assert 0.6e6 < sum(p.numel() for p in model.parameters()) < 0.9e6
    assert 0.3 <= json.loads((demo_model / MARKER).read_text())["accuracy"] <= 0.4


def test_its_answers_sampled_by_transformers_are_as_often_right_as_it_says(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model)
    problems = PROBLEMS.held_out
    torch.manual_seed(1)
    prompts = tokenizer([problem.prompt for problem in problems], return_tensors="pt")
    outputs = model.generate(
        **prompts, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=4, num_return_sequences=8
    )
    texts = tokenizer.batch_decode(outputs[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    wanted = [problem.answer for problem in problems for _ in range(8)]
    accuracy = sum(text == answer for text, answer in zip(texts, wanted, strict=True)) / len(wanted)
    said = json.loads((demo_model / MARKER).read_text())["accuracy"]
    # 1280 samples: a standard deviation of 0.013.
    assert accuracy == pytest.approx(said, abs=0.07)


def test_a_second_run_reuses_what_is_there(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (demo_model / "model.safetensors").stat()
    assert main([str(demo_model)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{demo_model}: {json.loads((demo_model / MARKER).read_text())['summary']}"
    assert (demo_model / "model.safetensors").stat() == before


def test_a_strangers_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and line.startswith("grpo demo-model: OUT: ")
    assert all(part in line for part in (str(tmp_path), MARKER, "--force"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", ["absent", "empty", "ours", "forced"])
def test_what_may_be_written_over(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    if content != "absent":
        out.mkdir()
    if content in ("ours", "forced"):
        (out / (MARKER if content == "ours" else "thesis.txt")).write_text("{}")
    claim(out, force=content == "forced")

    def write(folder: Path) -> dict[str, Any]:
        (folder / "config.json").write_text("{}")
        return {"summary": "done"}

    assert write_whole(out, write) == "done"
    with pytest.raises(OSError, match="full"):
        write_whole(out, full)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", MARKER]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def full(folder: Path) -> dict[str, Any]:
    raise OSError("the disk is full")


def test_what_can_not_be_written_is_told_before_the_build(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    (tmp_path / "out").write_text("text")
    monkeypatch.setattr(command, "SIZE", 2**60)  # more than any disk has room for
    for out in (tmp_path / "out", tmp_path / "new" / "out", Path("/proc/out")):
        assert main([str(out), "--force"]) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("grpo demo-model: OUT") and str(out) in said.err
    assert (tmp_path / "out").read_text() == "text"


def test_equal_seeds_give_equal_models_and_others_do_not() -> None:
    tokenizer = build_tokenizer()
    train, held_out = (encode(part[:64], tokenizer) for part in (PROBLEMS.train, PROBLEMS.held_out))
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))

    def weights(seed: int) -> torch.Tensor:
        model = build_model(tokenizer, seed)
        recipe = Recipe(seed=seed, max_steps=3, check_interval=1)
        with refusing(DemoModelError, "warm-up", words=["3 steps", "30.0%"]):
            warm_up(model, train, held_out, digits, recipe)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
