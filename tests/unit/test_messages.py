"""How errors and the lines of a run read: this file alone asserts on wording."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from environments.api.__main__ import parse as parse_api
from grpo_common.errors import UserError
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.before_start import Finding, fail, ok, warn
from grpo_trainer.doctor.checks import print_findings
from grpo_trainer.errors import StoppedError
from grpo_trainer.launch.process import Process
from grpo_trainer.logs.console import RunConsole, live_line, step_line, waits_line
from grpo_trainer.parallel.world import World
from grpo_trainer.phases import IN_WORDS, LOGGED, STARTING, Wait
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.shutdown import RunState, save_on_exit
from grpo_trainer.signals import StopSignal
from tests.unit.test_environment_options import parse
from tests.unit.test_supervisor import spec
from vllm_server.errors import ServeError
from vllm_server.http import parse_body
from vllm_server.protocol import LoraLoadRequest

# errors ------------------------------------------------------------------------------------------------------


def options(**given: Any) -> Callable[[], object]:
    return lambda: build(TrainConfig, {"model_name": "m", **given})


def problem(**parts: Any) -> Callable[[], object]:
    def refuse() -> None:
        raise UserError(**parts)

    return refuse


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (
            problem(field="--dtype", got="int8", wanted="float32 or bfloat16", fix="use --dtype auto"),
            "--dtype: got int8, wanted float32 or bfloat16; use --dtype auto",
        ),
        (
            problem(summary="supports no reference model", field="--sharding", got="full", fix="use --sharding none"),
            "--sharding: supports no reference model; got full; use --sharding none",
        ),
        (problem(summary="the server was killed by SIGKILL"), "the server was killed by SIGKILL"),
        (options(lr_schedul="linear"), "lr_schedul: unknown option; did you mean lr_schedule?"),
        (
            options(**{"--no-vllm-standby": True}),
            "--no-vllm-standby: this option has been removed; leave it out: vLLM is imported at each restart",
        ),
        (
            options(lora_r=8),
            "--lora-r: belongs to another mode; got --weight-bridge-mode none, "
            "wanted --weight-bridge-mode lora_only, lora_restart; "
            "leave it out, or choose --weight-bridge-mode lora_only",
        ),
        (
            options(seq_len="many", lr=-1),
            "--seq-len: got many, wanted a valid integer\n--lr: got -1, wanted a number greater than 0",
        ),
        (
            lambda: parse("--env.group_size", "0", "--env.seed", "x", "--env.operation", "?"),
            "--env.tokenizer_name: required, but not given\n"
            "--env.group_size: got '0', wanted a number greater than or equal to 1\n"
            "--env.seed: got 'x', wanted a valid integer\n"
            "--env.operation: got '?', wanted '+', '-' or '*'",
        ),
        (
            lambda: parse_body(b'{"version": "newest"}', LoraLoadRequest),
            "body: got a misfit (Expected `int | null`, got `str` - at `$.version`), "
            "wanted the JSON that docs/server.md describes; correct it",
        ),
    ],
)
def test_error_in_words(cause: Callable[[], object], text: str) -> None:
    with pytest.raises((UserError, ServeError)) as caught:
        cause()
    if isinstance(caught.value, ServeError):
        answer = caught.value.response()["error"]
        assert answer["message"] == "{param}: got {got}, wanted {wanted}; {fix}".format(**answer) == text
    else:
        assert str(caught.value) == text


@pytest.mark.parametrize("flag", ["--ssl-certfile", "--ssl-keyfile"])
def test_an_api_with_a_certificate(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        parse_api([flag, "api.pem"])
    assert "grpo api does not serve TLS; put a proxy that does before it (SECURITY.md)" in capsys.readouterr().err


def test_an_api_of_a_stored_run_with_a_removed_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_api(["--memory-mb", "512", "--port", "1"]) == parse_api(["--port", "1"])
    said = "--memory-mb has been removed and changes nothing; leave it out: --max-queued-mb bounds what waits"
    assert capsys.readouterr().err == f"warning: {said}\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "print('(Engine) ERROR ValueError: no room'); print('one'); print('OSError: two'); raise SystemExit(3)",
            "server: has ended; got exit code 3; see LOG. The first errors in it:\n"
            "  ValueError: no room\nIts last lines:\n  one\n  OSError: two",
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


# the end of a run --------------------------------------------------------------------------------------------


def stopped() -> StoppedError:
    """What a run raises after SIGTERM."""
    with StopSignal() as stop, pytest.raises(StoppedError) as error:
        signal.raise_signal(signal.SIGTERM)
        stop.check()
    return error.value


@pytest.mark.parametrize(
    ("error", "saves", "text"),
    [
        (stopped, True, "stopped by SIGTERM at step 12; saved runs/adapter_step_12, continue with --resume auto"),
        (
            stopped,
            False,
            "stopped by SIGTERM at step 12; nothing is saved (--checkpoint-interval never); start again",
        ),
    ],
)
def test_the_end_of_a_run(error: Callable[[], Exception], saves: bool, text: str) -> None:
    root, end = Path("runs"), error()
    safe = root / "adapter_step_10" if saves else None
    saving: Any = SimpleNamespace(save=lambda _: root / "adapter_step_12", safe_path=safe)
    save_on_exit(end, RunState(Progress(), Progress(12, 12), None, saves=saves), saving, lambda _: None, World())
    assert str(end) == text


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([ok("b", name="a")], "nothing stands in the way"),
        ([ok("b", name="a"), warn("d", "e", "f", "c")], "nothing fails for certain; warnings: c"),
        ([warn("d", "e", "f", "c"), fail("h", "i", "j", "g")], "1 would fail"),
    ],
)
def test_a_doctors_verdict(findings: list[Finding], verdict: str) -> None:
    said = io.StringIO()
    print_findings(findings, None, Console(file=said, width=80))
    assert said.getvalue().splitlines()[-1] == verdict


# the lines of a run ------------------------------------------------------------------------------------------

STEP = {
    "reward/mean": 0.25, "train/loss": -0.5, "grpo/mean_ratio": 1.01, "rollout/staleness_mean": 1.0,
    "batch/zero_variance_share": 0.5, "train/tokens_per_second": 1234.0, "train/data_fetch_time": 0.1,
    "train/step_time": 0.2, "train/sync_time": 0.003, "publish/version": 7.0, "publish/served_version": 5.0,
}  # fmt: skip
NOTHING = {"reward/mean": 1.0, "train/loss": 0.0, "train/skipped": 1.0, "batch/zero_variance_share": 1.0}
HEALTHY = {"reward/mean": 0.7123, "health/kl": 0.0, "train/loss": 0.1}
UNHEALTHY = {**HEALTHY, "health/kl": 1.0, "health/ratio": 1.0}
SERVER, TRAINER = Wait("server", STARTING, 20.4, "50% loaded"), Wait("trainer", IN_WORDS["model"], 3.0)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            step_line(7, 10, STEP),
            "Step  7/10  reward 0.250  loss -0.5000  ratio 1.010  stale 1.0  zero-var 50%  1,234 tok/s  "
            "wait 0.10 step 0.20 publish 0.003 s  v5",
        ),
        (
            step_line(1, 1, NOTHING),
            "Step 1/1  reward 1.000  nothing to learn: no group has a spread of rewards  zero-var 100%",
        ),
        # (2.0 + 2.1 + 2.1) / 3 = 2.07, as the longest step counts as the second longest; 90 of them: 186 s
        (
            live_line(30, 120, HEALTHY, [0.0, 0.5, 1.0], [2.0, 2.1, 8.0]),
            "step 30/120  2.07 s a step  3 min left  reward 0.712 ▁▅█  healthy",
        ),
        (
            live_line(119, 120, UNHEALTHY, [0.5] * 3, [80.0, 82.0, 84.0]),
            "step 119/120  81 s a step  81 s left  reward 0.712 ▁▁▁  OUT OF RANGE: KL, ratio",
        ),
        # no number that is not known yet
        (live_line(1, 120, {"reward/mean": 0.25}, [0.25], [5.0]), "step 1/120  reward 0.250 ▁"),
        (live_line(2, 120, {}, [], []), "step 2/120"),
        (waits_line([SERVER, TRAINER]), f"server: starting, 20 s; trainer: {IN_WORDS['model']}, 3 s: 50% loaded"),
        (waits_line([]), ""),
    ],
)
def test_a_line_of_a_run(line: str, text: str) -> None:
    assert line == text


def test_a_pipe_has_a_line_when_a_phase_begins_and_when_it_lasts() -> None:
    now: list[Wait] = []
    out = io.StringIO()
    view = RunConsole(Console(file=out, width=200), 10, lambda: now)
    begins = {0: "imports", 3: "model", 4: "compile", 50: "rollouts"}
    for second in (tenth / 10 for tenth in range(700)):
        since = max(begin for begin in begins if begin <= second)
        phase = Wait("trainer", begins[since], second - since, logged=begins[since] in LOGGED)
        now[:] = [Wait("server", STARTING, second, "loads"), phase]
        view.say_waits()
    assert out.getvalue().splitlines() == [
        "trainer: imports, 1 s",  # the model's phase takes less than a second
        "trainer: compile, 1 s",
        "server: starting, 10 s: loads",  # that it was started, was said before
        "trainer: compile, 10 s",
        "server: starting, 20 s: loads",
        "trainer: compile, 20 s",
        "server: starting, 40 s: loads",
        "trainer: compile, 40 s",
        "trainer: rollouts, 1 s",  # the trainer's own log says when that lasts
    ]
