"""`grpo bench api`: load a rollout API from separate processes and print one line of figures.

Posting clients, a trainer and polling environments each run beside the server, as they do in a run. The bodies are
made and compressed before the clock starts, so that the figures are the server's and not gzip's. With `--url` a
running server is loaded, for example the original one; if it is on this machine its CPU time and memory are read.
"""

import contextlib
import gzip
import http.client
import json
import multiprocessing as mp
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import psutil
import typer

from environments.api import wire
from grpo_trainer.bench.pollers import poll
from grpo_trainer.errors import ConfigError, ProcessFailedError, ServerError

Wire = Literal["json", "msgpack"]
_LEASE_S = 300
_IDLE_S = 0.02
_GIVE_UP_S = 30.0
_VOCABULARY = range(150_000)


@dataclass(frozen=True)
class Load:
    """The load on the server."""

    groups: int = 2000
    group_size: int = 8
    tokens: int = 512
    clients: int = 16
    batch_size: int = 64
    wire: Wire = "json"
    environments: int = 1
    prefill: bool = False


@dataclass
class Figures:
    """One line of results. Times of the server's answers are as the clients saw them; `server_cpu_ms_per_group` is
    post and batch together; `status_env_max_ms` is the longest stall a polling environment saw."""

    wire: Wire
    groups: int
    seconds: float = 0.0
    groups_per_s: float = 0.0
    mb_per_s: float = 0.0
    batches_per_s: float = 0.0
    post_p50_ms: float = 0.0
    post_p99_ms: float = 0.0
    batch_p50_ms: float = 0.0
    batch_p99_ms: float = 0.0
    status_env_p50_ms: float = 0.0
    status_env_p99_ms: float = 0.0
    status_env_max_ms: float = 0.0
    polls_per_s: float = 0.0
    lost: int = 0
    duplicated: int = 0
    rss_mb: float | None = None
    server_cpu_ms_per_group: float | None = None
    server_cpu_share: float | None = None
    load_average: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(load: Load, url: str | None = None, store: Path | None = None) -> Figures:
    """Load a server and return the figures; without `url`, start a server for that (with `store` if given)."""
    if load.groups * load.group_size % load.batch_size:
        raise ConfigError(
            "the last batch would never come",
            field="--groups x --group-size",
            got=f"{load.groups} x {load.group_size}",
            wanted=f"a multiple of --batch-size {load.batch_size}",
        )
    if url is not None:
        return _measure(load, url)
    with _own_server(store) as own:
        return _measure(load, own)


