"""`kill -9` at random moments: the run that is resumed ends with the undisturbed run's weights, bit for bit.

Killed are the training process, ten times, and now and then the rollout API as well.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.processes import ROOT, answers, end, free_port, running, tail, wait_for
from tests.runs import rows
from tests.unit.tiny_lora import VOCAB, save_tiny

STEPS = 60
BATCH = 8
KILLS = 10


class Trainers:
    """Forks a training process at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._output = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.killed_trainer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )

    def run(self, options: dict[str, Any], killed: tuple[int, float] | None = None) -> int:
        """The exit code of a run.

        Args:
            killed: lines and seconds. Once its metrics have this many lines, it waits this long and kills itself.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([options, killed]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, tail(self.log)
        return int(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._output.close()


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    made = Trainers(tmp_path_factory.mktemp("trainers") / "trainers.log")
    yield made
    made.close()


class Api:
    """A rollout API with a store, which may be killed, too."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "api.log"
        self._words = ["-m", "environments.api", "--port", str(self.port), "--store", str(folder / "queue.sqlite")]

    def start(self) -> None:
        self._block = running(*self._words, log=self._log)
        self._process = self._block.__enter__()
        wait_for("the rollout API is there", lambda: answers(self.url + "/"), self._log, 60)

    def kill_and_start(self) -> None:
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self) -> None:
        end(self._process)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(tmp_path_factory.mktemp("api"))
    made.start()
    yield made
    made.stop()


def fill(url: str) -> None:
    """An empty API gets groups of several sizes, more than the steps need."""
    httpx.get(url + "/reset_data", trust_env=False).raise_for_status()
    draw = random.Random(7)
    groups, sequences = [], 0
    while sequences < (STEPS + 6) * BATCH:
        size = draw.choice([1, 2, 2, 3, 4])
        rows = [[draw.randrange(VOCAB) for _ in range(draw.randint(6, 12))] for _ in range(size)]
        groups.append(
            {
                "tokens": rows,
                "masks": [[-100] * 4 + row[4:] for row in rows],
                "scores": [draw.random() for _ in rows],
                "inference_logprobs": [[1.0] * 4 + [-draw.uniform(3.0, 5.0) for _ in row[4:]] for row in rows],
                "policy_versions": [0] * size,
            }
        )
        sequences += size
    httpx.post(url + "/scored_data_list", json=groups, trust_env=False).raise_for_status()


def left_behind(folder: Path, final: str, weights: str) -> tuple[bytes, dict[str, Any]]:
    return (folder / final / weights).read_bytes(), torch.load(folder / final / "trainer_state.pt")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


MODES = {
    "adapter": (
        {"weight_bridge_mode": "lora_only", "lora_r": 8, "checkpoint_interval": "0.2s"},
        "adapter_final",
        "adapter_model.safetensors",
    ),
    "all weights": ({"weight_bridge_mode": "none", "vllm_restart_interval": 1}, "model_final", "model.safetensors"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_killed_ten_times_ends_as_if_it_had_not_been(
    mode: str, trainers: Trainers, api: Api, tmp_path: Path
) -> None:
    own, final, weights = MODES[mode]
    options = {
        "model_name": str(save_tiny(tmp_path / "model")), "atropos_url": api.url, "training_steps": STEPS,
        "device": "cpu", "batch_size": 4, "gradient_accumulation_steps": BATCH // 4, "lr": 1e-3, "seq_len": 16,
        "drift_limit": 0.0, "checkpoint_interval": 3, "keep_checkpoints": 2, "rollout_timeout": 30,
        "resume": "auto", **own,
    }  # fmt: skip
    fill(api.url)
    assert trainers.run({**options, "save_path": str(tmp_path / "straight")}) == 0, tail(trainers.log)

    fill(api.url)
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    at_rows = sorted(draw.sample(range(1, STEPS - 10), KILLS - 2))
    moments = [(row, draw.uniform(0.0, 0.02)) for row in at_rows]
    for place in (0, draw.randrange(1, KILLS // 2)):  # two of them while the process starts
        moments.insert(place, (0, draw.uniform(0.0, 0.3)))
    folder = tmp_path / "killed"
    for number, moment in enumerate(moments, 1):
        code = trainers.run({**options, "save_path": str(folder)}, moment)
        assert code == -signal.SIGKILL, f"seed {seed}: it had ended\n{tail(trainers.log)}"
        if number % 3 == 0:
            api.kill_and_start()
    assert trainers.run({**options, "save_path": str(folder)}) == 0, f"seed {seed}\n{tail(trainers.log)}"

    (straight_weights, straight), (resumed_weights, resumed) = (
        left_behind(each, final, weights) for each in (tmp_path / "straight", folder)
    )
    assert resumed_weights == straight_weights, f"seed {seed}"
    assert same(resumed["optimizer"], straight["optimizer"]) and same(resumed["weights"], straight["weights"])
    assert same(resumed["generators"], straight["generators"])
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1)), f"seed {seed}"
    for row, other in zip(rows(folder), rows(tmp_path / "straight"), strict=True):
        assert row["train/loss"] == other["train/loss"], f"seed {seed}, step {row['step']}"
    assert not list(folder.glob(".*")), "remains of killed processes"
    assert "checksums right" in trainers.log.read_text()
