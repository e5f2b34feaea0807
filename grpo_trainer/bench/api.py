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
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import uvloop

from environments.api import wire
from grpo_common.ports import listener
from grpo_trainer.bench.load import quantile_ms
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.train import API_KEY_VARIABLE
from grpo_trainer.errors import ProcessFailedError, ServerError
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.signals import running_time

LEASE_S = 300
GIVE_UP_S = 30.0
POLL_S = 0.1
VOCABULARY = 150_000
BATCH_GROUPS = 8
"""Groups of a batch."""
END_S = 10.0
"""Seconds for the server that was started to end by itself."""


class ApiOptions(Section):
    """Load."""

    groups: int = option(2000, help="Groups to post, a multiple of 8.", ge=8, multiple_of=BATCH_GROUPS)
    group_size: int = option(8, help="Sequences in a group.", ge=1)
    tokens: int = option(512, help="Tokens in a sequence.", ge=4)
    clients: int = option(16, help="Posting clients.", ge=1)
    environments: int = option(1, help="Environments that poll every 0.1 s.", ge=1)
    wire: Literal["json", "msgpack"] = option("json", help="Format of groups and batches.")
    prefill: bool = option(False, help="Post all groups before the first batch is taken.")
    url: str | None = option(None, help="Load this running server (default: start one).")
    store: Path | None = option(None, help="SQLite file of the server that is started (default: in memory).")


def measure(options: ApiOptions, url: str) -> dict[str, Any]:
    """Load a server and return the figures.

    Times of the server's answers are as the clients saw them; `server_cpu_ms_per_group` is post and batch together;
    `status_env_max_ms` is the longest stall a polling environment saw.
    """
    address = urlsplit(url)
    at = address.hostname or "127.0.0.1", address.port or 80
    env_ids = _open_run(options, url)
    server = listener(at[1]) if at[0] in ("127.0.0.1", "localhost") else None

    def used() -> tuple[float, float]:
        """Return the server's CPU seconds and its resident bytes."""
        if server is None:
            return 0.0, 0.0
        return sum(server.cpu_times()[:2]), float(server.memory_info().rss)

    with _Roles(url, server) as roles:
        roles.start("poster", _post, at, options, env_ids[0])
        roles.start("consumer", _consume, at, options)
        roles.start("poller", _poll, at, env_ids)
        for name in ("poster", "consumer", "poller"):
            roles.result(name)  # it is ready
        cpu, began = used()[0], time.perf_counter()
        roles.go("poster", "poller")
        if not options.prefill:
            roles.go("consumer")
        posts = roles.result("poster")
        peak = used()[1]
        if options.prefill:
            roles.go("consumer")
        batches, seen = roles.result("consumer")
        seconds = time.perf_counter() - began
        cpu, peak = used()[0] - cpu, max(peak, used()[1])
        roles.go("poller")  # it ends
        polls = roles.result("poller")

    def times(name: str, taken: Sequence[float]) -> dict[str, float]:
        return {f"{name}_p{percent}_ms": quantile_ms(taken or [0.0], percent / 100) for percent in (50, 99)}

    return {
        "wire": options.wire,
        "groups": options.groups,
        "seconds": round(seconds, 3),
        "groups_per_s": round(options.groups / seconds, 1),
        "batches_per_s": round(len(batches) / seconds, 1),
        **times("post", posts),
        **times("batch", batches),
        **times("status_env", polls),
        "status_env_max_ms": round(max(polls, default=0.0) * 1e3, 2),
        "polls_per_s": round(len(polls) / seconds, 1),
        "lost": options.groups - len(seen),
        "duplicated": seen.total() - len(seen),
        "rss_mb": round(peak / 1e6, 1) if server else None,
        "server_cpu_ms_per_group": round(cpu / options.groups * 1e3, 3) if server else None,
        "load_average": round(psutil.getloadavg()[0], 2),
    }


