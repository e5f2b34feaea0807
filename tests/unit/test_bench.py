"""`grpo bench`: shapes, options, commands, and the sums behind each line of figures, by hand."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from typer.testing import CliRunner

from grpo_common.ports import listener
from grpo_trainer import cli
from grpo_trainer.bench import __main__ as command
from grpo_trainer.bench import loop as whole_run
from grpo_trainer.bench.api import ApiOptions, measure, own_server
from grpo_trainer.bench.load import GROUP, Demand, counter_total, keep_busy
from grpo_trainer.bench.loop import ENVIRONMENT, LAST_STEPS, LoopOptions, run_process, start_figures, step_figures
from grpo_trainer.bench.models import SHAPES, ensure_model
from grpo_trainer.bench.publish import SyncOptions, publish_figures
from grpo_trainer.bench.step import StepOptions, completion_lengths, step_flops, synthetic_batch
from grpo_trainer.config.options import Section, build
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import ConfigError, ProcessFailedError, ServerError
from grpo_trainer.model.load import load_model
from grpo_trainer.model.shape import ModelShape
from tests.processes import ROOT, once
from tests.stand_ins import Asked, Reply, answering
from tests.unit.factories import refusing

# ------------------------------------------------------------------------------------------------------- models


def test_model_of_a_shape_is_written_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    folder, shape = tmp_path / "model", SHAPES["tiny"]
    ensure_model(shape, folder, torch.float32)
    assert load_model(ModelConfig(model_name=str(folder), device="cpu")).num_parameters() == shape.parameters
    written = (folder / "model.safetensors").stat().st_mtime_ns
    ensure_model(shape, folder, torch.float32)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError) as error:
        ensure_model(SHAPES["7b"], folder, torch.float32)
    assert str(shape.hidden) in error.value.got and str(SHAPES["7b"].hidden) in error.value.wanted
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with refusing(ConfigError, f"--model-dir {tmp_path / 'thesis'}", words=["no model"]):
        ensure_model(shape, tmp_path / "thesis", torch.float32)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.txt"]


# ------------------------------------------------------------------------------------------ options and commands


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (LoopOptions, {"warmup_steps": 20}, "--warmup-steps"),
        (SyncOptions, {"step_seqs": 12}, "--step-seqs"),
        (StepOptions, {"seqs": 12}, "--seqs"),
    ],
)
def test_options_that_do_not_go_together(kind: type[Section], given: dict[str, Any], field: str) -> None:
    with refusing(ConfigError, field):
        build(kind, given)


@pytest.mark.parametrize(("shape", "most"), [("1.5b", 16_384), ("7b", 12_288)])
def test_loop_is_a_run_with_its_defaults(shape: str, most: int) -> None:
    argv = run_process(build(LoopOptions, {"shape": shape}), Path("m"), Path("r"), ()).argv
    words = argv[argv.index("run") + 1 :]
    flags = dict(zip(words[::2], words[1::2], strict=True))  # each has a value
    own = [word for flag, value in flags.items() if flag.startswith("--env.") for word in (flag, value)]
    given = {flag[2:].replace("-", "_"): each for flag, each in flags.items() if flag not in own}
    config = build_run({}, given, own)
    trainer, (environment,) = config.trainer, config.environments
    assert (trainer.sequences_per_step, trainer.training_steps, trainer.seq_len) == (256, 25, 256 + 1024)
    assert trainer.max_tokens_per_microbatch == most and environment.name == ENVIRONMENT
    assert environment.env == {"group_size": "8", "prompt_tokens": "256", "completion_mean": "350.0"}
    assert trainer.checkpoint_interval == build_run({}, {"model_name": "m"}).trainer.checkpoint_interval


def test_loop_options_after_two_dashes_are_the_runs_and_win(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"bridge": "lora_only", "share_base": True, "shape": "tiny"}
    argv = run_process(build(LoopOptions, asked), Path("m"), Path("r"), ("--checkpoint-interval", "0")).argv
    assert argv[-3:] == ("--share-base", "--checkpoint-interval", "0")
    assert argv[argv.index("--gradient-accumulation-steps") + 1] == "4"
    became: list[Any] = []
    monkeypatch.setattr(cli, "_become", lambda *words: became.append(words))
    typed = ["--shape", "tiny", "--", "--checkpoint-interval", "0", "--no-proof"]
    assert CliRunner().invoke(cli.app, ["bench", "loop", *typed]).exit_code == 0
    assert became == [("grpo_trainer.bench", ["loop", *typed])]
    monkeypatch.setattr(whole_run, "measure", lambda options, more: {"shape": options.shape, "more": more})
    done = CliRunner().invoke(command.app, ["loop", *typed])
    assert json.loads(done.stdout) == {"shape": "tiny", "more": ["--checkpoint-interval", "0", "--no-proof"]}


def test_command_lists_its_benchmarks_and_its_options_need_no_torch() -> None:
    usage = CliRunner().invoke(command.app, [])
    kinds = re.findall(r"^│ (\w+) ", usage.output, re.MULTILINE)
    assert usage.exit_code == 2 and kinds == ["loop", "step", "sync", "api"]
    code = "import sys, grpo_trainer.bench.__main__; print([m for m in ('torch', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
    wrong, gone = (
        CliRunner().invoke(command.app, words).exception for words in (["sync", "--shape", "huge"], ["fence"])
    )
    assert isinstance(wrong, ConfigError) and (wrong.field, wrong.exit_code) == ("--shape", 2) and "huge" in wrong.got
    assert isinstance(gone, ConfigError) and (ROOT / gone.fix.split()[2].rstrip(",")).is_file()


# --------------------------------------------------------------------------------------------------------- step


def test_operations_by_hand() -> None:
    # hidden 4, inner 6, 2 layers, 2 heads of 2, 1 of keys and values, 10 tokens
    shape = ModelShape(4, 6, 2, 2, 1, 2, 10, tied=False)
    # a layer: q and o 4 x 4, k and v 4 x 2, three of 4 x 6: 32 + 16 + 72 = 120 elements
    # 5 tokens, 3 of them trained: 5 x 6 x 120 x 2 + 3 x 6 x 4 x 10; pairs 15: 3 x 4 x 15 x 4 x 2
    assert step_flops(shape, [(2, 3)], lora_r=0) == 7200 + 720 + 1440
    # frozen: 4 instead of 6; an adapter of rank 1: 2 x (4 + 4) + 2 x (4 + 2) + 3 x (4 + 6) = 58 a layer
    assert step_flops(shape, [(2, 3)], lora_r=1) == 4800 + 5 * 6 * 116 + 480 + 1440
    # one prompt for both: 8 tokens' layers instead of 10, and its 3 pairs of tokens once
    shared = step_flops(shape, [(2, 3), (2, 3)], lora_r=0, readers=2)
    assert shared == 2 * 9360 - 2 * 7200 / 5 - 3 * 1440 / 15


def test_rollouts_of_a_seed() -> None:
    assert completion_lengths(StepOptions(seqs=16, completion_len=100), np.random.default_rng(0)).tolist() == [100] * 16
    drawn = completion_lengths(StepOptions(seqs=4096, lognormal=True), np.random.default_rng(0))
    assert drawn.max() == 1024 and drawn.min() >= 8
    assert 290 < np.median(drawn) < 325  # 0.3 x 1024 = 307
    options = StepOptions(shape="tiny", seqs=16, prompt_len=4, completion_len=9, lognormal=True)
    one = synthetic_batch(options, seed=1)
    assert len(one.groups) == 2
    for group in one.groups:
        assert len({tuple(sample.tokens_T[:4]) for sample in group.samples}) == 1
        assert len(set(group.rewards)) == 8
        assert all(sample.positions.tolist() == [*range(4, len(sample.tokens_T))] for sample in group.samples)


def test_step_of_an_adapter() -> None:
    sizes = ["--seqs", "8", "--prompt-len", "6", "--completion-len", "20", "--lognormal", "--json"]
    compute = ["--packing", "on", "--max-tokens-per-microbatch", "64", "--warmup", "1", "--steps", "2"]
    done = CliRunner().invoke(command.app, ["step", "--shape", "tiny", "--lora-r", "8", *sizes, *compute])
    row = json.loads(done.stdout)
    assert (row["shape"], row["lora_r"], row["packed"], row["whole_logits"]) == ("tiny", 8, True, False)
    assert len(row["step_s"]) == 2 and row["microbatches"] > 1
    # 8 prompts of 6 tokens, and completions: the mean of both steps
    prompts = (row["tokens_per_s"] - row["completion_tokens_per_s"]) * row["step_s_median"]
    assert prompts == pytest.approx(48, rel=0.01)
    assert len(row["loss"]) == len(row["grad_norm"]) == 2


# --------------------------------------------------------------------------------------------------------- loop


def row(step: int, at: float, seconds: float, **others: float) -> dict[str, Any]:
    usual = {"data_fetch_time": 1.0, "step_time": 2.0, "sync_time": 0.5}
    named = {f"train/{name}": value for name, value in usual.items()}
    work = {"batch/sequences": 16, "batch/trained_tokens": 160, "batch/tokens": 320}
    return {"step": step, "time": at, "train/seconds": seconds, **named, **work, **others}


ROWS = [
    row(1, 100.0, 20.0, **{"start/server_reached": 12.0, "rollout/staleness_mean": 9.0, "rollout/staleness_max": 9.0}),
    row(2, 104.0, 4.0, **{"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0, "gpu/memory_used_gib": 4.0}),
    row(3, 110.0, 6.0, **{"rollout/staleness_mean": 1.0, "rollout/staleness_max": 2.0, "train/save_time": 1.0}),
]
LAST = [row(4 + number, 110.0 + number, 1.0) for number in range(LAST_STEPS)]
"""Steps that are not measured."""


def test_loop_line_by_hand() -> None:
    versions = {"time": 1.0, "python": "3", "torch": "2", "vllm": "0", "gpus": ["H", "H"]}
    line = whole_run.line(build(LoopOptions, {"warmup_steps": 1}), ("--x",), [*ROWS, *LAST], 70.0, versions)
    figures = {
        "step_s": 5.0,
        "completion_tokens_per_s": 32.0,  # 2 x 160 in 10 s
        "trained_tokens_per_s": 64.0,
        "completion_tokens_mean": 10.0,
        "split": {"wait_s": 1.0, "step_s": 2.0, "publish_s": 0.5, "save_s": 0.5, "other_s": 1.0},
        "staleness": {"mean": 0.75, "max": 2.0},
        # the first row is of 100: it published for 0.5 s, trained for 2 and waited for 1
        "start_s": {"server_ready": 12.0, "trainer_ready": 26.5, "first_batch": 27.5, "first_step": 30.0},
        "peak_memory_gb": {"gpu": 4.295},
        **{"device": "H", "devices": 2, "versions": {"vllm": "0", "torch": "2", "python": "3"}},
        **{"steps": 3, "warmup_steps": 1, "run_options": ["--x"]},
    }
    assert {key: line[key] for key in figures} == figures
    with refusing(ConfigError, "--warmup-steps"):
        whole_run.line(build(LoopOptions, {"warmup_steps": 3}), (), [*ROWS, *LAST], 0.0, versions)


def test_loop_counts_a_fence_within_the_step_once() -> None:
    shared = [{**each, "publish/write_time": 0.1} for each in ROWS[1:]]
    split = {"wait_s": 1.0, "step_s": 1.5, "publish_s": 0.5, "save_s": 0.5, "other_s": 1.5}
    assert step_figures(shared)["split"] == split
    assert start_figures(70.0, shared[0] | {"start/server_reached": 9.0})["first_batch"] == 32.0  # 104 less 2
    # weights that are sent are written within a fence, too, but after the step
    assert step_figures([{**each, "publish/send_time": 0.3} for each in shared]) == step_figures(ROWS[1:])


# --------------------------------------------------------------------------------------------- sync, and its load


def test_publish_figures_are_medians_of_what_the_bridge_timed() -> None:
    times = ("train/sync_time", 1.0), ("publish/stall_time", 0.02), ("publish/save_time", 0.1), ("publish/version", 7.0)
    publishes = [{key: total * share for key, share in times} for total in (0.04, 0.01, 0.03, 0.02)]
    assert publish_figures(publishes) == pytest.approx(
        # 95 of 100: place 2.85 of 0 to 3, 30 + 0.85 * 10
        {"publish_p50_ms": 25.0, "publish_p95_ms": 38.5, "save_ms": 2.5, "stall_ms": 0.5, "stall_p95_ms": 0.77}
    )


def test_server_metrics_are_summed_over_labels() -> None:
    metrics = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a } b"} 1200.0
vllm:generation_tokens_total{engine="1",model_name="m"} 3.4e+02
vllm:generation_tokens_total_created{engine="0"} 1.7e+09
plain 7.0 1700000000
"""
    assert counter_total(metrics, "vllm:generation_tokens_total") == 1540.0
    assert counter_total(metrics, "plain") == 7.0
    with pytest.raises(ServerError) as error:
        counter_total(metrics, "vllm:generation_tokens")
    assert "/metrics" in error.value.field and error.value.wanted == "vllm:generation_tokens"


