"""Sequences that are logged for people."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from environments.demo_model.model import build_tokenizer
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.logs.samples import SampleLog, build_sample_log, choose, last_sample, whole_characters
from grpo_trainer.loop import run_steps
from grpo_trainer.metrics.rows import a_sample, keep_steps, read_file, read_rows
from grpo_trainer.rollouts.groups import Group, Sample
from grpo_trainer.saving.checkpoint import Progress
from grpo_trainer.trainer import Trainer
from tests.unit.factories import TinyModel
from tests.unit.test_loop import Fakes
from tests.unit.test_trainer import config, rollouts

LETTERS = "abcdefgh"


def letters(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def sample(reward: float, tokens: list[int] | None = None, *, logprob: float | None = None, **fields: Any) -> Sample:
    """`logprob`: the server's, of every trained token; all but the first two are trained."""
    tokens_T = np.array(tokens or [0, 1, 2, 3])
    fields = {"positions": np.arange(2, len(tokens_T)), "version": 7, **fields}
    known = None if logprob is None else np.full(len(fields["positions"]), logprob, np.float32)
    return Sample(tokens_T, reward=reward, rollout_logprobs=known, **fields)


def write(path: Path, step: int, *groups: Group, count: int = 2, longest: int = 99) -> str:
    """Log samples whose tokens the trained policy gives half the probability that the server gave."""
    log = SampleLog(path, count, LossConfig(), letters, longest=longest)
    samples = [sample for group in groups for sample in group.samples]
    logprobs = {}
    for number in log.choose(groups):
        known = samples[number].cut(longest).rollout_logprobs
        if known is not None:
            logprobs[number] = known - np.float32(math.log(2.0))
    return log.write(step, logprobs)


def test_what_a_line_says(tmp_path: Path) -> None:
    rolled = sample(1.0, logprob=-0.5)
    line = write(tmp_path / "new" / "samples.jsonl", 3, Group((sample(0.0), rolled), 4))
    assert line == 'prompt "ab", answer "cd", reward 1'
    best, worst = read_file(tmp_path / "new" / "samples.jsonl", a_sample).rows
    # Rewards 0 and 1: mean 0.5, standard deviation (n - 1) 0.7071, 0.5 / 0.7072 = 0.707
    assert best == {
        **{"format": 1, "step": 3, "version": 7, "environment": 4, "group": 0, "reward": 1.0, "cut": 0},
        **{"prompt": "ab", "pieces": ["c", "d"], "ratios": [0.5, 0.5], "trained": [True, True]},
        "advantage": best["advantage"],
    }
    assert best["advantage"] == pytest.approx(0.707, abs=1e-3) and worst["advantage"] == -best["advantage"]
    assert worst["ratios"] == [None, None], "the server's logprobs are not known"


def test_groups_that_teach_come_first_with_their_best_and_worst() -> None:
    same = Group((sample(1.0), sample(1.0)))
    spread = Group((sample(0.2), sample(0.9), sample(0.1)))
    found = choose([same, spread], 3, LossConfig())
    assert [(each.group, each.sample.reward) for each in found] == [(1, 0.9), (1, 0.1), (0, 1.0)]
    assert len(choose([same, spread], 1, LossConfig())) == 1
    assert choose([], 3, LossConfig()) == []
    own = sample(0.5, advantages=np.array([2, 4], np.float32))
    assert choose([Group((own,))], 1, LossConfig())[0].advantage == 3.0  # over trained tokens


@pytest.mark.parametrize(
    ("one", "longest", "ratios", "trained"),
    [
        # a tool's answer between two of the model's tokens
        (sample(1.0, [0, 1, 2, 3, 4], positions=np.array([2, 4]), logprob=-1.0), 99, [0.5, None, 0.5], [1, 0, 1]),
        # a token that is cut off for training
        (sample(1.0, logprob=-0.5), 3, [0.5, None], [1, 1]),
        # an answer that is left out of the loss
        (sample(0.5, positions=np.arange(0), start=2, truncated=True), 99, [None, None], [0, 0]),
        # an environment that sends neither logprobs nor versions
        (sample(1.0, version=None), 99, [None, None], [1, 1]),
    ],
    ids=["tool", "cut", "left out", "unknown"],
)
def test_an_answer_is_shown_whole_and_has_ratios_where_both_logprobs_are_known(
    tmp_path: Path, one: Sample, longest: int, ratios: list[float | None], trained: list[int]
) -> None:
    write(tmp_path / "s", 1, Group((one,)), count=1, longest=longest)
    read = read_file(tmp_path / "s", a_sample)
    assert read.unreadable == 0
    assert (read.rows[0]["prompt"], "".join(read.rows[0]["pieces"])) == ("ab", "cde"[: len(ratios)])
    assert (read.rows[0]["ratios"], [*map(int, read.rows[0]["trained"])]) == (ratios, trained)
    assert read.rows[0]["version"] == one.version


