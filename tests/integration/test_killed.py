"""`kill -9` at random moments, of training processes and of the rollout API: nothing is lost, nothing trained twice.

The run that is resumed ends with the undisturbed run's weights, bit for bit. `python -m tests.integration.test_killed`
forks its training processes, where everything is imported: `grpo train` without a server. Each line of standard input
is a JSON list: options, and the moment at which the child kills itself, or null. The answer is the child's exit code. A
child that watches itself is never too late, however slow the test is. Nothing is computed before a fork.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from environments.api import wire
from grpo_trainer import loop
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.load import load_all_weights
from grpo_trainer.policy import AllWeights, Policy, build_policy
from grpo_trainer.weights.bridge import Published, WeightBridge
from tests.processes import ROOT, tail, wait_for
from tests.rollout_api import ServerProcess
from tests.runs import rows
from tests.stand_ins import registration
from tests.unit.tiny_lora import VOCAB, save_tiny

# the training process ----------------------------------------------------------------------------------------


class NoBridge(WeightBridge):
    """A server that takes every version and is never asked."""

    def connect(self, policy_version: int) -> int:
        return policy_version

    def prove(self) -> None:
        return None

    def publish(self, version: int) -> Published:
        return Published(version, "nobody", {})


def policy_of(config: TrainConfig, *_: Any) -> Policy:
    """All weights come without a tokenizer here, and are saved rounded."""
    if config.weight_bridge_mode == "none":
        return AllWeights(load_all_weights(config), None, torch.bfloat16)
    return build_policy(config)


def kill(metrics: Path, lines: int, seconds: float) -> None:
    """Wait until the file of metrics has `lines` lines, then for `seconds`, and kill this process."""
    while lines and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def child(options: dict[str, Any], moment: tuple[int, float] | None) -> int:
    if moment:
        metrics = Path(options["save_path"]) / "metrics.jsonl"
        threading.Thread(target=kill, args=(metrics, *moment), daemon=True).start()
    torch.set_num_threads(1)
    loop.build_policy = policy_of
    loop.build_bridge = lambda *_: NoBridge()  # type: ignore[assignment, return-value]
    loop.train(build(TrainConfig, options))
    return 0


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)  # the answers are the parent's
                code = child(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


# runs --------------------------------------------------------------------------------------------------------

STEPS = 40
BATCH = 8
KILLS = 10


class Trainers:
    """Forks a training process at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._output = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.test_killed"],
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


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("api")
    made = ServerProcess(("--store", str(folder / "queue.sqlite")), log=folder / "api.log")
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
def test_run_that_is_killed_ten_times(mode: str, trainers: Trainers, api: ServerProcess, tmp_path: Path) -> None:
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
            api.kill()
            api.start()
    assert trainers.run({**options, "save_path": str(folder)}) == 0, f"seed {seed}\n{tail(trainers.log)}"

    known, own_end = tmp_path / "straight" / final, folder / final
    assert (own_end / weights).read_bytes() == (known / weights).read_bytes(), f"seed {seed}"
    straight, resumed = (torch.load(each / "trainer_state.pt") for each in (known, own_end))
    assert same(resumed["optimizer"], straight["optimizer"]) and same(resumed["weights"], straight["weights"])
    assert same(resumed["generators"], straight["generators"])
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1)), f"seed {seed}"
    for row, other in zip(rows(folder), rows(tmp_path / "straight"), strict=True):
        assert row["train/loss"] == other["train/loss"], f"seed {seed}, step {row['step']}"
    assert not list(folder.glob(".*")), "remains of killed processes"
    assert "checksums right" in trainers.log.read_text()


# the rollout API under many clients --------------------------------------------------------------------------

ENVIRONMENTS = 3
GROUP_SIZE = 4
GIVE_UP_S = 120