def test_load_keeps_its_connections_busy_until_it_is_refused() -> None:
    bodies: list[dict[str, Any]] = []
    full = threading.Barrier(4)  # connections, each with 8 sequences

    def answer(asked: Asked) -> Reply:
        bodies.append(asked.json())
        full.wait(60)
        return Reply(json={}) if len(bodies) < 12 else Reply(500, json={})

    with answering(answer) as url, pytest.raises(ExceptionGroup) as error:
        keep_busy(Demand(url, 4 * GROUP, prompt_len=5, completion_len=8, vocab=50, routing={"policy_version": 0}))
    assert "500: {}" in str(error.value.exceptions[0])
    body = bodies[0]
    assert (body["n"], body["ignore_eos"], body["policy_version"]) == (GROUP, True, 0)
    assert len(body["prompt"]["prompt_token_ids"]) == 5 and max(body["prompt"]["prompt_token_ids"]) < 50
    # the first four end one after the other, all later ones are whole
    assert sorted(each["max_tokens"] for each in bodies[:4]) == [2, 4, 6, 8]
    assert {each["max_tokens"] for each in bodies[4:]} == {8}


# ---------------------------------------------------------------------------------------------------------- api


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["consumer", "rollout API"])
def test_api_load_ends_with_the_name_of_a_process_that_is_killed(name: str) -> None:
    """In the middle of a measurement, while the others wait for it; no process is left."""
    options = build(ApiOptions, {"groups": 8000, "group_size": 1, "tokens": 4, "clients": 2})
    with own_server(None) as url:
        api = listener(int(url.rpartition(":")[2]))
        assert api is not None

        def children() -> dict[str, psutil.Process]:
            found = {each.name: psutil.Process(each.pid) for each in multiprocessing.active_children() if each.pid}
            return found | {"rollout API": api}

        def is_under_way() -> bool:
            if len(children()) < 4:
                return False
            environments = httpx.get(f"{url}/status", trust_env=False).json()["environments"]
            return any(each["received_groups"] for each in environments)

        kill = once(is_under_way, lambda: children()[name].kill())
        with kill as killed, pytest.raises(ProcessFailedError) as error:
            measure(options, url)
        assert killed and error.value.field.startswith(name)
        assert not multiprocessing.active_children()


@pytest.mark.timeout(300)
def test_api_load_ends_with_the_name_of_a_process_that_is_refused() -> None:
    """The others still wait for their answers."""
    options = build(ApiOptions, {"groups": 8, "group_size": 1, "tokens": 4, "clients": 2})
    over, paths = threading.Event(), list[str]()

    def answer(asked: Asked) -> Reply:
        paths.append(asked.path)
        if len(paths) <= 4:  # reset, trainer, batch, environment: the run is opened
            return Reply(json={"env_id": 0})
        if asked.path != "/scored_data":
            over.wait(100)
        return Reply(500)

    with answering(answer) as url:
        try:
            with pytest.raises(ProcessFailedError) as error:
                measure(options, url)
        finally:
            over.set()
    assert error.value.field.startswith("poster") and "500" in error.value.got
    assert not multiprocessing.active_children()