@contextlib.contextmanager
def own_server(store: Path | None) -> Iterator[str]:
    """Run a server on a free port within the block, and yield its URL."""
    port = claim_ports({"api": 0})["api"]
    command = [sys.executable, "-m", "environments.api", "--port", str(port), *(["--store", str(store)] * bool(store))]
    keyless = {**os.environ, API_KEY_VARIABLE: ""}  # the clients of a benchmark send no key
    process = subprocess.Popen(command, env=keyless, stderr=subprocess.DEVNULL)
    try:
        deadline = running_time() + GIVE_UP_S
        while listener(port) is None:
            if process.poll() is not None or running_time() > deadline:
                raise ProcessFailedError("not ready", field="environments.api", got=f"exit code {process.poll()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()  # it holds no device that could keep it


def _open_run(options: ApiOptions, url: str) -> list[int]:
    """Register a trainer and the environments, on a queue that is empty; return the environments' numbers."""
    steps = {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": options.groups}
    names = {"wandb_group": "bench", "wandb_project": "bench", "checkpoint_dir": ""}
    sizes = {"batch_size": BATCH_GROUPS * options.group_size, "max_token_len": options.tokens}
    trainer = {**steps, **names, **sizes}
    lengths = {"max_token_length": options.tokens, "group_size": options.group_size}
    environment = {**lengths, "desired_name": "bench", "weight": 1.0}
    try:
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
            http.get("/reset_data").raise_for_status()
            http.post("/register", json=trainer).raise_for_status()
            http.get("/batch").raise_for_status()
            answers = [http.post("/register-env", json=environment) for _ in range(options.environments)]
            return [answer.raise_for_status().json()["env_id"] for answer in answers]
    except httpx.HTTPError as error:
        raise ServerError(field=f"rollout API {url}", got=str(error), wanted="an answer", fix="start it") from None


# Roles, each in a separate process: they prepare, wait for the parent, and send what they saw


class _Roles:
    """The processes of a measurement; its exit kills those that are left. `server` is None if the API is elsewhere."""

    def __init__(self, url: str, server: psutil.Process | None) -> None:
        self._url, self._server = url, server
        self._processes: dict[str, BaseProcess] = {}
        self._pipes: dict[str, Connection] = {}
        self._sent: dict[str, deque[Any]] = {}

    def __enter__(self) -> _Roles:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()  # it holds no device that could keep it

    def start(self, name: str, work: Callable[..., Any], *args: Any) -> None:
        """Start a process that calls `work` with its end of a pipe and the arguments."""
        context = mp.get_context("spawn")
        self._pipes[name], theirs = context.Pipe()
        self._sent[name] = deque()
        self._processes[name] = process = context.Process(None, _play, name, (theirs, work, *args), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process ends the pipe

    def go(self, *names: str) -> None:
        """Let processes begin, or a poller end."""
        for name in names:
            with contextlib.suppress(OSError):  # it has ended, which `result` says
                self._pipes[name].send(None)

    def result(self, name: str) -> Any:
        """Return a process's next value; raise a `ProcessFailedError` if any of them, or the API, ended too early."""
        while not self._sent[name]:
            readable = wait(list(self._pipes.values()), POLL_S)
            for sender in [each for each, pipe in self._pipes.items() if pipe in readable]:
                self._take(sender)
            self._check_server()
        return self._sent[name].popleft()

    def _take(self, sender: str) -> None:
        try:
            kind, value = self._pipes[sender].recv()
        except (EOFError, OSError):
            process = self._processes[sender]
            process.join(END_S)  # only its end closes its pipe
            kind, value = "failed", f"exit code {process.exitcode}"
        if kind == "failed":
            for _ in range(20):  # a process that is killed closes its connections a moment before it has ended
                self._check_server()
                time.sleep(0.1)
            raise ProcessFailedError("ended too early", field=f"{sender} of the benchmark", got=value)
        if kind == "done":
            del self._pipes[sender]
        self._sent[sender].append(value)

    def _check_server(self) -> None:
        try:
            if self._server is None or self._server.status() != psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            pass
        raise ProcessFailedError("ended during the measurement", field=f"rollout API {self._url}", got="no process")


def _play(parent: Connection, work: Callable[..., Any], *args: Any) -> None:
    """Play a role, and send the parent its result, or why it failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        outcome = "done", work(parent, *args)
    except BaseException as error:
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        outcome = "failed", f"{type(first).__name__}: {first}"
    with contextlib.suppress(OSError):  # the parent has ended
        parent.send(outcome)


def _ready(parent: Connection) -> None:
    """Say that this process is ready, and wait until it may begin."""
    parent.send(("ready", None))
    parent.recv()


def _call(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[bytes, http.client.HTTPMessage]:
    """Return the body and headers of an answer that must have status 200."""
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{method} {path}: status {answer.status}, {content[:200]!r}")
    return content, answer.headers


def _post(parent: Connection, at: tuple[str, int], options: ApiOptions, env_id: int) -> list[float]:
    """Post groups like a model's from several clients at once, each with one connection; return the seconds of each.

    Tokens are random, the first one is the group's number. Prompts are masked, and logprobs are float32.
    """
    packed, prompt = options.wire == "msgpack", options.tokens // 4
    headers = {"Content-Type": wire.MSGPACK} if packed else {"Content-Type": wire.JSON, "Content-Encoding": "gzip"}
    bodies: list[bytes] = []
    for number in range(options.groups):
        draw = np.random.default_rng(number)
        tokens = draw.integers(0, VOCABULARY, (options.group_size, options.tokens)).tolist()
        tokens[0][0] = number
        logprobs = -draw.standard_exponential((options.group_size, options.tokens - prompt), np.float32) / 2
        group = wire.ScoredData(
            tokens=tokens,
            masks=[[wire.IGNORED] * prompt + row[prompt:] for row in tokens],
            scores=draw.random(options.group_size).tolist(),
            inference_logprobs=[[wire.MASKED_LOGPROB] * prompt + row for row in logprobs.tolist()],
            env_id=env_id,
        )
        encoded = wire.encode_group(group, headers["Content-Type"])
        bodies.append(encoded if packed else gzip.compress(encoded, 6))
    own = threading.local()

    def connect() -> None:
        own.connection = http.client.HTTPConnection(*at, timeout=120)
        own.connection.connect()
        own.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(body: bytes) -> float:
        start = time.perf_counter()
        _call(own.connection, "POST", "/scored_data", body, headers)
        return time.perf_counter() - start

    with ThreadPoolExecutor(options.clients, initializer=connect) as clients:
        _ready(parent)
        return [*clients.map(post, bodies)]


def _consume(parent: Connection, at: tuple[str, int], options: ApiOptions) -> tuple[list[float], Counter[int]]:
    """Take batches as a trainer does, until every group has arrived, or no more arrive.

    Return the seconds of each batch, and how often each group came.
    """
    connection = http.client.HTTPConnection(*at, timeout=300)
    packed = options.wire == "msgpack"
    path = f"/batch?lease={LEASE_S}" if packed else "/batch"
    accepted = {"Accept": wire.MSGPACK} if packed else {"Accept": wire.JSON, "Accept-Encoding": "gzip"}
    times: list[float] = []
    seen: Counter[int] = Counter()
    _ready(parent)
    last = running_time()
    while len(seen) < options.groups and running_time() - last < GIVE_UP_S:
        start = time.perf_counter()
        content, headers = _call(connection, "GET", path, None, accepted)
        took = time.perf_counter() - start
        if headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        batch = wire.decode_batch(content, headers.get("Content-Type", wire.JSON))
        if not batch.batch:
            time.sleep(0.02)
            continue
        times.append(took)
        last = running_time()
        if len(batch.batch) != BATCH_GROUPS:
            raise RuntimeError(f"a batch of {len(batch.batch)} groups, expected {BATCH_GROUPS}")
        seen.update(group.tokens[0][0] for group in batch.batch)
        if batch.batch_id is not None:
            _call(connection, "POST", f"/batch/{batch.batch_id}/ack", None, {})
    return times, seen


def _poll(parent: Connection, at: tuple[str, int], env_ids: Sequence[int]) -> list[float]:
    """Ask GET /status-env every 0.1 s for each environment until the parent sends a word; return all seconds."""
    times: list[float] = []
    connecting = asyncio.Semaphore(50)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with connecting:
            return await asyncio.open_connection(*at)

    async def ask(
        number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: asyncio.Future[None]
    ) -> None:
        """Send the same few bytes each time: a thousand environments need little CPU time compared with the server."""
        body = f'{{"env_id": {env_ids[number]}}}'
        head = f"GET /status-env HTTP/1.1\r\nHost: {at[0]}:{at[1]}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        due = time.perf_counter() + POLL_S * number / len(env_ids)  # spread, as independent processes are
        while not end.done():
            await asyncio.sleep(due - time.perf_counter())
            asked = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer.split(b"\r\n", 1)[0]:
                raise RuntimeError(f"GET /status-env: {answer[:200]!r}")
            await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
            times.append(time.perf_counter() - asked)
            due = max(due + POLL_S, time.perf_counter())  # a late answer delays the next request

    async def poll() -> None:
        loop = asyncio.get_running_loop()
        streams = await asyncio.gather(*(connect() for _ in env_ids))
        await loop.run_in_executor(None, _ready, parent)
        end = loop.create_future()  # a thread that waits for the word would outlive a request that fails

        def note_end() -> None:
            loop.remove_reader(parent.fileno())
            end.set_result(None)

        loop.add_reader(parent.fileno(), note_end)
        async with asyncio.TaskGroup() as tasks:
            for number, stream in enumerate(streams):
                tasks.create_task(ask(number, *stream, end))

    uvloop.run(poll())
    return times