def test_characters_of_several_tokens_stay_whole() -> None:
    def utf8(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    euro = list("a€b".encode())
    assert list(whole_characters(euro, utf8)) == [("a", 1), ("€", 4), ("b", 5)]
    # Bytes that never become a character do not swallow the rest.
    assert "".join(text for text, _ in whole_characters([0xFF] * 6 + [97], utf8)).endswith("a")
    assert [stop for _, stop in whole_characters([0xFF] * 6, utf8)] == [4, 6]
    assert list(whole_characters([], utf8)) == []


@pytest.mark.parametrize("count", [0, 4])
def test_nothing_is_written_with_0_or_without_a_tokenizer(tmp_path: Path, count: int) -> None:
    silent = TrainConfig(
        model_name=str(tmp_path),
        save_path=tmp_path / "run",
        log_samples=count,
    )
    assert build_sample_log(silent, 0) is None
    assert not (tmp_path / "run").exists()


def test_samples_show_the_spaces_that_were_sampled(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.save_pretrained(tmp_path / "model")
    log = build_sample_log(
        TrainConfig(
            model_name=str(tmp_path / "model"),
            save_path=tmp_path / "run",
            log_samples=1,
        ),
        0,
    )
    assert log is not None
    words = tokenizer.encode("do n't .")
    group = Group((sample(1.0, [*words, 5], positions=np.array([len(words)])),))
    log.choose([group])
    log.write(1, {})
    (row,) = read_file(tmp_path / "run" / "samples.jsonl", a_sample).rows
    assert row["prompt"] == "do n't ."


def test_the_last_sample_is_a_line_that_changes_no_terminal(tmp_path: Path) -> None:
    assert last_sample(tmp_path / "none") == ""
    row = {
        **{"step": 2, "prompt": "x" * 300, "pieces": ["\x1b[2J", "a" * 999], "reward": 0.25, "trained": [True, True]},
        **{"ratios": [1.0, None], "version": 1, "environment": 0, "group": 0, "advantage": 0.0, "cut": 0},
    }
    first = {**row, "step": 1, "prompt": "early"}
    (tmp_path / "s").write_text("".join(json.dumps(each) + "\n" for each in (first, row, {**row, "reward": 9})))
    line = last_sample(tmp_path / "s")
    assert line.isprintable() and len(line) < 500
    assert "\\x1b[2J" in line and "…" + "x" * 200 in line and "x" * 201 not in line and line.endswith("0.25")
    (tmp_path / "s").write_text('{"step": 1}\n')
    assert last_sample(tmp_path / "s") == ""


def test_a_resumed_run_takes_its_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 1, 2, 3)) + '{"step": 4, "hal')
    assert [row["step"] for row in read_rows(path)] == [1, 1, 2, 3], "a half line is no row"
    SampleLog(path, 2, LossConfig(), letters, steps_done=2, longest=99)
    assert [row["step"] for row in read_rows(path)] == [1, 1, 2]
    keep_steps(tmp_path / "nothing", 3)
    assert not (tmp_path / "nothing").exists()


def test_the_steps_own_logprobs_are_of_the_samples_that_were_chosen() -> None:
    torch.manual_seed(0)
    trainer, groups = Trainer(TinyModel(), config()), rollouts().groups
    ready = replace(trainer.ready(rollouts()), shown=(1, 2))
    samples = [each for group in groups for each in group.samples]
    with torch.no_grad():
        wanted = {
            number: torch.log_softmax(
                trainer.model(torch.from_numpy(samples[number].tokens_T)[None], use_cache=False).logits[0], -1
            )
            for number in ready.shown
        }
    found = trainer.step(ready, 0).logprobs
    assert found.keys() == wanted.keys()
    for number, logprobs_TV in wanted.items():
        one = samples[number]
        own = [logprobs_TV[place - 1, one.tokens_T[place]].item() for place in one.positions]
        assert found[number].tolist() == pytest.approx(own, abs=1e-5)


def test_the_loop_logs_them_with_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    class FakesWithSamples(Fakes):
        def choose(self, groups: Any) -> tuple[int, ...]:
            self.events.append("choose")
            return (3,)

        def write(self, step: int, logprobs: Any) -> str:
            self.events.append(f"samples {step}")
            return f"of step {step}"

    fakes: Any = FakesWithSamples(True, True)
    two = TrainConfig(model_name="m", training_steps=2)
    run_steps(two, Progress(0, 0), fakes, fakes, fakes, fakes, fakes, fakes)
    seen = [event for event in fakes.events if event.startswith(("samples", "choose")) or event == "write"]
    assert seen == ["choose", "write", "samples 1", "choose", "write", "samples 2"]
    assert capsys.readouterr().out.count("of step") == 1, "only the first"
