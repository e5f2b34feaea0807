"""`grpo bench loop`: its environment, its commands, and the sums behind its line."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from environments.peers.inference import Completion, Sampling
from environments.synthetic_server import SyntheticConfig, SyntheticEnv, draw_length
from environments.tokenizers import load_tokenizer
from grpo_trainer import cli
from grpo_trainer.bench import __main__ as command
from grpo_trainer.bench import devices
from grpo_trainer.bench.figures import cache_tokens
from grpo_trainer.bench.loop import measure
from grpo_trainer.bench.loop.figures import (
    CPU_ROLES,
    Load,
    Look,
    Window,
    can_hold,
    cpu_per_group,
    server_figures,
    start_figures,
    step_figures,
)
from grpo_trainer.bench.loop.options import LAST_STEPS, LoopOptions
from grpo_trainer.bench.loop.processes import ENVIRONMENT, role_of, run_process
from grpo_trainer.bench.random_model import ensure_model
from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.config.environments import environment_command
from grpo_trainer.config.options import build
from grpo_trainer.config.run import RunConfig, build_run
from grpo_trainer.errors import ConfigError

# ------------------------------------------------------------------------------------------------- environment


class Drawn(random.Random):
    """Draws these numbers."""

    def __init__(self, *numbers: float) -> None:
        self.random = iter(numbers).__next__  # pyright: ignore[reportAttributeAccessIssue]


def test_draw_length_is_geometric_together_with_the_end_token() -> None:
    # 1/2 of all tokens are the last, 1/10 are the end token: the limit ends 4/9 of the others, 1/2 = 9/10 * 5/9
    # P(length > 1) = 5/9 = 0.556, P(length > 2) = 25/81 = 0.309
    lengths = [draw_length(Drawn(1 - above), 2.0, 10) for above in (1.0, 0.56, 0.55, 0.31, 0.30)]
    assert lengths == [1, 1, 2, 2, 3]
    assert draw_length(Drawn(0.99), 1.0, 10) == 1  # each token is the last
    assert draw_length(Drawn(0.5), 1000.0, 10) > 10**6  # the end token alone is too frequent


class Answering:
    """A server whose completions have the lengths that they may have."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt_token_ids, sampling))
        length = sampling.max_tokens
        return [Completion(prompt_token_ids, [5] * length, [-0.5] * length, "", "length", 3)] * n

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise AssertionError("nobody teaches here")

    async def close(self) -> None: ...


def test_a_group_of_the_synthetic_environment(tmp_path: Path) -> None:
    ensure_model(SHAPES["tiny"], tmp_path / "m", torch.float32)
    server = Answering()
    config = SyntheticConfig(
        tokenizer_name="m", group_size=3, prompt_tokens=20, completion_mean=12, max_token_length=50
    )
    env = SyntheticEnv(config, server, load_tokenizer(str(tmp_path / "m")))

    async def scene() -> list[Any]:
        await env.setup()
        items = [next(env.items) for _ in range(400)]
        return [*[await env.collect_trajectories(item) for item in items], await env.evaluate()]

    *groups, evaluation = asyncio.run(scene())
    lengths = [sampling.max_tokens for _, sampling in server.asked]
    assert [[len(tokens) - 20 for tokens in group.tokens] for group in groups[:2]] == [lengths[:3], lengths[3:6]]
    assert groups[0].scores == [float(length % 2 == 0) for length in lengths[:3]]  # even lengths are paid for
    assert groups[0].policy_versions == [3, 3, 3]
    assert evaluation == {"accuracy": pytest.approx(sum(length % 2 == 0 for length in lengths[-3:]) / 3)}
    # the limit ends a token with p = (1/12 - 1/98) / (1 - 1/98) = 0.0739: mean (1 - (1 - p)^30) / p = 12.2
    assert (min(lengths), max(lengths)) == (1, 30) and 11 < sum(lengths) / len(lengths) < 13.4
    prompts = {tuple(prompt) for prompt, _ in server.asked}
    assert len(prompts) == 401 and {len(prompt) for prompt in prompts} == {20}


# ------------------------------------------------------------------------------------------- options and commands


def config_of(argv: Sequence[str]) -> RunConfig:
    """What `grpo run` makes of a command whose options all have a value."""
    words = list(argv[argv.index("run") + 1 :])
    flags = dict(zip(words[::2], words[1::2], strict=True))
    own = [word for flag, value in flags.items() if flag.startswith("--env.") for word in (flag, value)]
    others = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items() if flag not in own}
    return build_run({}, others, own)


