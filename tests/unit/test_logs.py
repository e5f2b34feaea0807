"""What is said of a run: lines on the console and a live one, trackers of others, samples for people."""

from __future__ import annotations

import io
import json
import math
import os
import sqlite3
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console

from environments.demo_model.model import build_tokenizer
from grpo_common.status import VARIABLE
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import StoppedError
from grpo_trainer.files import METRICS_FILE, held_folder
from grpo_trainer.launch.plan import ProcessSpec, RunPlan
from grpo_trainer.logs import sinks
from grpo_trainer.logs.console import Output, RunConsole, live_line, step_line
from grpo_trainer.logs.samples import SampleLog, build_sample_log, choose, last_sample, whole_characters
from grpo_trainer.logs.sinks import TensorBoardSink, TrackioSink, WandbSink, build_metric_log, run_id
from grpo_trainer.loop import Desk, run_steps
from grpo_trainer.metrics.rows import NewRows, a_sample, keep_steps, read_file
from grpo_trainer.metrics.types import Mean
from grpo_trainer.rollouts.groups import Group, Sample
from grpo_trainer.run import supervise
from grpo_trainer.saving.checkpoint import Progress
from grpo_trainer.saving.manifest import seal
from grpo_trainer.trainer import Trainer
from tests.processes import wait_for
from tests.unit.factories import TinyModel
from tests.unit.test_loop import Fakes
from tests.unit.test_supervisor import SAYS
from tests.unit.test_trainer import config, rollouts


def test_a_trainer_whose_reader_was_killed_goes_on() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    file = os.fdopen(writes, "w")
    console = RunConsole(Output(file=file), 100)
    for step in (1, 2):
        console.write(step, {"reward/mean": 0.5})
    with suppress(BrokenPipeError):
        file.close()


def test_rows_of_a_trainer_that_restarted_are_read_and_those_before_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "time": {step}}}\n' for step in (1, 2, 3)))
    rows = NewRows(path)
    assert [row["step"] for row in rows.read()] == [1, 2, 3]
    keep_steps(path, 2)
    assert rows.read() == []
    with path.open("a") as file:
        file.write('{"step": 3, "time": 0.5}\n')  # the clock was set back
    assert rows.read() == [{"step": 3, "time": 0.5}]
    path.unlink()
    assert rows.read() == []
    rows.close()


TRAINER = (
    SAYS
    + """
import json, pathlib
folder = pathlib.Path(sys.argv[1])
with (folder / "metrics.jsonl").open("a") as file:
    for step, reward in ((2, 0.5), (3, None), (4, 1.0)):
        row = {"step": step, "time": time.time(), "reward/mean": reward, "train/seconds": 2.0}
        file.write(json.dumps(row | ({"eval/sums/accuracy": 0.25, "eval/sums/step": 3} if step == 4 else {})) + "\\n")
OWN.update(phase="trained")
print("resumed", flush=True)
log.warning("careful")
"""
)


def run_stand_in(folder: Path, console: Console, program: str = TRAINER) -> None:
    """A run whose trainer is a small program: three steps after one of an earlier process."""
    (folder / METRICS_FILE).write_text('{"step": 1, "time": 1.0, "reward/mean": 0.0}\n')
    config = build_run(
        {}, {"model_name": "demo", "weight_bridge_mode": "lora_only", "training_steps": "4", "run_dir": str(folder)}
    )
    env = {VARIABLE: str(folder / "status" / "trainer.json")}
    trainer = ProcessSpec("trainer", (sys.executable, "-c", program, str(folder)), env, ends_run=True)
    with held_folder(folder, "--run-dir") as held:
        supervise(config, RunPlan(((trainer,),), {}, {}), console, held)


def test_a_run_that_is_piped_has_a_line_a_step(tmp_path: Path) -> None:
    out = io.StringIO()
    run_stand_in(tmp_path, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("Step")] == [
        step_line(2, 4, {"reward/mean": 0.5}),
        step_line(3, 4, {"reward/mean": float("nan")}, 2.0),
        step_line(4, 4, {"reward/mean": 1.0}),
    ]
    assert {"resumed", "trainer: WARNING careful"} < {*lines}
    assert any(line.startswith("Evaluation") for line in lines)


@pytest.mark.parametrize(("saved", "lost"), [(None, False), (0, True), (1, False)])  # of one step
def test_a_run_that_is_stopped_says_what_was_saved(tmp_path: Path, saved: int | None, lost: bool) -> None:
    if saved is not None:
        (path := tmp_path / "checkpoints" / f"adapter_step_{saved}").mkdir(parents=True)
        seal(path, Progress(saved, saved))
    stops = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)"
    with pytest.raises(StoppedError) as stopped:
        run_stand_in(tmp_path, Console(quiet=True), stops)
    assert (f"adapter_step_{saved} by: grpo run --resume " in stopped.value.fix) == (saved is not None)
    assert ("step 0" in stopped.value.fix) == lost


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_run_on_a_terminal_has_one_live_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    run_stand_in(tmp_path, Console(file=(terminal := Terminal()), width=100))
    text = terminal.getvalue()
    # Each step took 2 s; of the rewards 0, 0.5, None and 1 the sparkline has three.
    last = text.rindex(live_line(4, 4, {"reward/mean": 1.0}, [0.0, 0.5, 1.0], [2.0, 2.0, 2.0]))
    assert "Step " not in text
    above = [text.index(line) for line in ("resumed", "WARNING careful", "Evaluation of sums")]
    assert max(above) < last