def call(client: httpx.Client, method: str, path: str, body: bytes | None = None) -> httpx.Response:
    """As the clients of the protocol do: a request that got no answer, or a 5xx, is sent again."""
    for attempt in Retrying(
        retry=retry_if_exception_type((httpx.TransportError, httpx.HTTPStatusError)),
        stop=stop_after_delay(GIVE_UP_S),
        wait=wait_random(0.02, 0.2),
        reraise=True,
    ):
        with attempt:
            headers = {"Content-Type": wire.JSON, "Accept": wire.JSON}
            answer = client.request(method, path, content=body, headers=headers)
            if answer.status_code >= 500:
                answer.raise_for_status()
            return answer
    raise AssertionError("unreachable: the last attempt returns or raises")


class Environment(threading.Thread):
    """Posts groups that are numbered in their tokens; no idempotency key, as the original's client has none."""

    def __init__(self, url: str, env_id: int, stop: threading.Event) -> None:
        super().__init__()
        self.client = httpx.Client(base_url=url, timeout=GIVE_UP_S)
        self.env_id = env_id
        self.stop = stop
        self.received: list[int] = []
        self.failures: list[str] = []

    def run(self) -> None:
        number = self.env_id
        while not self.stop.is_set():
            rows = [[number, i] for i in range(GROUP_SIZE)]
            group = wire.ScoredData(tokens=rows, masks=rows, scores=[0.0] * GROUP_SIZE, env_id=self.env_id)
            answer = call(self.client, "POST", "/scored_data", wire.encode_group(group, wire.JSON))
            if answer.json() == {"status": "received"}:
                self.received.append(number)
            else:
                self.failures.append(answer.text)
            number += ENVIRONMENTS
            call(self.client, "GET", f"/status-env?env_id={self.env_id}")
            time.sleep(0.005)


class Trainer(threading.Thread):
    """Leases, trains and acknowledges; a lost answer is asked for again by the same `request`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.client = httpx.Client(base_url=url, timeout=GIVE_UP_S)
        self.trained: Counter[int] = Counter()
        self.batches = 0
        self.drain = threading.Event()
        self.failures: list[str] = []

    def run(self) -> None:
        asked = 0
        while True:
            draining = self.drain.is_set()
            answer = call(self.client, "GET", f"/batch?lease=600&request={asked}")
            batch = wire.decode_batch(answer.content, wire.JSON)
            if batch.batch is None:
                if draining:
                    return
                time.sleep(0.01)
                continue
            asked += 1
            self.trained.update(group.tokens[0][0] for group in batch.batch)
            done = call(self.client, "POST", f"/batch/{batch.batch_id}/ack")
            if done.status_code != 200:
                self.failures.append(done.text)
            self.batches += 1


def test_nothing_is_lost_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    server = ServerProcess(("--store", str(tmp_path / "store.sqlite")), log=tmp_path / "log")
    server.start()
    with httpx.Client(base_url=server.url, timeout=GIVE_UP_S) as client:
        call(client, "POST", "/register", wire.encode(registration(BATCH, max_token_len=64, num_steps=1000)))
        call(client, "GET", "/batch?lease=600")
        env_request = wire.RegisterEnv(max_token_length=64, desired_name="e", weight=1.0, group_size=GROUP_SIZE)
        ids = [
            call(client, "POST", "/register-env", wire.encode(env_request)).json()["env_id"]
            for _ in range(ENVIRONMENTS)
        ]
        stop = threading.Event()
        environments = [Environment(server.url, each, stop) for each in ids]
        trainer = Trainer(server.url)
        for thread in (*environments, trainer):
            thread.start()
        draw = random.Random(0)
        for _ in range(20):
            time.sleep(draw.uniform(0.05, 0.5))
            server.kill()
            server.start()
        wait_for("groups", lambda: sum(len(each.received) for each in environments) > 40, tmp_path / "log")
        stop.set()
        for environment in environments:
            environment.join()
        trainer.drain.set()
        trainer.join()
        status = call(client, "GET", "/status").json()
    assert server.stop() == 0
    received = [number for environment in environments for number in environment.received]
    assert not trainer.failures
    assert not any(environment.failures for environment in environments)
    assert max(trainer.trained.values()) == 1, "trained twice"
    assert set(trainer.trained) <= set(received), "trained what was never answered"
    assert len(received) - len(trainer.trained) == status["queue_size"] < BATCH / GROUP_SIZE, "lost"
    assert status["current_step"] == trainer.batches


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    main()
