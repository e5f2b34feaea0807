"""How errors and the lines of a run read: this file alone asserts on wording."""

from __future__ import annotations

import asyncio
import io
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from environments.api import groups, wire
from environments.api.__main__ import parse as parse_api
from environments.api.errors import ApiError
from grpo_common.errors import Problem, UserError
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.before_start import Finding, fail, ok, warn
from grpo_trainer.doctor.command import print_findings
from grpo_trainer.errors import ConfigError, HungError, ServerError, StoppedError, TrainingError
from grpo_trainer.launch.process import Process
from grpo_trainer.logs.console import RunConsole, live_line, step_line, waits_line
from grpo_trainer.parallel.world import World
from grpo_trainer.phases import IN_WORDS, LOGGED, STARTING, Wait
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.server_client import ATTEMPTS
from grpo_trainer.shutdown import RunState, save_on_exit
from grpo_trainer.signals import StopSignal
from tests.unit import test_environment_runner as runner
from tests.unit.test_environment_options import parse
from tests.unit.test_server_client import Answer, server
from tests.unit.test_supervisor import spec
from vllm_server.errors import ServeError
from vllm_server.http import parse_body
from vllm_server.protocol import LoraLoadRequest

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
        ([ok("b", name="a")], "nothing stands in the way"),
        ([ok("b", name="a"), warn("d", "e", "f", "c")], "nothing fails for certain; warnings: c"),
        ([warn("d", "e", "f", "c"), fail("h", "i", "j", "g")], "1 would fail"),
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
    ],
)
def test_options(given: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {"model_name": "m", **given})
    assert str(error.value) == text


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


# the lines of a run as text ---------------------------------------------------------------------------------


def test_a_step_in_a_line() -> None:
    numbers = {
        "reward/mean": 0.25, "train/loss": -0.5, "grpo/mean_ratio": 1.01, "rollout/staleness_mean": 1.0,
        "batch/zero_variance_share": 0.5, "train/tokens_per_second": 1234.0, "train/data_fetch_time": 0.1,
        "train/step_time": 0.2, "train/sync_time": 0.003, "publish/version": 7.0, "publish/served_version": 5.0,
    }  # fmt: skip
    assert step_line(7, 10, numbers) == (
        "Step  7/10  reward 0.250  loss -0.5000  ratio 1.010  stale 1.0  zero-var 50%  1,234 tok/s  "
        "wait 0.10 step 0.20 publish 0.003 s  v5"
    )


def test_a_step_without_anything_to_learn_from_says_so_and_shows_no_number_that_there_is_not() -> None:
    numbers = {"reward/mean": 1.0, "train/loss": 0.0, "train/skipped": 1.0, "batch/zero_variance_share": 1.0}
    line = "Step 1/1  reward 1.000  nothing to learn: no group has a spread of rewards  zero-var 100%"
    assert step_line(1, 1, numbers) == line


def test_the_live_line() -> None:
    numbers = {"reward/mean": 0.7123, "health/kl": 0.0, "train/loss": 0.1}
    # seconds of a step: (2.0 + 2.1 + 2.1) / 3 = 2.07, as the longest counts as the second longest; 90 of them: 186 s
    assert live_line(30, 120, numbers, [0.0, 0.5, 1.0], [2.0, 2.1, 8.0]) == (
        "step 30/120  2.07 s a step  3 min left  reward 0.712 ▁▅█  healthy"
    )
    unhealthy = numbers | {"health/kl": 1.0, "health/ratio": 1.0}
    assert live_line(119, 120, unhealthy, [0.5] * 3, [80.0, 82.0, 84.0]) == (
        "step 119/120  81 s a step  81 s left  reward 0.712 ▁▁▁  OUT OF RANGE: KL, ratio"
    )


def test_the_live_line_shows_no_number_that_is_not_known_yet() -> None:
    assert live_line(1, 120, {"reward/mean": 0.25}, [0.25], [5.0]) == "step 1/120  reward 0.250 ▁"
    assert live_line(2, 120, {}, [], []) == "step 2/120"


