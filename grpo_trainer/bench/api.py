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
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
VOCABULARY = 150_000


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

    def used() -> tuple[float, float]:
        """Return the server's CPU seconds and its resident bytes."""
        if server is None:
            return 0.0, 0.0
        return sum(server.cpu_times()[:2]), float(server.memory_info().rss)

    context = mp.get_context("spawn")
    ready, begin, done = context.Barrier(4), context.Event(), context.Event()
    with context.Pool(3, _share, (ready, begin, done)) as pool:  # its exit ends the processes
        roles = [pool.apply_async(_role, (role, at, options, env_ids)) for role in (_post, _consume, _poll)]
        try:
            ready.wait(READY_S)
        except threading.BrokenBarrierError:  # a process has failed, and its error says more
            for each in roles:
                if each.ready():
                    each.get()
            raise
        cpu, began = used()[0], time.perf_counter()
        if not options.prefill:
            begin.set()
        posted = roles[0].get()
        peak = used()[1]
        begin.set()
        consumed = roles[1].get()
        seconds = time.perf_counter() - began
        cpu, peak = used()[0] - cpu, max(peak, used()[1])
        done.set()
        polled = roles[2].get()

    def times(name: str, taken: Sequence[float]) -> dict[str, float]:
        return {f"{name}_p{percent}_ms": quantile_ms(taken or [0.0], percent / 100) for percent in (50, 99)}

    seen: Counter[int] = consumed["seen"]
    polls: list[float] = polled["times"]
    return {
        "wire": options.wire,
        "groups": options.groups,
        "seconds": round(seconds, 3),
        "groups_per_s": round(options.groups / seconds, 1),
        "mb_per_s": round(posted["bytes"] / 1e6 / seconds, 1),
        "batches_per_s": round(len(consumed["times"]) / seconds, 1),
        **times("post", posted["times"]),
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
        "failures": [failure for each in (posted, polled, consumed) for failure in each["failures"]][:5],
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


def _open_run(options: ApiOptions, at: tuple[str, int]) -> list[int]:
    """Register a trainer and the environments, on a queue that is empty; return the environments' numbers."""
    connection = http.client.HTTPConnection(*at, timeout=60)
    as_json = {"Content-Type": wire.JSON}
    _call(connection, "GET", "/reset_data")
    sizes = {"batch_size": options.batch_size, "max_token_len": options.tokens, "num_steps": options.groups}
    names = {"wandb_group": "bench", "wandb_project": "bench", "checkpoint_dir": ""}
    trainer = json.dumps({**sizes, **names, "save_checkpoint_interval": 0, "starting_step": 0}).encode()
    _call(connection, "POST", "/register", trainer, as_json)
    _call(connection, "GET", "/batch")
    lengths = {"max_token_length": options.tokens, "group_size": options.group_size}
    environment = json.dumps({**lengths, "desired_name": "bench", "weight": 1.0}).encode()
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
"""Barrier of all processes."""
_begin: Any
"""Event: the trainer may take batches."""
_done: Any
"""Event: the environments may end."""


def _share(*shared: Any) -> None:
    global _ready, _begin, _done
    _ready, _begin, _done = shared


def _role(role: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return role(*arguments)
    except BaseException:
        _ready.abort()
        raise


def _group(number: int, options: ApiOptions, env_id: int) -> wire.ScoredData:
    """Return a group like a model's: random tokens, masked prompt, float32 logprobs; the first token is its number."""
    draw, prompt = np.random.default_rng(number), options.tokens // 4
    tokens = draw.integers(0, VOCABULARY, (options.group_size, options.tokens)).tolist()
    tokens[0][0] = number
    logprobs = -draw.standard_exponential((options.group_size, options.tokens - prompt), np.float32) / 2
    return wire.ScoredData(
        tokens=tokens,
        masks=[[wire.IGNORED] * prompt + row[prompt:] for row in tokens],
        scores=draw.random(options.group_size).tolist(),
        inference_logprobs=[[wire.MASKED_LOGPROB] * prompt + row for row in logprobs.tolist()],
        env_id=env_id,
    )


def _post(at: tuple[str, int], options: ApiOptions, env_ids: Sequence[int]) -> dict[str, Any]:
    """Post the groups from several clients at once, each with one connection."""
    packed = options.wire == "msgpack"
    headers = {"Content-Type": wire.MSGPACK} if packed else {"Content-Type": wire.JSON, "Content-Encoding": "gzip"}
    groups = (_group(number, options, env_ids[0]) for number in range(options.groups))
    encoded = [wire.encode_group(group, headers["Content-Type"]) for group in groups]
    bodies = encoded if packed else [gzip.compress(body, 6) for body in encoded]
    failures: list[str] = []
    own = threading.local()

    def connect() -> None:
        own.connection = http.client.HTTPConnection(*at, timeout=120)
        own.connection.connect()
        own.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(body: bytes) -> float:
        start = time.perf_counter()
        try:
            _call(own.connection, "POST", "/scored_data", body, headers)
        except ServerError as error:
            failures.append(str(error))
        return time.perf_counter() - start

    with ThreadPoolExecutor(options.clients, initializer=connect) as clients:
        _ready.wait()
        times = [*clients.map(post, bodies)]
    return {"times": times, "bytes": sum(map(len, bodies)), "failures": failures}


def _consume(at: tuple[str, int], options: ApiOptions, _: Sequence[int]) -> dict[str, Any]:
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


def _poll(at: tuple[str, int], _: ApiOptions, env_ids: Sequence[int]) -> dict[str, Any]:
    """Ask GET /status-env every 0.1 s for each environment, until `_done`. A late answer delays the next request."""
    times: list[float] = []
    failures: list[str] = []
    connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with connecting:
            return await asyncio.open_connection(*at)

    async def ask(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the same few bytes each time: a thousand environments need little CPU time compared with the server."""
        body = f'{{"env_id": {env_ids[number]}}}'
        head = f"GET /status-env HTTP/1.1\r\nHost: {at[0]}:{at[1]}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        due = time.perf_counter() + POLL_S * number / len(env_ids)  # spread, as independent processes are
        while True:
            await asyncio.sleep(due - time.perf_counter())
            asked = time.perf_counter()
            writer.write(request)
            try:
                answer = await reader.readuntil(b"\r\n\r\n")
                length = answer.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                await reader.readexactly(int(length))
            except (OSError, EOFError, ValueError) as error:
                failures.append(f"GET /status-env: {error!r}")
                return
            times.append(time.perf_counter() - asked)
            if b" 200 " not in answer.split(b"\r\n", 1)[0]:
                failures.append(f"GET /status-env: {answer[:200]!r}")
            due = max(due + POLL_S, time.perf_counter())

    async def poll() -> None:
        loop = asyncio.get_running_loop()
        streams = await asyncio.gather(*(connect() for _ in env_ids))
        await loop.run_in_executor(None, _ready.wait)
        asking = [asyncio.create_task(ask(number, *stream)) for number, stream in enumerate(streams)]
        await loop.run_in_executor(None, _done.wait)
        for task in asking:
            task.cancel()
        for _, writer in streams:
            writer.close()

    uvloop.run(poll())
    return {"times": times, "failures": failures}
