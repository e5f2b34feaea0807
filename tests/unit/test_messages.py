"""How errors read: `test_messages*.py` alone assert on their wording. Here: what a problem, a command and a run say."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grpo_common.errors import Problem, UserError
from grpo_trainer.config.options import build
from grpo_trainer.config.run import read_toml
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.before_start import Finding, fail, ok, warn
from grpo_trainer.doctor.command import print_findings
from grpo_trainer.errors import ConfigError, HungError, StoppedError, TrainingError
from grpo_trainer.launch.process import Process
from grpo_trainer.parallel.world import World
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.shutdown import RunState, save_on_exit
from grpo_trainer.signals import StopSignal
from tests.unit.test_supervisor import spec

# what all errors have in common ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (
            Problem(field="--dtype", got="int8", wanted="float32 or bfloat16", fix="use --dtype auto"),
            "--dtype: got int8, wanted float32 or bfloat16; use --dtype auto",
        ),
        (
            Problem(field="--sharding", got="full", fix="use --sharding none", summary="supports no reference model"),
            "--sharding: supports no reference model; got full; use --sharding none",
        ),
        (Problem(field="seed", wanted="a number"), "seed: wanted a number"),
        (Problem(summary="the server was killed by SIGKILL"), "the server was killed by SIGKILL"),
    ],
)
def test_a_problem_in_words(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_an_error_carries_its_parts_and_reads_as_its_problem() -> None:
    error = UserError(field="--port", got=80, wanted="1024 or more", fix="choose another")
    assert (error.field, error.got, error.wanted, error.fix) == ("--port", "80", "1024 or more", "choose another")
    assert str(error) == str(error.problems[0])


def test_several_problems_are_a_line_each() -> None:
    first, second = Problem(field="a", got="1", wanted="2"), Problem(field="b", summary="unknown")
    error = UserError.of([first, second])
    assert error.problems == (first, second) and error.field == "a"
    assert str(error).splitlines() == [str(first), str(second)]


# the doctor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([ok("a", "b")], "nothing stands in the way"),
        ([ok("a", "b"), warn("c", "d", "e", "f")], "nothing fails for certain; warnings: c"),
        ([warn("c", "d", "e", "f"), fail("g", "h", "i", "j")], "1 would fail"),
    ],
)
def test_a_doctors_verdict(findings: list[Finding], verdict: str) -> None:
    said = io.StringIO()
    print_findings(findings, None, Console(file=said, width=80))
    assert said.getvalue().splitlines()[-1] == verdict


# options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lr_schedul": "linear"}, "lr_schedul: unknown option; did you mean lr_schedule?"),
        ({"--lr-schedul": "linear"}, "--lr-schedul: unknown option; did you mean --lr-schedule?"),
        (
            {"--no-vllm-standby": True},
            "--no-vllm-standby: this option has been removed; leave it out: vLLM is imported at each restart",
        ),
        (
            {"lora_r": 8},
            "--lora-r: belongs to another mode; got --weight-bridge-mode none, "
            "wanted --weight-bridge-mode lora_only, lora_restart; "
            "leave it out, or choose --weight-bridge-mode lora_only",
        ),
        (
            {"seq_len": "many", "lr": -1},
            "--seq-len: got many, wanted a valid integer\n--lr: got -1, wanted a number greater than 0",
        ),
        ({"model_name": None}, "--model-name: got nothing, wanted a value: it is required"),
        (
            {"weight_bridge_mode": "lora_only", "lora_r": 24},
            "--lora-r: got 24, wanted a rank that vLLM serves: 1, 8, 16, 32, 64, 128, 256, 320, 512; use 32",
        ),
    ],
)
def test_options(given: Mapping[str, Any], text: str) -> None:
    values = {"model_name": "m", **given}
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {key: value for key, value in values.items() if value is not None})
    assert str(error.value) == text


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[trainer\n")
    with pytest.raises(ConfigError) as error:
        read_toml(file)
    assert str(error.value) == (
        f"--config {file}: not TOML: Expected ']' at the end of a table declaration (at line 1, column 9); "
        "correct the file there"
    )


# processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "print('ValueError: no room'); print('one'); print('two'); raise SystemExit(3)",
            "server: has ended; got exit code 3; see LOG. The first errors in it:\n"
            "  ValueError: no room\nIts last lines:\n  one\n  two",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "server: has ended; got killed by SIGKILL; see LOG. Its last lines:\n  (none)",
        ),
    ],
)
def test_a_process_that_has_ended(tmp_path: Path, code: str, text: str) -> None:
    log = tmp_path / "server.log"
    child = Process(spec("server", code), log, last_lines=2)
    child.popen.wait()
    assert str(child.ended()) == text.replace("LOG", str(log))
    child.close()


# a run's end and its resumption ------------------------------------------------------------------------------


class Spoilt(TrainingError):
    """Ends a run whose weights are not to be saved."""

    spoils_weights = True


def stopped() -> StoppedError:
    """What a run raises after SIGTERM."""
    with StopSignal() as stop, pytest.raises(StoppedError) as error:
        signal.raise_signal(signal.SIGTERM)
        stop.check()
    return error.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (stopped, "stopped by SIGTERM at step 12; saved runs/sums/adapter_step_12, continue with --resume auto"),
        (
            lambda: HungError("a step takes longer than 60 s", field="--step-timeout", fix="raise it"),
            "--step-timeout: a step takes longer than 60 s; raise it; stopped at step 12; "
            "saved runs/sums/adapter_step_12, continue with --resume auto",
        ),
        (
            lambda: Spoilt("the processes' weights differ"),
            "the processes' weights differ; stopped at step 12; the weights are not saved, since they can't be relied "
            "on; continue from runs/sums/adapter_step_10 with --resume auto",
        ),
    ],
)
def test_the_end_of_a_run(error: Callable[[], Exception], text: str) -> None:
    root = Path("runs/sums")
    saving: Any = SimpleNamespace(save=lambda _: root / "adapter_step_12", safe_path=root / "adapter_step_10")
    feed: Any = SimpleNamespace(settle=lambda *_, **__: None)
    end = error()
    save_on_exit(end, RunState(Progress(), Progress(12, 12), None), saving, feed, World())
    assert str(end) == text


def test_the_end_of_a_run_without_checkpoints() -> None:
    saving: Any = SimpleNamespace(safe_path=None)
    feed: Any = SimpleNamespace()
    end = StoppedError(signal.SIGTERM)
    save_on_exit(end, RunState(Progress(), Progress(12, 12), None, saves=False), saving, feed, World())
    assert str(end).endswith("at step 12; nothing is saved (--checkpoint-interval never); start again")