def _measure(load: Load, url: str) -> Figures:
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    env_ids = _open_run(load, host, port)
    server = _listener(port) if host in ("127.0.0.1", "localhost") else None
    context = mp.get_context("spawn")
    posters = _shares(load.groups, min(load.clients, 4))
    clients = _shares(load.clients, len(posters))
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []

    def start(role: Any, *arguments: Any) -> Connection:
        here, there = context.Pipe()
        process = context.Process(target=role, args=(there, *arguments), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
        return here

    first = 0
    posting = []
    for share, threads in zip(posters, clients, strict=True):
        posting.append(start(_post, host, port, load, range(first, first + share), threads, env_ids[0]))
        first += share
    polling = [start(poll, host, port, share) for share in _deal(env_ids, 1 if len(env_ids) < 100 else 2)]
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
    used = _cpu(server) - before
    for pipe in polling:
        pipe.send("stop")
    polled = [pipe.recv() for pipe in polling]
    for process in processes:
        process.join()
    return _figures(load, seconds, posted, consumed, polled, server, used, max(peak, _rss(server)))


def _figures(
    load: Load,
    seconds: float,
    posted: list[dict[str, Any]],
    consumed: dict[str, Any],
    polled: list[dict[str, Any]],
    server: psutil.Process | None,
    cpu_s: float,
    rss: float,
) -> Figures:
    posts = [each for share in posted for each in share["times"]]
    polls = [each for share in polled for each in share["times"]]
    seen: dict[int, int] = consumed["seen"]
    figures = Figures(load.wire, load.groups, round(seconds, 3), load_average=round(psutil.getloadavg()[0], 2))
    figures.groups_per_s = round(load.groups / seconds, 1)
    figures.mb_per_s = round(sum(share["bytes"] for share in posted) / 1e6 / seconds, 1)
    figures.batches_per_s = round(len(consumed["times"]) / seconds, 1)
    figures.post_p50_ms, figures.post_p99_ms = _percentiles(posts)
    figures.batch_p50_ms, figures.batch_p99_ms = _percentiles(consumed["times"])
    figures.status_env_p50_ms, figures.status_env_p99_ms = _percentiles(polls)
    figures.status_env_max_ms = round(max(polls, default=0.0) * 1e3, 2)
    figures.polls_per_s = round(len(polls) / seconds, 1)
    figures.lost = load.groups - len(seen)
    figures.duplicated = sum(count - 1 for count in seen.values())
    figures.failures = [each for share in (*posted, *polled, consumed) for each in share["failures"]][:5]
    if server is not None:
        figures.rss_mb = round(rss / 1e6, 1)
        figures.server_cpu_ms_per_group = round(cpu_s / load.groups * 1e3, 3)
        figures.server_cpu_share = round(cpu_s / seconds, 2)
    return figures


def _percentiles(times: list[float]) -> tuple[float, float]:
    """Return median and 99th percentile in milliseconds."""
    if not times:
        return 0.0, 0.0
    cuts = quantiles(times * 2 if len(times) == 1 else times, n=100, method="inclusive")
    return round(cuts[49] * 1e3, 2), round(cuts[98] * 1e3, 2)


# The run that the clients take part in


def _open_run(load: Load, host: str, port: int) -> list[int]:
    """Register a trainer and the environments, on a queue that is empty."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
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
    _call(connection, "POST", "/register", wire.encode(trainer))
    _call(connection, "GET", "/batch")
    ids = []
    for _ in range(load.environments):
        request = wire.RegisterEnv(
            max_token_length=load.tokens, desired_name="bench", weight=1.0, group_size=load.group_size
        )
        ids.append(json.loads(_call(connection, "POST", "/register-env", wire.encode(request)))["env_id"])
    connection.close()
    return ids


def _call(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> bytes:
    connection.request(method, path, body, {"Content-Type": wire.JSON} if body else {})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise ServerError(f"{content[:200]!r}", field=f"{method} {path}", got=f"status {answer.status}", wanted="200")
    return content


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


def _post(pipe: Connection, host: str, port: int, load: Load, numbers: range, threads: int, env_id: int) -> None:
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
        while True:
            try:
                body = waiting.pop()
            except IndexError:
                return
            start = time.perf_counter()
            connection.request("POST", "/scored_data", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            times.append(time.perf_counter() - start)
            if answer.status != 200:
                failures.append(f"POST /scored_data: {answer.status} {content[:200]!r}")

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
    headers = {"Accept": wire.MSGPACK} if packed else {"Accept": wire.JSON, "Accept-Encoding": "gzip"}
    times: list[float] = []
    seen: dict[int, int] = {}
    failures: list[str] = []
    pipe.send("ready")
    pipe.recv()
    last = time.monotonic()
    while len(seen) < load.groups and time.monotonic() - last < _GIVE_UP_S:
        start = time.perf_counter()
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        took = time.perf_counter() - start
        if answer.status != 200:
            failures.append(f"GET {path}: {answer.status} {content[:200]!r}")
            break
        if answer.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        batch = wire.decode_batch(content, answer.headers.get("Content-Type", wire.JSON))
        if not batch.batch:
            time.sleep(_IDLE_S)
            continue
        times.append(took)
        last = time.monotonic()
        size = sum(len(group.tokens) for group in batch.batch)
        if size != load.batch_size:
            failures.append(f"a batch of {size} sequences, expected {load.batch_size}")
        for group in batch.batch:
            seen[group.tokens[0][0]] = seen.get(group.tokens[0][0], 0) + 1
        if batch.batch_id is not None:
            _call(connection, "POST", f"/batch/{batch.batch_id}/ack")
    pipe.send({"times": times, "seen": seen, "failures": failures})


# The server


@contextlib.contextmanager
def _own_server(store: Path | None) -> Iterator[str]:
    """Run a server on a free port within the block, and yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "environments.api", "--port", str(port)]
    process = subprocess.Popen([*command, *(["--store", str(store)] if store else [])], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _GIVE_UP_S
        while _listener(port) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailedError("not ready", field="environments.api", got=f"exit code {process.poll()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _listener(port: int) -> psutil.Process | None:
    """Return the process of this machine that listens on a port, if this user may see it."""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr[1] == port and each.pid:
            return psutil.Process(each.pid)
    return None


def _cpu(server: psutil.Process | None) -> float:
    if server is None:
        return 0.0
    times = server.cpu_times()
    return times.user + times.system


def _rss(server: psutil.Process | None) -> float:
    return float(server.memory_info().rss) if server else 0.0


def _shares(total: int, parts: int) -> list[int]:
    """Split `total` into nearly equal parts."""
    return [total // parts + (1 if i < total % parts else 0) for i in range(parts)]


def _deal(items: list[int], parts: int) -> list[list[int]]:
    return [items[i::parts] for i in range(min(parts, len(items)))]


app = typer.Typer(add_completion=False)


@app.command()
def api(
    groups: Annotated[int, typer.Option(min=1, help="groups to post")] = Load.groups,
    group_size: Annotated[int, typer.Option(min=1, help="sequences in a group")] = Load.group_size,
    tokens: Annotated[int, typer.Option(min=4, help="tokens in a sequence")] = Load.tokens,
    clients: Annotated[int, typer.Option(min=1, help="posting clients")] = Load.clients,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences in a batch")] = Load.batch_size,
    environments: Annotated[int, typer.Option(min=1, help="environments that poll every 0.1 s")] = 1,
    wire_format: Annotated[str, typer.Option("--wire", help="json or msgpack")] = Load.wire,
    prefill: Annotated[bool, typer.Option(help="post everything before the first batch is taken")] = False,
    url: Annotated[str | None, typer.Option(help="a running server instead of our own")] = None,
    store: Annotated[Path | None, typer.Option(help="give our own server this store")] = None,
    json_line: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Load a rollout API and print its figures."""
    if wire_format not in ("json", "msgpack"):
        raise typer.BadParameter(f"{wire_format!r}: expected json or msgpack", param_hint="--wire")
    load = Load(groups, group_size, tokens, clients, batch_size, wire_format, environments, prefill)
    try:
        figures = asdict(main(load, url, store))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if json_line:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>24}  {value}")


if __name__ == "__main__":
    app(prog_name="grpo bench api")
