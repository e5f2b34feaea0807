"""`kill -9` of the rollout API, over and over, under environments and a trainer that know nothing of it."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from environments.api import wire
from tests.rollout_api import ServerProcess

KILLS = 20
ENVIRONMENTS = 3
GROUP_SIZE = 4
BATCH_SIZE = 8
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


def test_nothing_is_lost_and_nothing_is_trained_twice(tmp_path: Path):
    server = ServerProcess(("--store", str(tmp_path / "store.sqlite")), log=tmp_path / "log")
    server.start()
    with httpx.Client(base_url=server.url, timeout=GIVE_UP_S) as client:
        trainer_request = wire.Register(
            wandb_group="g",
            wandb_project="p",
            batch_size=BATCH_SIZE,
            max_token_len=64,
            checkpoint_dir="",
            save_checkpoint_interval=0,
            starting_step=0,
            num_steps=1000,
        )
        call(client, "POST", "/register", wire.encode(trainer_request))
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
        for _ in range(KILLS):
            time.sleep(draw.uniform(0.05, 0.5))
            server.kill()
            server.start()
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
    assert len(received) > 2 * KILLS
    assert max(trainer.trained.values()) == 1, "trained twice"
    assert set(trainer.trained) <= set(received), "trained what was never answered"
    assert len(received) - len(trainer.trained) == status["queue_size"] < BATCH_SIZE / GROUP_SIZE, "lost"
    assert status["current_step"] == trainer.batches