# trackers ------------------------------------------------------------------------------------------------------------


def config_of(folder: Path, *names: str, use_wandb: bool = False) -> TrainConfig:
    values = {"log_dir": folder, "log_to": names, "use_wandb": use_wandb, "wandb_project": "p", "wandb_group": "g"}
    return TrainConfig.model_validate({"model_name": "m", "rollout_api_key": "secret", **values})


def test_wandb_offline_is_written_below_the_log_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(config_of(tmp_path, "wandb"))
    sink.write(1, {"reward/mean": 0.5})
    sink.close()
    (run_file,) = tmp_path.glob(f"wandb/offline-run-*/run-{run_id(config_of(tmp_path), 1)}.wandb")
    # W&B's own process writes it, and may be a moment behind.
    wait_for("the metric in the run's file", lambda: b"reward/mean" in run_file.read_bytes(), run_file, seconds=30.0)


def test_a_run_that_goes_on_is_the_same_to_a_tracker_and_one_that_begins_is_not(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "wandb")
    first = run_id(config, 0)
    assert [run_id(config, 3), run_id(config, 7)] == [first, first]
    assert run_id(config, 0) != first
    assert run_id(config_of(tmp_path / "old", "wandb"), 3) not in ("", first)  # of a run from before this was kept


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(config_of(tmp_path, "tensorboard"))
    sink.write(1, {"reward/mean": 0.5})
    sink.write(2, {"reward/mean": 0.75})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.tensor_proto.float_val[0]) for each in events.Tensors("reward/mean")] == [
        (1, 0.5),
        (2, 0.75),
    ]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="needs trackio: pip install trackio")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):  # read from TRACKIO_DIR when trackio is first imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    for done in (0, 1):  # and once more, going on
        sink = TrackioSink(config_of(tmp_path, "trackio"), done)
        sink.write(done + 1, {"reward/mean": 0.5, "grpo/max_ratio": float("nan")})
        sink.close()
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = list(connection.execute("select step, metrics, run_name from metrics"))
        (settings,) = next(connection.execute("select config from configs"))
    assert [(step, json.loads(metrics)) for step, metrics, _ in rows] == [
        (step, {"reward/mean": 0.5}) for step in (1, 2)
    ]
    assert len({name for *_, name in rows}) == 1
    assert b"secret" not in bytes(settings, "utf8") if isinstance(settings, str) else b"secret" not in settings


def test_every_tracker_gets_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: Mock() for name in sinks.SINKS}
    for name, sink in made.items():
        monkeypatch.setitem(sinks.SINKS, name, lambda config, steps_done, sink=sink: sink)
    config = config_of(tmp_path, "tensorboard", "trackio", use_wandb=True)
    assert config.trackers == ("tensorboard", "trackio", "wandb")
    log = build_metric_log(config, RunConsole(Console(file=(tmp_path / "out").open("w")), 3), 0)
    log.log(1, {"reward/mean": Mean(1.0)})
    log.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("wandb", "tensorboard", "trackio"):
        ((step, numbers), _), made_of = made[name].write.call_args, set(row) - {"format", "step", "time"}
        assert (step, set(numbers)) == (1, made_of) and made[name].close.called


# samples -------------------------------------------------------------------------------------------------------------


LETTERS = "abcdefgh"


def sample(reward: float, tokens: list[int] | None = None, *, logprob: float | None = None, **fields: Any) -> Sample:
    """`logprob`: the server's, of every trained token; all but the first two are trained."""
    tokens_T = np.array(tokens or [0, 1, 2, 3])
    fields = {"positions": np.arange(2, len(tokens_T)), "version": 7, **fields}
    known = None if logprob is None else np.full(len(fields["positions"]), logprob, np.float32)
    return Sample(tokens_T, reward=reward, rollout_logprobs=known, **fields)


def write(path: Path, step: int, *groups: Group, count: int = 2, longest: int = 99) -> str:
    """Log samples whose tokens the trained policy gives half the probability that the server gave."""
    log = SampleLog(path, count, LossConfig(), lambda tokens: "".join(LETTERS[t] for t in tokens), longest=longest)
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
    silent = TrainConfig(model_name=str(tmp_path), save_path=tmp_path / "run", log_samples=count)
    assert build_sample_log(silent, 0) is None
    assert not (tmp_path / "run").exists()


def test_samples_show_the_spaces_that_were_sampled(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.save_pretrained(tmp_path / "model")
    log = build_sample_log(
        TrainConfig(model_name=str(tmp_path / "model"), save_path=tmp_path / "run", log_samples=1), 0
    )
    assert log is not None
    words = tokenizer.encode("do n't .")
    group = Group((sample(1.0, [*words, 5], positions=np.array([len(words)])),))
    log.choose([group])
    for _ in range(2):  # the second time is that of a step that ends with an error: none is written twice
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
    run_steps(two, Progress(0, 0), fakes, fakes, Desk(fakes, fakes, fakes), fakes)
    seen = [event for event in fakes.events if event.startswith(("samples", "choose")) or event == "write"]
    assert seen == ["choose", "write", "samples 1", "choose", "write", "samples 2"]
    assert capsys.readouterr().out.count("of step") == 1, "only the first"
