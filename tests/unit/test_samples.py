"""Sequences that are logged for people."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from grpo_trainer.config.checkpoints import CheckpointConfig
from grpo_trainer.config.train import LossConfig, ModelConfig, TrainConfig
from grpo_trainer.engine.forward import Forward
from grpo_trainer.engine.head import HeadPlan
from grpo_trainer.logs.samples import SampleLog, build_sample_log, choose, policy_logprobs, whole_characters
from grpo_trainer.loop import run_steps
from grpo_trainer.metrics.rows import keep_steps, read_rows
from grpo_trainer.rollouts.types import Group, Sample
from grpo_trainer.saving.checkpoint import Progress
from tests.unit.test_loop import Fakes

LETTERS = "abcdefgh"


def letters(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def sample(reward: float, tokens: list[int] | None = None, **fields: Any) -> Sample:
    tokens_T = np.array(tokens or [0, 1, 2, 3])
    trained_T = np.array([False, False, *[True] * (len(tokens_T) - 2)])
    return Sample(tokens_T, trained_T, reward, policy_version=7, **fields)


def half_as_likely(of: Sample, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    assert of.rollout_logprobs_T is not None
    return of.rollout_logprobs_T[positions] - np.float32(math.log(2.0))


def test_what_a_line_says(tmp_path: Path) -> None:
    rolled = sample(1.0, rollout_logprobs_T=np.full(4, -0.5, np.float32))
    log = SampleLog(tmp_path / "new" / "samples.jsonl", 2, LossConfig(), letters, half_as_likely, longest=99)
    log.take(3, [Group((sample(0.0), rolled), 4)])
    best, worst = read_rows(tmp_path / "new" / "samples.jsonl")
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
    own = sample(0.5, advantages_T=np.array([9, 9, 2, 4], np.float32))
    assert choose([Group((own,))], 1, LossConfig())[0].advantage == 3.0  # over trained tokens


def test_tool_turns_are_shown_but_have_no_ratio(tmp_path: Path) -> None:
    turns = sample(1.0, [0, 1, 2, 3, 4], rollout_logprobs_T=np.full(5, -1.0, np.float32))
    turns.trained_T[3] = False  # a tool's answer between two of the model's tokens
    log = SampleLog(tmp_path / "s", 1, LossConfig(), letters, half_as_likely, longest=99)
    log.take(1, [Group((turns, sample(0.0)))])
    (row,) = read_rows(tmp_path / "s")
    assert row["pieces"] == ["c", "d", "e"]
    assert row["ratios"] == [0.5, None, 0.5] and row["trained"] == [True, False, True]


def test_what_is_cut_off_for_training_has_no_ratio(tmp_path: Path) -> None:
    rolled = sample(1.0, rollout_logprobs_T=np.full(4, -0.5, np.float32))
    SampleLog(tmp_path / "s", 1, LossConfig(), letters, half_as_likely, longest=3).take(1, [Group((rolled,))])
    assert read_rows(tmp_path / "s")[0]["ratios"] == [0.5, None]


def test_characters_of_several_tokens_stay_whole() -> None:
    def utf8(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    euro = list("a€b".encode())
    assert list(whole_characters(euro, utf8)) == [("a", 1), ("€", 4), ("b", 5)]
    # Bytes that never become a character do not swallow the rest.
    assert "".join(text for text, _ in whole_characters([0xFF] * 6 + [97], utf8)).endswith("a")
    assert [stop for _, stop in whole_characters([0xFF] * 6, utf8)] == [4, 6]
    assert list(whole_characters([], utf8)) == []


def test_nothing_is_written_or_computed_unless_asked(tmp_path: Path) -> None:
    config = TrainConfig(model=ModelConfig(name="none"), checkpoints=CheckpointConfig(save_path=tmp_path / "run"))
    never: Any = None
    assert build_sample_log(config, never, never, 0) is None
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_takes_its_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 1, 2, 3)) + '{"step": 4, "hal')
    assert [row["step"] for row in read_rows(path)] == [1, 1, 2, 3], "a half line is no row"
    SampleLog(path, 2, LossConfig(), letters, half_as_likely, steps_done=2, longest=99)
    assert [row["step"] for row in read_rows(path)] == [1, 1, 2]
    keep_steps(tmp_path / "nothing", 3)
    assert not (tmp_path / "nothing").exists()


class Always(nn.Module):
    """Logits that depend on the place alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=self.table[: input_ids.shape[1]][None])


def test_the_models_logprobs_are_of_the_token_at_the_place() -> None:
    model = Always()
    forward = Forward(model, None, None, HeadPlan(torch.float32, torch.float32), packed=False)
    got = policy_logprobs(forward, torch.device("cpu"))(sample(1.0, temperature=0.5), np.array([2, 3]))
    # Position 2 holds token 2 and is predicted from position 1, at temperature 0.5.
    wanted = [torch.log_softmax(model.table[place - 1] / 0.5, -1)[place].item() for place in (2, 3)]
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_loop_logs_them_before_the_step_is_taken() -> None:
    class FakesWithSamples(Fakes):
        def take(self, step: int, groups: Any) -> None:
            self.events.append(f"samples {step}")

    fakes: Any = FakesWithSamples(True, True)
    config = TrainConfig(model=ModelConfig(name="m"), training_steps=2)
    run_steps(config, Progress(0, 0), fakes, fakes, fakes, fakes, fakes, fakes)
    seen = [event for event in fakes.events if event.startswith("samples") or event == "write"]
    assert seen == ["samples 1", "write", "samples 2", "write"]
