"""`grpo bench api`: load a rollout API from separate processes and print one line of figures.

Posting clients, a trainer and polling environments are separate processes, as in a run. The bodies are made and
compressed before the clock starts, so that the figures are the server's and not gzip's. With `--url` a
running server is loaded, for example the original one; if it is on this machine its CPU time and memory are read.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import multiprocessing as mp
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import psutil
from pydantic import model_validator

from environments.api import wire
from grpo_common.ports import listener
from grpo_trainer.bench.figures import quantile_ms
from grpo_trainer.bench.pollers import poll
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.train import API_KEY_VARIABLE
from grpo_trainer.errors import ConfigError, ProcessFailedError, ServerError
from grpo_trainer.launch.ports import claim_ports

_LEASE_S = 300
_IDLE_S = 0.02
_GIVE_UP_S = 30.0
_VOCABULARY = range(150_000)


class Load(Section):
    """Load."""

    groups: int = option(2000, help="Groups to post.", ge=1)
    group_size: int = option(8, help="Sequences in a group.", ge=1)
    tokens: int = option(512, help="Tokens in a sequence.", ge=4)
    clients: int = option(16, help="Posting clients.", ge=1)
    batch_size: int = option(64, help="Sequences in a batch.", ge=1)
    environments: int = option(1, help="Environments that poll every 0.1 s.", ge=1)
    wire: Literal["json", "msgpack"] = option("json", help="Format of groups and batches.")
    prefill: bool = option(False, help="Post all groups before the first batch is taken.")
    url: str | None = option(None, help="Load this running server (default: start one).")
    store: Path | None = option(None, help="SQLite file of the server that is started (default: in memory).")

    @model_validator(mode="after")
    def _fills_batches(self) -> Load:
        if self.groups * self.group_size % self.batch_size:
            raise ConfigError(
                "the last batch would never come",
                field="--groups x --group-size",
                got=f"{self.groups} x {self.group_size}",
                wanted=f"a multiple of --batch-size {self.batch_size}",
            )
        return self


def measure(load: Load, url: str) -> dict[str, Any]:
    """Load a server and return the figures.

    Times of the server's answers are as the clients saw them; `server_cpu_ms_per_group` is post and batch together;
    `status_env_max_ms` is the longest stall a polling environment saw.
    """
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    env_ids = _open_run(load, host, port)
    server = listener(port) if host in ("127.0.0.1", "localhost") else None
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []

    def start(role: Any, *arguments: Any) -> Connection:
        here, there = context.Pipe()
        process = context.Process(target=role, args=(there, *arguments), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
        return here

    posters = min(load.clients, 4)
    threads = [len(part) for part in np.array_split(range(load.clients), posters)]
    posting = [
        start(_post, host, port, load, numbers.tolist(), own, env_ids[0])
        for numbers, own in zip(np.array_split(range(load.groups), posters), threads, strict=True)
    ]
    shares = np.array_split(env_ids, 1 if len(env_ids) < 100 else 2)
    polling = [start(poll, host, port, share.tolist()) for share in shares]
    consuming = start(_consume, host, port, load)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    before = _cpu(server)
    began = time.perf_counter()
    for pipe in [*polling, *posting, *([] if load.prefill else [consuming])]:
        pipe.send("go")
    posted = [pipe.recv() for pipe in posting]
    peak = _rss(server)
    if load.prefill:
        consuming.send("go")
    consumed = consuming.recv()
    seconds = time.perf_counter() - began
    cpu_s, rss = _cpu(server) - before, max(peak, _rss(server))
    for pipe in polling:
        pipe.send("stop")
    polled = [pipe.recv() for pipe in polling]
    for process in processes:
        process.join()

    posts, polls = (_pooled(shares, "times") for shares in (posted, polled))
    seen: Counter[int] = consumed["seen"]
    return {
        "wire": load.wire,
        "groups": load.groups,
        "seconds": round(seconds, 3),
        "groups_per_s": round(load.groups / seconds, 1),
        "mb_per_s": round(sum(share["bytes"] for share in posted) / 1e6 / seconds, 1),
        "batches_per_s": round(len(consumed["times"]) / seconds, 1),
        **_percentiles("post", posts),
        **_percentiles("batch", consumed["times"]),
        **_percentiles("status_env", polls),
        "status_env_max_ms": round(max(polls, default=0.0) * 1e3, 2),
        "polls_per_s": round(len(polls) / seconds, 1),
        "lost": load.groups - len(seen),
        "duplicated": seen.total() - len(seen),
        "rss_mb": round(rss / 1e6, 1) if server else None,
        "server_cpu_ms_per_group": round(cpu_s / load.groups * 1e3, 3) if server else None,
        "server_cpu_share": round(cpu_s / seconds, 2) if server else None,
        "load_average": round(psutil.getloadavg()[0], 2),
        "failures": _pooled([*posted, *polled, consumed], "failures")[:5],
    }


def _pooled(shares: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [each for share in shares for each in share[name]]


def _percentiles(name: str, times: list[float]) -> dict[str, float]:
    return {f"{name}_p{percent}_ms": quantile_ms(times or [0.0], percent / 100) for percent in (50, 99)}


# The run that the clients take part in


def _open_run(load: Load, host: str, port: int) -> list[int]:
    """Register a trainer and the environments, on a queue that is empty."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    as_json = {"Content-Type": wire.JSON}
    _call(connection, "GET", "/reset_data")
    trainer = wire.Register(
        wandb_group="bench",
        wandb_project="bench",
        batch_size=load.batch_size,
        max_token_len=load.tokens,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=load.groups,
    )
    _call(connection, "POST", "/register", wire.encode(trainer), as_json)
    _call(connection, "GET", "/batch")
    environment = wire.encode(
        wire.RegisterEnv(max_token_length=load.tokens, desired_name="bench", weight=1.0, group_size=load.group_size)
    )
    registered = [_call(connection, "POST", "/register-env", environment, as_json) for _ in range(load.environments)]
    connection.close()
    return [json.loads(content)["env_id"] for content, _ in registered]