@pytest.mark.parametrize(("shape", "most"), [("0.5b", 16_384), ("1.5b", 16_384), ("7b", 12_288)])
def test_the_usual_conditions(shape: str, most: int) -> None:
    asked = build(LoopOptions, {"shape": shape})
    config = config_of(run_process(asked, Path("m"), Path("r"), ()).argv)
    trainer, (environment,) = config.trainer, config.environments
    assert (trainer.sequences_per_step, trainer.training_steps, trainer.model.seq_len) == (256, 25, 256 + 1024)
    assert trainer.compute.max_tokens_per_microbatch == most
    assert environment.name == ENVIRONMENT
    assert environment.env == {"group_size": "8", "prompt_tokens": "256", "completion_mean": "350.0"}
    defaults = build_run({}, {"model_name": "m"})
    assert trainer.checkpoints.checkpoint_interval == defaults.trainer.checkpoints.checkpoint_interval
    assert config.server.extra_args == ()


def test_options_of_the_run_win() -> None:
    asked = {"bridge": "lora_only", "share_base": True, "transport": "disk", "shape": "tiny", "sequences": 16}
    argv = run_process(build(LoopOptions, asked), Path("m"), Path("r"), ("--checkpoint-interval", "0")).argv
    assert argv[-3:] == ("--share-base", "--checkpoint-interval", "0")
    assert argv[argv.index("--lora-transport") + 1] == "disk"
    assert argv[argv.index("--gradient-accumulation-steps") + 1] == "2"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"warmup_steps": 20}, "--warmup-steps"),
        ({"sequences": 12}, "--sequences"),
        ({"share_base": True}, "--share-base"),
        ({"transport": "disk", "bridge": "none"}, "--transport"),
        ({"shape": "tiny", "completion_mean": 99}, "--completion-mean"),  # of 98 ids
        ({"completion_len": 16_129}, "--max-tokens-per-microbatch"),  # and 256 of the prompt: one more than a pass
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(LoopOptions, given)
    assert error.value.field == field


def test_what_follows_two_dashes_is_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(cli, "_become", lambda *words: became.append(words))
    typed = ["--shape", "tiny", "--", "--checkpoint-interval", "0", "--no-proof"]
    assert CliRunner().invoke(cli.app, ["bench", "loop", *typed]).exit_code == 0
    assert became == [("grpo_trainer.bench", ["loop", *typed])]
    monkeypatch.setattr(measure, "measure", lambda options, more: {"shape": options.model.shape, "more": more})
    done = CliRunner().invoke(command.app, ["loop", *typed])
    assert json.loads(done.stdout) == {"shape": "tiny", "more": ["--checkpoint-interval", "0", "--no-proof"]}


def test_roles_of_processes() -> None:
    trainer = "python -m grpo_trainer train --config r/config/trainer.toml"
    server = "python -m vllm_server --model m"
    for words, parent, role in (
        ("python -m environments.api --port 1", "run", "api"),
        (f"python -m {' '.join(environment_command(ENVIRONMENT))} serve", "run", "environment"),
        (server, "run", "server"),
        (server, "trainer", "server"),
        ("VLLM::EngineCore", "server", "engine"),
        (server, "server", "engine"),  # forked, and not named otherwise
        ("VLLM::Worker", "engine", "engine"),
        (trainer, "run", "trainer"),
        ("python compile_worker", "trainer", "trainer"),
    ):
        assert role_of(words, parent) == role, words


# ------------------------------------------------------------------------------------------------------ figures


def row(step: int, time: float, seconds: float, **others: float) -> dict[str, Any]:
    usual = {"data_fetch_time": 1.0, "step_time": 2.0, "sync_time": 0.5}
    named = {f"train/{name}": value for name, value in usual.items()}
    work = {"batch/sequences": 16, "batch/trained_tokens": 160, "batch/tokens": 320}
    return {"step": step, "time": time, "train/seconds": seconds, **named, **work, **others}


