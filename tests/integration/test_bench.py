"""`grpo bench` end to end on a CPU: a line of figures each, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.bench.models import SHAPES
from grpo_trainer.config.bridge import ALL_LINEAR
from tests.processes import ROOT, mentioning, running, tail, wait_for

pytestmark = pytest.mark.timeout(400)  # a server starts

LOOP = ("-m", "grpo_trainer", "bench", "loop", "--shape", "tiny")
STEP = ("--step-seqs", "8", "--step-prompt-len", "8", "--step-completion-len", "24")


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """The figures, of a measurement that leaves nothing behind."""
    temporary = folder / "a path that is too long for sockets, which are made elsewhere".replace(" ", "_")
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "grpo_trainer", "bench", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert not list(temporary.glob("grpo*")) and not mentioning(str(temporary))
    return json.loads(line)


def test_loop_measures_a_run(tmp_path: Path) -> None:
    run_options = ["--checkpoint-interval", "2"]
    steps = ("--steps", "20", "--warmup-steps", "2")
    row = measured(tmp_path, "loop", "--shape", "tiny", "--bridge", "lora_only", *steps, "--", *run_options)

    conditions = {"bridge": "lora_only", "shape": "tiny", "sequences": 32, "prompt_len": 16, "completion_len": 48}
    assert {key: row[key] for key in conditions} == conditions
    assert (row["steps"], row["warmup_steps"], row["run_options"]) == (20, 2, run_options)
    assert set(row["versions"]) == {"vllm", "torch", "python"} and row["device"] and row["dtype"] == "float32"
    assert 6 < row["completion_tokens_mean"] < 20  # 12 wanted
    prompts = row["trained_tokens_per_s"] - row["completion_tokens_per_s"]
    assert prompts * row["step_s"] == pytest.approx(32 * 16, rel=0.01)
    split = row["split"]
    assert set(split) == {"wait_s", "step_s", "publish_s", "save_s", "other_s"}
    assert sum(split.values()) == pytest.approx(row["step_s"], rel=0.01)
    assert split["save_s"] > 0 and row["checkpoint_share"] > 0  # a step's row has the save of the step before
    assert 0 <= row["staleness"]["mean"] <= row["staleness"]["max"] <= 5
    assert 0 <= row["server"]["running_mean"] <= row["server"]["can_hold"]
    start = list(row["start_s"])
    assert start.index("server_ready") < start.index("first_batch") and start[-1] == "first_step"
    assert start.index("trainer_ready") < start.index("first_batch")
    assert list(row["start_s"].values()) == sorted(row["start_s"].values())
    assert row["peak_memory_gb"] == {"gpu": None}


def test_loop_ends_all_that_it_started_at_a_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def lines() -> list[str]:
        return [" ".join(line) for line in mentioning(str(tmp_path))]

    with running(*LOOP, log=log, env={"TMPDIR": str(tmp_path)}) as process:
        wait_for("the server starts", lambda: any("-m vllm_server " in line for line in lines()), log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, tail(log)
    assert not lines() and not list(tmp_path.glob("grpo*"))


def test_loop_says_why_a_run_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, *LOOP, "--run-dir", str(tmp_path / "run"), "--", "--checkpoint-intervall", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=200)
    assert done.returncode == 1 and not done.stdout
    assert "--checkpoint-intervall" in done.stderr and "--checkpoint-interval?" in done.stderr


def sync(folder: Path, *words: str) -> dict[str, Any]:
    return measured(folder, "sync", "--shape", "tiny", "--skip-load", "--json", *words)


def test_sync_of_an_adapter(tmp_path: Path) -> None:
    row = sync(tmp_path, "--transport", "memory", "--repeat", "3")
    assert (row["bridge"], row["transport"], row["shape"]) == ("lora_only", "memory", "tiny")
    assert (row["lora_r"], row["repeat"], row["keep_versions"]) == (16, 3, 4)
    assert row["max_loras"] == 8  # four to keep, four to spare
    assert row["adapter_mb"] == round(SHAPES["tiny"].adapter_parameters(16, ALL_LINEAR) * 4 / 1e6, 3)
    assert set(row["versions"]) == {"vllm", "torch", "python"} and row["device"]
    proof, phases, memory = row["proof"], row["phases"], row["memory"]
    assert proof["noise"] < 1e-4 and proof["restored"] < 1e-4 and proof["synthetic_moved"] > 10 * proof["synthetic"]
    assert 0 < row["publish_p50_ms"] <= row["publish_p95_ms"]
    assert set(phases) == {"pack_ms", "request_ms", "engine_ms"} and all(value > 0 for value in phases.values())
    assert 0 < row["stall_ms"] <= phases["engine_ms"]
    assert row["baseline_ms"] > 0 and row["baseline_save_ms"] > 0
    assert row["baseline_repeat"] == 7  # of ten wanted: slots less one
    assert memory["flat_publishes"] == [3, 3] and memory["flat_adapters"] == [4, 4] and memory["flat_files"] == [0, 0]
    assert memory["flat_server_rss_mb"][1] > 100 and memory["gpu_total_gb"] is None
    assert row["attach_ms"] is row["load"] is row["step"] is None and row["share_base"] is False


@pytest.mark.parametrize(
    ("bridge", "words"),
    [
        ("shared_vllm", ("--repeat", "3")),
        ("lora_only", ("--share-base", "--repeat", "3", "--baseline-repeat", "0")),
        ("none", ("--repeat", "1", "--step-optimizer", "adamw_8bit")),
    ],
)
def test_sync_of_other_bridges_with_a_step(tmp_path: Path, bridge: str, words: tuple[str, ...]) -> None:
    """In the server's memory, over the server's base, and by a restart."""
    row = sync(tmp_path, "--bridge", bridge, *words, *STEP)
    step, phases, restarts = row["step"], row["phases"], bridge == "none"
    assert (row["bridge"], row["share_base"], row["load"]) == (bridge, bridge == "lora_only", None)
    assert step["sequences"] == 8 and step["seconds"] > 0 and abs(step["loss"]) < 10
    assert step["optimizer"] == ("adamw_8bit" if restarts else "adamw")
    assert step["server_gb"] is step["together_gb"] is None  # no GPU
    assert phases["pack_ms"] > 0 and row["stall_ms"] <= row["publish_p50_ms"]
    if restarts:
        assert row["attach_ms"] is None and phases["engine_ms"] == row["stall_ms"]
    else:
        assert row["attach_ms"] > 0 and row["proof"]["noise"] < 1e-4
    if bridge == "shared_vllm":
        assert row["transport"] is row["adapter_mb"] is row["baseline_ms"] is None
        assert row["model_gb"] == round(SHAPES["tiny"].parameters * 4 / 1e9, 4)
        assert 0 < row["write_ms"] == phases["pack_ms"] < row["stall_ms"] and row["after_write_ms"] > 0


def test_step_has_the_loss_of_one_process_whatever_their_number() -> None:
    def step(*how: str) -> dict[str, Any]:
        sizes = ["--seqs", "8", "--prompt-len", "6", "--completion-len", "20", "--lognormal"]
        steps = ["--warmup", "1", "--steps", "2", "--optimizer", "adamw", "--batch-size", "3", "--json"]
        command = [sys.executable, *how, "-m", "grpo_trainer.bench", "step", "--shape", "tiny", *sizes, *steps]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    alone, together = step(), step("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert (alone["processes"], alone["cut"]) == (1, False)
    assert (together["processes"], together["cut"]) == (2, True)
    assert alone["loss"] == pytest.approx(together["loss"], abs=1e-6)
    assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-4)
    assert len(set(alone["loss"])) == len(set(alone["grad_norm"])) == 2


def test_api_loses_no_group(tmp_path: Path) -> None:
    load = ("--groups", "64", "--tokens", "16", "--clients", "2", "--environments", "3", "--prefill")
    for wire in ("json", "msgpack"):
        (folder := tmp_path / wire).mkdir()
        row = measured(folder, "api", *load, "--wire", wire, "--json")
        assert (row["groups"], row["lost"], row["duplicated"], row["failures"]) == (64, 0, 0, [])
        assert row["batches_per_s"] > 0 and row["post_p50_ms"] > 0 and row["server_cpu_ms_per_group"] > 0