def _call(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[bytes, http.client.HTTPMessage]:
    """Return an answer's body and headers.

    Raises:
        ServerError: the status is not 200.
    """
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise ServerError(f"{content[:200]!r}", field=f"{method} {path}", got=f"status {answer.status}", wanted="200")
    return content, answer.headers


def _group(number: int, load: Load, env_id: int) -> wire.ScoredData:
    """Return a group like a model's: random tokens, masked prompt, float32 logprobs; the first token is its number."""
    draw = random.Random(number)
    prompt = load.tokens // 4
    tokens = [draw.choices(_VOCABULARY, k=load.tokens) for _ in range(load.group_size)]
    tokens[0][0] = number
    single = struct.Struct(f"{load.tokens - prompt}f")

    def logprobs() -> list[float]:
        return list(single.unpack(single.pack(*(-draw.expovariate(2.0) for _ in range(load.tokens - prompt)))))

    return wire.ScoredData(
        tokens=tokens,
        masks=[[wire.IGNORED] * prompt + row[prompt:] for row in tokens],
        scores=[draw.random() for _ in tokens],
        inference_logprobs=[[wire.MASKED_LOGPROB] * prompt + logprobs() for _ in tokens],
        env_id=env_id,
    )


# Roles, each in a separate process


def _post(
    pipe: Connection, host: str, port: int, load: Load, numbers: Sequence[int], threads: int, env_id: int
) -> None:
    """Post groups from several clients at once, each with one connection."""
    headers = {"Content-Type": wire.MSGPACK if load.wire == "msgpack" else wire.JSON}
    if load.wire == "json":
        headers["Content-Encoding"] = "gzip"
    bodies = []
    for number in numbers:
        body = wire.encode_group(_group(number, load, env_id), headers["Content-Type"])
        bodies.append(gzip.compress(body, 6) if load.wire == "json" else body)
    times: list[float] = []
    failures: list[str] = []
    waiting = list(reversed(bodies))

    def client() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=120)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(IndexError):  # all are posted
            while True:
                body = waiting.pop()
                start = time.perf_counter()
                try:
                    _call(connection, "POST", "/scored_data", body, headers)
                except ServerError as error:
                    failures.append(str(error))
                times.append(time.perf_counter() - start)

    pipe.send("ready")
    pipe.recv()
    workers = [threading.Thread(target=client) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    pipe.send({"times": times, "bytes": sum(map(len, bodies)), "failures": failures})


def _consume(pipe: Connection, host: str, port: int, load: Load) -> None:
    """Take batches as a trainer does until every group has arrived, or no more arrive."""
    connection = http.client.HTTPConnection(host, port, timeout=300)
    packed = load.wire == "msgpack"
    path = f"/batch?lease={_LEASE_S}" if packed else "/batch"
    accepted = {"Accept": wire.MSGPACK} if packed else {"Accept": wire.JSON, "Accept-Encoding": "gzip"}
    times: list[float] = []
    seen: Counter[int] = Counter()
    failures: list[str] = []
    pipe.send("ready")
    pipe.recv()
    last = time.monotonic()
    while len(seen) < load.groups and time.monotonic() - last < _GIVE_UP_S:
        start = time.perf_counter()
        try:
            content, headers = _call(connection, "GET", path, headers=accepted)
        except ServerError as error:
            failures.append(str(error))
            break
        took = time.perf_counter() - start
        if headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        batch = wire.decode_batch(content, headers.get("Content-Type", wire.JSON))
        if not batch.batch:
            time.sleep(_IDLE_S)
            continue
        times.append(took)
        last = time.monotonic()
        size = sum(len(group.tokens) for group in batch.batch)
        if size != load.batch_size:
            failures.append(f"a batch of {size} sequences, expected {load.batch_size}")
        seen.update(group.tokens[0][0] for group in batch.batch)
        if batch.batch_id is not None:
            _call(connection, "POST", f"/batch/{batch.batch_id}/ack")
    pipe.send({"times": times, "seen": seen, "failures": failures})


# The server


@contextlib.contextmanager
def own_server(store: Path | None) -> Iterator[str]:
    """Run a server on a free port within the block, and yield its URL."""
    port = claim_ports({"api": 0})["api"]
    command = [sys.executable, "-m", "environments.api", "--port", str(port)]
    command += ["--store", str(store)] if store else []
    keyless = {**os.environ, API_KEY_VARIABLE: ""}  # the clients of a benchmark send no key
    process = subprocess.Popen(command, env=keyless, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _GIVE_UP_S
        while listener(port) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailedError("not ready", field="environments.api", got=f"exit code {process.poll()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _cpu(server: psutil.Process | None) -> float:
    if server is None:
        return 0.0
    times = server.cpu_times()
    return times.user + times.system


def _rss(server: psutil.Process | None) -> float:
    return float(server.memory_info().rss) if server else 0.0
