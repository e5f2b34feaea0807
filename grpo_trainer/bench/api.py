"""`grpo bench api`: load a rollout API from separate processes and print one line of figures.

Posting clients, a trainer and polling environments are separate processes, as in a run. The bodies are made and
compressed before the clock starts, so that the figures are the server's and not gzip's. With `--url` a
running server is loaded, for example the original one; if it is on this machine its CPU time and memory are read.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import psutil
import uvloop
from pydantic import model_validator

from environments.api import wire
from grpo_common.ports import listener
from grpo_trainer.bench.load import quantile_ms
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.train import API_KEY_VARIABLE
from grpo_trainer.errors import ConfigError, ProcessFailedError, ServerError
from grpo_trainer.launch.ports import claim_ports

LEASE_S = 300
IDLE_S = 0.02
GIVE_UP_S = 30.0
POLL_S = 0.1
READY_S = 300.0
"""Time for all processes to make their bodies and connections."""
CONNECTING_AT_ONCE = 50
VOCABULARY = range(150_000)


class ApiOptions(Section):
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
    def _fills_batches(self) -> ApiOptions:
        if self.groups * self.group_size % self.batch_size:
            raise ConfigError(
                "the last batch would never come",
                field="--groups x --group-size",
                got=f"{self.groups} x {self.group_size}",
                wanted=f"a multiple of --batch-size {self.batch_size}",
            )
        return self


def measure(options: ApiOptions, url: str) -> dict[str, Any]:
    """Load a server and return the figures.

    Times of the server's answers are as the clients saw them; `server_cpu_ms_per_group` is post and batch together;
    `status_env_max_ms` is the longest stall a polling environment saw.
    """
    address = urlsplit(url)
    at = address.hostname or "127.0.0.1", address.port or 80
    try:
        env_ids = _open_run(options, at)
    except OSError as error:
        raise ServerError(field=f"rollout API {url}", got=str(error), wanted="an answer", fix="start it") from None
    server = listener(at[1]) if at[0] in ("127.0.0.1", "localhost") else None
    posters = min(options.clients, 4)
    shares = np.array_split(env_ids, 1 if len(env_ids) < 100 else 2)
    context = mp.get_context("spawn")
    ready = context.Barrier(posters + len(shares) + 2)
    begin, done = context.Event(), context.Event()  # the trainer may begin; the environments may end
    with context.Pool(ready.parties - 1, _share, (ready, begin, done)) as pool:  # its exit ends the processes

        def start(role: Callable[..., Any], *arguments: Any) -> AsyncResult[dict[str, Any]]:
            return pool.apply_async(_role, (role, at, *arguments))

        threads = [len(part) for part in np.array_split(range(options.clients), posters)]
        posting = [
            start(_post, options, numbers.tolist(), own, env_ids[0])
            for numbers, own in zip(np.array_split(range(options.groups), posters), threads, strict=True)
        ]
        polling = [start(_poll, share.tolist()) for share in shares]
        consuming = start(_consume, options)
        try:
            ready.wait(READY_S)
        except threading.BrokenBarrierError:  # a process has failed, and its error says more
            for each in (*posting, *polling, consuming):
                if each.ready():
                    each.get()
            raise
        cpu, began = _cpu(server), time.perf_counter()
        if not options.prefill:
            begin.set()
        posted = [each.get() for each in posting]
        peak = _rss(server)
        begin.set()
        consumed = consuming.get()
        seconds = time.perf_counter() - began
        cpu, peak = _cpu(server) - cpu, max(peak, _rss(server))
        done.set()
        polled = [each.get() for each in polling]

    def times(name: str, taken: Sequence[float]) -> dict[str, float]:
        return {f"{name}_p{percent}_ms": quantile_ms(taken or [0.0], percent / 100) for percent in (50, 99)}

    seen: Counter[int] = consumed["seen"]
    polls = [taken for each in polled for taken in each["times"]]
    return {
        "wire": options.wire,
        "groups": options.groups,
        "seconds": round(seconds, 3),
        "groups_per_s": round(options.groups / seconds, 1),
        "mb_per_s": round(sum(each["bytes"] for each in posted) / 1e6 / seconds, 1),
        "batches_per_s": round(len(consumed["times"]) / seconds, 1),
        **times("post", [taken for each in posted for taken in each["times"]]),
        **times("batch", consumed["times"]),
        **times("status_env", polls),
        "status_env_max_ms": round(max(polls, default=0.0) * 1e3, 2),
        "polls_per_s": round(len(polls) / seconds, 1),
        "lost": options.groups - len(seen),
        "duplicated": seen.total() - len(seen),
        "rss_mb": round(peak / 1e6, 1) if server else None,
        "server_cpu_ms_per_group": round(cpu / options.groups * 1e3, 3) if server else None,
        "server_cpu_share": round(cpu / seconds, 2) if server else None,
        "load_average": round(psutil.getloadavg()[0], 2),
        "failures": [failure for each in (*posted, *polled, consumed) for failure in each["failures"]][:5],
    }


@contextlib.contextmanager
def own_server(store: Path | None) -> Iterator[str]:
    """Run a server on a free port within the block, and yield its URL."""
    port = claim_ports({"api": 0})["api"]
    command = [sys.executable, "-m", "environments.api", "--port", str(port), *(["--store", str(store)] * bool(store))]
    keyless = {**os.environ, API_KEY_VARIABLE: ""}  # the clients of a benchmark send no key
    process = subprocess.Popen(command, env=keyless, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + GIVE_UP_S
        while listener(port) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailedError("not ready", field="environments.api", got=f"exit code {process.poll()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _cpu(server: psutil.Process | None) -> float:
    return 0.0 if server is None else (times := server.cpu_times()).user + times.system


def _rss(server: psutil.Process | None) -> float:
    return float(server.memory_info().rss) if server else 0.0


def _open_run(options: ApiOptions, at: tuple[str, int]) -> list[int]:
    """Register a trainer and the environments, on a queue that is empty; return the environments' numbers."""
    connection = http.client.HTTPConnection(*at, timeout=60)
    as_json = {"Content-Type": wire.JSON}
    _call(connection, "GET", "/reset_data")
    trainer = wire.Register(
        wandb_group="bench",
        wandb_project="bench",
        batch_size=options.batch_size,
        max_token_len=options.tokens,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=options.groups,
    )
    _call(connection, "POST", "/register", wire.encode(trainer), as_json)
    _call(connection, "GET", "/batch")
    described = wire.RegisterEnv(
        max_token_length=options.tokens, desired_name="bench", weight=1.0, group_size=options.group_size
    )
    environment = wire.encode(described)
    registered = [_call(connection, "POST", "/register-env", environment, as_json) for _ in range(options.environments)]
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