def test_what_a_start_waits_for_in_one_line() -> None:
    server, trainer = Wait("server", STARTING, 20.4, "50% loaded"), Wait("trainer", IN_WORDS["model"], 3.0)
    assert waits_line([server, trainer]) == (f"server: starting, 20 s; trainer: {IN_WORDS['model']}, 3 s: 50% loaded")
    assert waits_line([]) == ""


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


def test_settings_are_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text("[env]\ngroup_sise = 3\n")
    with pytest.raises(UserError) as error:
        parse("--config", str(file), "--env.group_size", "0", "--env.seed", "x", "--env.operation", "?")
    assert str(error.value).splitlines() == [
        "--env.tokenizer_name: required, but not given",
        "--env.group_size: got '0', wanted a number greater than or equal to 1",
        "--env.seed: got 'x', wanted a valid integer",
        "--env.operation: got '?', wanted '+', '-' or '*'",
        "env.group_sise: no such setting; did you mean env.group_size?",
    ]


# what the rollout API answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"masks": [[-100], [-100, 3]]}, "masks[0]: 1 entries, tokens[0] has 2; expected one entry per token"),
        (
            {"tokens": [[1, -2], [1, 3]]},
            "tokens[0][1]: -2, expected a token id of the model, 0 or more; mark what is not trained in `masks`",
        ),
        ({"scores": [1.0]}, "scores: 1 for 2 sequences, expected one each"),
        ({"scores": [None, 1.0]}, "scores[0]: Expected `float`, got `null`"),
        ({"env_id": 99}, "env_id: never registered; got 99; take the id that POST /register-env answers with"),
    ],
)
def test_a_group_that_is_refused(fields: dict[str, Any], text: str) -> None:
    group = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0], **fields}
    service = asyncio.run(runner.started())
    with pytest.raises((ApiError, *groups.REFUSED)) as error:
        service.take(groups.read(msgspec.json.encode(group), wire.JSON))
    refused = error.value if isinstance(error.value, ApiError) else groups.refusal(error.value, wire.JSON)
    assert refused.response() == wire.ErrorResponse(detail=text, field=next(iter(fields)))


def test_a_body_that_is_cut_short() -> None:
    with pytest.raises(msgspec.DecodeError) as error:
        groups.read(b"{", wire.JSON)
    assert groups.refusal(error.value, wire.JSON).response().detail == "body: Input data was truncated; wanted JSON"


@pytest.mark.parametrize("flag", ["--ssl-certfile", "--ssl-keyfile"])
def test_an_api_with_a_certificate(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        parse_api([flag, "api.pem"])
    assert "grpo api does not serve TLS; put a proxy that does before it (SECURITY.md)" in capsys.readouterr().err


# the inference server ----------------------------------------------------------------------------------------


def test_a_request_that_the_server_refuses() -> None:
    with pytest.raises(ServeError) as error:
        parse_body(b'{"version": "newest"}', LoraLoadRequest)
    answer = error.value.response()["error"]
    assert answer["message"] == (
        "body: got a misfit (Expected `int | null`, got `str` - at `$.version`), "
        "wanted the JSON that docs/server.md describes; correct it"
    )
    assert (answer["code"], answer["type"], answer["param"]) == (422, "UnprocessableEntityError", "body")
    assert answer["message"] == "{param}: got {got}, wanted {wanted}; {fix}".format(**answer)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer(502, "bad gateway"), 'the inference server refuses GET URL with 502; got "bad gateway"'),
        (
            {"of": "another kind"},
            "GET URL: not the answer of `grpo serve`: Object missing required field `lora_available`",
        ),
        (
            None,
            "GET URL: no answer from the inference server; got RemoteProtocolError: Server disconnected without "
            "sending a response.; see in its log whether it still runs",
        ),
    ],
)
def test_a_server_that_refuses(answer: object, text: str) -> None:
    with server([answer] if answer else [None] * ATTEMPTS) as (client, _), pytest.raises(ServerError) as error:
        client.lora_status()
    said = re.sub(r"http://127.0.0.1:\d+/lora/status", "URL", str(error.value))
    assert said == text