ROWS = [
    row(1, 100.0, 20.0, **{"rollout/staleness_mean": 9.0, "rollout/staleness_max": 9.0}),
    row(2, 104.0, 4.0, **{"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0}),
    row(3, 110.0, 6.0, **{"rollout/staleness_mean": 1.0, "rollout/staleness_max": 2.0, "train/save_time": 1.0}),
]
LAST = [row(4 + number, 110.0 + number, 1.0) for number in range(LAST_STEPS)]


def window_of(changes: dict[str, float] | None = None) -> Window:
    """Return the second and the third step, with these changes."""
    return Window.of([ROWS[0], *({**each, **(changes or {})} for each in ROWS[1:]), *LAST], 1)


def test_a_mean_step_by_hand() -> None:
    window = window_of()
    assert (window.begin, window.end, window.seconds, window.groups) == (100.0, 110.0, 10.0, 4.0)
    assert step_figures(window) == {
        "step_s": 5.0,
        "completion_tokens_per_s": 32.0,  # 2 x 160 in 10 s
        "trained_tokens_per_s": 64.0,
        "completion_tokens_mean": 10.0,
        "split": {"wait_s": 1.0, "step_s": 2.0, "publish_s": 0.5, "save_s": 0.5, "other_s": 1.0},
        "checkpoint_share": 0.1,
        "staleness": {"mean": 0.75, "max": 2.0},
    }
    with pytest.raises(ConfigError) as error:
        Window.of([*ROWS, *LAST], 3)
    assert error.value.field == "--warmup-steps"


def test_publishing_that_lies_within_the_step_is_counted_once() -> None:
    window = window_of({"publish/write_time": 0.1})
    split = {"wait_s": 1.0, "step_s": 1.5, "publish_s": 0.5, "save_s": 0.5, "other_s": 1.5}
    assert step_figures(window)["split"] == split
    assert start_figures(70.0, {}, window.rows[0])["first_batch"] == 32.0  # 104 less 2


def test_sending_weights_is_no_part_of_the_step_though_they_are_written_within_a_fence() -> None:
    window = window_of({"publish/write_time": 0.1, "publish/send_time": 0.3})
    assert step_figures(window) == step_figures(window_of())
    assert start_figures(70.0, {}, window.rows[0])["first_batch"] == 31.5  # 104 less 2.5


def test_cpu_time_between_looks_is_used_evenly() -> None:
    window = window_of()
    looks = [
        Look(96.0, {"api": 1.0, "model": 50.0}),
        Look(104.0, {"api": 2.0, "environment": 0.2}),  # at 100: 1.5 and 0.1
        Look(108.0, {"api": 4.0, "environment": 0.4, "server": 0.08}),
        Look(112.0, {"api": 4.0, "environment": 0.6, "server": 0.16}),  # at 110: 4.0, 0.5 and 0.12
    ]
    # in four groups: 2.5 s, 0.4 s and 0.12 s
    none = dict.fromkeys(CPU_ROLES.values(), 0.0)
    assert cpu_per_group(window, looks) == none | {"environment": 100.0, "api": 625.0, "server_front_end": 30.0}
    assert cpu_per_group(window, looks[:1]) == none


def test_what_a_server_can_hold() -> None:
    assert can_hold(cache_tokens=10_000, max_num_seqs=256, sequence_tokens=600.0) == 16
    assert can_hold(cache_tokens=10_000, max_num_seqs=8, sequence_tokens=600.0) == 8
    assert can_hold(cache_tokens=None, max_num_seqs=8, sequence_tokens=600.0) == 8
    assert can_hold(cache_tokens=None, max_num_seqs=None, sequence_tokens=600.0) is None
    info = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%s"} 1.0\n'
    others = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"
    assert cache_tokens(others + info % (0, "100") + info % (1, "100")) == 3200
    assert cache_tokens(others + info % (0, "None")) is None
    assert cache_tokens(others) is None


def test_how_busy_a_server_was() -> None:
    window = window_of()
    loads = [
        Load(99.0, 50.0),
        Load(101.0, 10.0),
        Load(103.0, 4.0),
        Load(105.0, 5.0),
        Load(110.0, 0.0),
        Load(111.0, 9.0),
    ]
    # those from 100 to 110: 10, 4, 5, 0; half of 10 is 5
    assert server_figures(window, loads, 10) == {
        "running_mean": 4.8, "can_hold": 10, "below_half_share": 0.5, "looks": 4,
    }  # fmt: skip
    assert server_figures(window, loads, None)["below_half_share"] is None
    assert server_figures(window, [], 10) == {
        "running_mean": None, "can_hold": 10, "below_half_share": None, "looks": 0,
    }  # fmt: skip


def test_phases_of_the_start_by_hand() -> None:
    seen = {"server_started": 71.0, "server_ready": 90.0, "trainer_started": 90.5}
    # the first row is of 100: it published for 0.5 s, trained for 2 and waited for 1
    assert list(start_figures(70.0, seen, ROWS[0]).items()) == [
        ("server_started", 1.0),
        ("server_ready", 20.0),
        ("trainer_started", 20.5),
        ("trainer_ready", 26.5),
        ("first_batch", 27.5),
        ("first_step", 30.0),
    ]


def test_a_server_that_never_answered_is_an_error() -> None:
    with pytest.raises(measure.ServerError) as error:
        measure.as_dict(build(LoopOptions, {}), (), ROWS, 0.0, SimpleNamespace(info=None))  # type: ignore[arg-type]
    assert error.value.field == "inference server"


def test_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def saying(*lines: str, status: int = 0) -> None:
        tool.write_text("\n".join(["#!/bin/sh", 'echo "$*" > ' + str(tmp_path / "asked"), *lines, f"exit {status}\n"]))
        tool.chmod(0o755)

    saying("echo 100", "echo 200")
    assert devices.gpus_used_mb("0,1") == 314.6  # 300 x 1.048576
    assert "-i 0,1" in (tmp_path / "asked").read_text()
    saying("echo NVIDIA H200")
    assert devices.gpu_names(None) == ["NVIDIA H200"]
    assert devices.gpus_used_mb("") is None and devices.gpu_names("") is None  # no GPU is visible
    saying("echo '[N/A]'")
    assert devices.gpus_used_mb(None) is None
    saying("echo no driver", status=9)
    assert devices.gpu_names(None) is None
