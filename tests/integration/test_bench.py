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
from tests.processes import ROOT, free_port, mentioning, running, tail, wait_for

pytestmark = pytest.mark.timeout(400)  # a server starts

LOOP = ("-m", "grpo_trainer", "bench", "loop", "--shape", "tiny")


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
    assert not list(temporary.glob("grpo*"))
    wait_for("all have ended", lambda: not mentioning(str(temporary)), Path(os.devnull), 20)
    return json.loads(done.stdout)


def test_loop_measures_a_run(tmp_path: Path) -> None:
    run_options = ["--checkpoint-interval", "2"]
    steps = ("--steps", "8", "--warmup-steps", "2")
    row = measured(tmp_path, "loop", "--shape", "tiny", "--bridge", "lora_only", *steps, "--", *run_options)

    conditions = {"bridge": "lora_only", "shape": "tiny", "sequences": 32, "prompt_len": 16, "completion_len": 48}
    assert {key: row[key] for key in conditions} == conditions
    assert (row["steps"], row["warmup_steps"], row["run_options"]) == (8, 2, run_options)
    assert row["device"] and all(row["versions"].values())
    assert 6 < row["completion_tokens_mean"] < 20  # 12 wanted
    prompts = row["trained_tokens_per_s"] - row["completion_tokens_per_s"]
    assert prompts * row["step_s"] == pytest.approx(32 * 16, rel=0.01)
    split = row["split"]
    assert set(split) == {"wait_s", "step_s", "publish_s", "save_s", "other_s"}
    assert sum(split.values()) == pytest.approx(row["step_s"], rel=0.01)
    assert split["save_s"] > 0  # a step's row has the save of the step before
    assert 0 <= row["staleness"]["mean"] <= row["staleness"]["max"] <= 5
    assert [*row["start_s"]] == ["server_ready", "trainer_ready", "first_batch", "first_step"]
    assert 0 < row["start_s"]["server_ready"] <= row["start_s"]["trainer_ready"]
    assert row["start_s"]["trainer_ready"] <= row["start_s"]["first_batch"] < row["start_s"]["first_step"]
    assert row["peak_memory_gb"] == {"gpu": None}


def test_loop_ends_all_that_it_started_at_a_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def lines() -> list[str]:
        return [" ".join(line) for line in mentioning(str(tmp_path))]

    with running(*LOOP, log=log, env={"TMPDIR": str(tmp_path)}) as process:
        wait_for("the server starts", lambda: any("-m vllm_server " in line for line in lines()), log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, tail(log)
    wait_for("all have ended", lambda: not lines(), log, 20)
    assert not list(tmp_path.glob("grpo*"))


def test_loop_says_why_a_run_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, *LOOP, "--run-dir", str(tmp_path / "run"), "--", "--checkpoint-intervall", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=200)
    assert done.returncode == 1 and not done.stdout
    assert "--checkpoint-intervall" in done.stderr and "--checkpoint-interval?" in done.stderr


@pytest.mark.parametrize(
    ("bridge", "words"),
    [
        ("lora_only", ("--transport", "memory")),
        ("lora_only", ("--share-base", "--step-seqs", "8")),  # over the server's base
        ("shared_vllm", ("--step-seqs", "8", "--step-optimizer", "adamw_8bit")),  # in the server's memory
    ],
)
def test_sync_of_a_bridge(tmp_path: Path, bridge: str, words: tuple[str, ...]) -> None:
    row = measured(tmp_path, "sync", "--shape", "tiny", "--skip-load", "--repeat", "3", "--bridge", bridge, *words)
    proof, memory = row["proof"], row["memory"]
    assert (row["bridge"], row["shape"], row["repeat"], row["load"]) == (bridge, "tiny", 3, None)
    assert row["share_base"] == ("--share-base" in words) and row["device"] and all(row["versions"].values())
    assert proof["noise"] < 1e-4 and proof["restored"] < 1e-4 and proof["synthetic_moved"] > 10 * proof["synthetic"]
    assert 0 < row["publish_p50_ms"] <= row["publish_p95_ms"] and 0 < row["stall_ms"] <= row["publish_p50_ms"]
    assert memory["flat_server_rss_mb"][1] > 100 and memory["gpu_total_gb"] is None and memory["flat_files"] == [0, 0]
    if bridge == "lora_only":
        assert row["adapter_mb"] == round(SHAPES["tiny"].adapter_parameters(16, ALL_LINEAR) * 4 / 1e6, 3)
        assert row["transport"] == "memory" and row["lora_r"] == 16 and memory["flat_adapters"] == [4, 4]
        assert row["save_ms"] > 0 and row["load_ms"] > 0
    else:
        assert 0 < row["write_ms"] < row["stall_ms"] and row["pause_ms"] > 0
    assert (row["step"] is None) == ("--step-seqs" not in words)
    if (step := row["step"]) is not None:
        assert step["sequences"] == 8 and step["seconds"] > 0 and abs(step["loss"]) < 10
        assert step["optimizer"] == ("adamw_8bit" if "adamw_8bit" in words else "adamw")
        assert step["server_gb"] is step["together_gb"] is None  # no GPU


def test_step_has_the_loss_of_one_process_whatever_their_number() -> None:
    """Each process has the variables that torchrun gives it."""

    def steps(size: int) -> dict[str, Any]:
        words = ["--shape", "tiny", "--seqs", "8", "--prompt-len", "6", "--completion-len", "20", "--lognormal"]
        words += ["--warmup", "1", "--steps", "2", "--optimizer", "adamw", "--batch-size", "3", "--json"]
        command = [sys.executable, "-m", "grpo_trainer.bench", "step", *words]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        given = [{**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, cwd=ROOT, env=env, **pipes) for env in given]
        said = [process.communicate(timeout=240) for process in processes]
        assert not any(process.returncode for process in processes), said
        return json.loads(said[0][0])

    alone, together = steps(1), steps(2)
    assert (alone["processes"], alone["cut"]) == (1, False)
    assert (together["processes"], together["cut"]) == (2, True)
    assert alone["loss"] == pytest.approx(together["loss"], abs=1e-6)
    assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-4)
    assert len(set(alone["loss"])) == len(set(alone["grad_norm"])) == 2


def test_api_loses_no_group(tmp_path: Path) -> None:
    load = ("--groups", "64", "--tokens", "16", "--clients", "2", "--environments", "3", "--prefill")
    for wire in ("json", "msgpack"):
        (folder := tmp_path / wire).mkdir()
        row = measured(folder, "api", *load, "--wire", wire)
        assert (row["groups"], row["lost"], row["duplicated"]) == (64, 0, 0)
        assert row["batches_per_s"] > 0 and row["post_p50_ms"] > 0 and row["server_cpu_ms_per_group"] > 0