# Roles, each in a separate process: they prepare, wait for all others, and return what they saw

_ready: Any
_begin: Any
_done: Any


def _share(ready: Any, begin: Any, done: Any) -> None:
    global _ready, _begin, _done
    _ready, _begin, _done = ready, begin, done


def _role(role: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return role(*arguments)
    except BaseException:
        _ready.abort()
        raise


def _group(number: int, options: ApiOptions, env_id: int) -> wire.ScoredData:
    """Return a group like a model's: random tokens, masked prompt, float32 logprobs; the first token is its number."""
    draw = random.Random(number)
    prompt = options.tokens // 4
    tokens = [draw.choices(VOCABULARY, k=options.tokens) for _ in range(options.group_size)]
    tokens[0][0] = number
    single = struct.Struct(f"{options.tokens - prompt}f")

    def logprobs() -> list[float]:
        return list(single.unpack(single.pack(*(-draw.expovariate(2.0) for _ in range(options.tokens - prompt)))))

    return wire.ScoredData(
        tokens=tokens,
        masks=[[wire.IGNORED] * prompt + row[prompt:] for row in tokens],
        scores=[draw.random() for _ in tokens],
        inference_logprobs=[[wire.MASKED_LOGPROB] * prompt + logprobs() for _ in tokens],
        env_id=env_id,
    )


def _post(at: tuple[str, int], options: ApiOptions, numbers: Sequence[int], threads: int, env_id: int) -> Any:
    """Post groups from several clients at once, each with one connection."""
    packed = options.wire == "msgpack"
    headers = {"Content-Type": wire.MSGPACK} if packed else {"Content-Type": wire.JSON, "Content-Encoding": "gzip"}
    encoded = [wire.encode_group(_group(number, options, env_id), headers["Content-Type"]) for number in numbers]
    bodies = encoded if packed else [gzip.compress(body, 6) for body in encoded]
    times: list[float] = []
    failures: list[str] = []
    waiting = list(reversed(bodies))

    def client() -> None:
        connection = http.client.HTTPConnection(*at, timeout=120)
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

    _ready.wait()
    workers = [threading.Thread(target=client) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"times": times, "bytes": sum(map(len, bodies)), "failures": failures}


def _consume(at: tuple[str, int], options: ApiOptions) -> Any:
    """Take batches as a trainer does until every group has arrived, or no more arrive."""
    connection = http.client.HTTPConnection(*at, timeout=300)
    packed = options.wire == "msgpack"
    path = f"/batch?lease={LEASE_S}" if packed else "/batch"
    accepted = {"Accept": wire.MSGPACK} if packed else {"Accept": wire.JSON, "Accept-Encoding": "gzip"}
    times: list[float] = []
    seen: Counter[int] = Counter()
    failures: list[str] = []
    _ready.wait()
    _begin.wait()
    last = time.monotonic()
    while len(seen) < options.groups and time.monotonic() - last < GIVE_UP_S:
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
            time.sleep(IDLE_S)
            continue
        times.append(took)
        last = time.monotonic()
        size = sum(len(group.tokens) for group in batch.batch)
        if size != options.batch_size:
            failures.append(f"a batch of {size} sequences, expected {options.batch_size}")
        seen.update(group.tokens[0][0] for group in batch.batch)
        if batch.batch_id is not None:
            _call(connection, "POST", f"/batch/{batch.batch_id}/ack")
    return {"times": times, "seen": seen, "failures": failures}


def _poll(at: tuple[str, int], env_ids: Sequence[int]) -> Any:
    """Ask GET /status-env every 0.1 s for each environment, until `_done`."""
    times: list[float] = []
    failures: list[str] = []
    uvloop.run(_keep_polling(at, env_ids, times, failures))
    return {"times": times, "failures": failures}


async def _keep_polling(at: tuple[str, int], env_ids: Sequence[int], times: list[float], failures: list[str]) -> None:
    loop = asyncio.get_running_loop()
    environments: list[_Environment] = []
    for first in range(0, len(env_ids), CONNECTING_AT_ONCE):
        made = [_Environment(at, env_id, times, failures) for env_id in env_ids[first:][:CONNECTING_AT_ONCE]]
        await asyncio.gather(*(loop.create_connection(lambda one=one: one, *at) for one in made))
        environments += made
    await loop.run_in_executor(None, _ready.wait)
    stop = loop.run_in_executor(None, _done.wait)
    start, beat = time.monotonic(), 0
    while not stop.done():
        for number, environment in enumerate(environments):  # spread over the interval, as independent processes are
            due = start + (beat + number / len(environments)) * POLL_S
            if due > time.monotonic() + 0.001:
                await asyncio.sleep(due - time.monotonic())
            environment.ask()
        beat += 1
        await asyncio.sleep(max(0.0, start + beat * POLL_S - time.monotonic()))
    for environment in environments:
        environment.sent_at = 0.0
        environment.transport.close()


class _Environment(asyncio.Protocol):
    """One connection that sends the same few bytes at a fixed interval and times the answers.

    A thousand of them need little CPU time compared with the server. A late answer delays the next request.
    """

    transport: Any

    def __init__(self, at: tuple[str, int], env_id: int, times: list[float], failures: list[str]) -> None:
        body = f'{{"env_id": {env_id}}}'
        head = f"GET /status-env HTTP/1.1\r\nHost: {at[0]}:{at[1]}\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        self.times, self.failures = times, failures
        self.sent_at, self.received = 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self) -> None:
        """Send the request, unless the last one is still unanswered."""
        if not self.sent_at:
            self.sent_at = time.perf_counter()
            self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, is_whole, body = self.received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
        if not is_whole or len(body) < int(length):
            return
        self.times.append(time.perf_counter() - self.sent_at)
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            self.failures.append(f"GET /status-env: {self.received[:200]!r}")
        self.received, self.sent_at = b"", 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        if self.sent_at:
            self.failures.append(f"GET /status-env: connection lost: {exc}")
