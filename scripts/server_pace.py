#!/usr/bin/env python
"""What sets a server's pace under the load of `grpo bench loop`: a step's time, its CPU time, and its kernels' time.

python scripts/server_pace.py MODEL [--groups 80] [OPTIONS OF grpo serve]

Starts a server, measures it for --seconds, and then has vLLM's profiler trace --trace-seconds of it. Prints one JSON
line. The GPU sets the pace if `kernels_ms` is near `step_ms`. With `--distributed-executor-backend uni` a process does
if its share in `main_thread_cpu` is near 1. With `mp` engine and worker busy-wait, so their shares say nothing. The
profiler slows the host and not the kernels, so times of calls are longer than without it.
"""

import asyncio
import gzip
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
import psutil
import typer
from transformers import AutoConfig

from environments.synthetic_server import stop_token_ids
from grpo_trainer.bench.figures import RUNNING, TOKENS, counter_total
from grpo_trainer.bench.loop.options import GROUP, Work
from grpo_trainer.errors import GrpoError, ServerError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports

WORK = Work()
WARM_UP_SECONDS = 8.0
LONGEST = 12
"""Kernels, and calls of CUDA, that are listed."""
STEP = "execute_"
"""Begin of the name by which vLLM's worker marks a forward pass in a trace."""
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALLS = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True)
class Reading:
    """Counters of a server and of its processes at one time, in seconds and tokens.

    Attributes:
        main_threads: CPU seconds of the main thread of each process.
    """

    seconds: float
    tokens: float
    running: float
    main_threads: dict[str, float]


class Server:
    """The server that this process has started, as its client sees it and as the kernel does."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        (front_end,) = psutil.Process().children()
        self._processes = {"front_end": front_end}
        for child in front_end.children(recursive=True):
            command = " ".join(child.cmdline())
            for name, title in (("engine", "EngineCore"), ("worker", "Worker")):
                if title in command:
                    self._processes[name] = child

    async def read(self) -> Reading:
        async with self._http.get("/metrics") as answer:
            metrics = await answer.text()
        tokens, running = (counter_total(metrics, name) for name in (TOKENS, RUNNING))
        mains = {name: _main_thread_cpu(process) for name, process in self._processes.items()}
        return Reading(time.perf_counter(), tokens, running, mains)

    async def rates(self, seconds: float) -> dict[str, Any]:
        """Return a step's time and tokens, and the share of a CPU core that each process's main thread uses."""
        first = await self.read()
        running = []
        while time.perf_counter() < first.seconds + seconds:
            await asyncio.sleep(0.5)
            running.append((await self.read()).running)
        last = await self.read()
        passed = last.seconds - first.seconds
        tokens_per_s, mean = (last.tokens - first.tokens) / passed, sum(running) / len(running)
        return {
            "tokens_per_s": round(tokens_per_s, 1),
            "running_mean": round(mean, 1),
            "step_ms": round(1e3 * mean / tokens_per_s, 3),  # a step gives each running sequence a token
            "main_thread_cpu": {
                name: round((used - first.main_threads[name]) / passed, 3) for name, used in last.main_threads.items()
            },
        }

    async def trace(self, seconds: float) -> None:
        """Have vLLM's profiler write its traces."""
        await self._post("/start_profile")
        await asyncio.sleep(seconds)
        await self._post("/stop_profile")

    async def _post(self, route: str) -> None:
        async with self._http.post(route) as answer:
            answer.raise_for_status()


def _main_thread_cpu(process: psutil.Process) -> float:
    main = next(thread for thread in process.threads() if thread.id == process.pid)
    return main.user_time + main.system_time


class Asker:
    """Asks for one group of completions after the other, as an environment does."""

    def __init__(self, http: aiohttp.ClientSession, number: int, vocabulary: int) -> None:
        self._http, self._vocabulary = http, vocabulary
        self._draw = random.Random(number)
        self._sampling = {
            "n": GROUP,
            "max_tokens": WORK.completion_len,
            "temperature": 1.0,
            "logprobs": 0,
            "stop_token_ids": [*stop_token_ids(vocabulary, WORK.completion_mean, eos=0)],
        }

    async def once(self) -> None:
        """Ask for one group.

        Raises:
            ServerError: the server refused.
        """
        prompt = self._draw.choices(range(self._vocabulary), k=WORK.prompt_len)
        body = {"prompt": {"prompt_token_ids": prompt}, **self._sampling}
        async with self._http.post("/generate", json=body) as answer:
            if answer.status != 200:
                raise ServerError(field="/generate", got=(await answer.text())[:300], wanted="completions")
            await answer.read()

    async def for_ever(self) -> None:
        while True:
            await self.once()


def kernel_figures(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what a trace says of one step: milliseconds of all kernels together, of the longest, and of calls of CUDA.

    Args:
        events: of Chrome's trace format, as PyTorch's profiler writes it; times in microseconds.

    Raises:
        ServerError: no step is among them.
    """
    timed = [event for event in events if "dur" in event]
    marks = [event for event in timed if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)]
    if not (steps := len(marks)):
        raise ServerError(
            field="vLLM's profiler", got="a trace without a step", wanted="several", fix="--trace-seconds"
        )
    busy_us = end = 0.0
    kernels: Counter[str] = Counter()
    for event in sorted((event for event in timed if event.get("cat") in ON_GPU), key=lambda event: event["ts"]):
        begin, after = event["ts"], event["ts"] + event["dur"]
        busy_us += max(0.0, after - max(begin, end))
        end = max(end, after)
        kernels[event["name"][:80]] += event["dur"]
    calls: Counter[str] = Counter()
    for event in timed:
        if event.get("cat") in CALLS:
            calls[event["name"]] += event["dur"]

    def longest(found: Counter[str]) -> dict[str, float]:
        return {name: round(us / steps / 1e3, 3) for name, us in found.most_common(LONGEST)}

    return {
        "traced_steps": steps,
        "kernels_ms": round(busy_us / steps / 1e3, 3) if kernels else None,
        "kernels": longest(kernels),
        "calls_ms": longest(calls),
    }


def trace_in(folder: Path) -> Path:
    """Return the file with the engine's trace.

    Raises:
        ServerError: vLLM's profiler wrote none.
    """
    files = sorted(folder.glob("*rank0*.json*"))
    if not files:
        raise ServerError(field="vLLM's profiler", got="no trace", wanted="one of rank 0", fix="see the server's log")
    return files[0]


def read_events(trace: Path) -> list[dict[str, Any]]:
    data = trace.read_bytes()
    return json.loads(gzip.decompress(data) if trace.suffix == ".gz" else data)["traceEvents"]


async def measure(url: str, vocabulary: int, groups: int, seconds: float, traced: float) -> dict[str, Any]:
    """Keep a server busy. Return its rates; then its profiler writes a trace."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:

        async def watched() -> dict[str, Any]:
            await asyncio.sleep(WARM_UP_SECONDS)
            own = Server(http)
            rates = await own.rates(seconds)
            await own.trace(traced)
            return rates

        await Asker(http, 0, vocabulary).once()  # a server compiles at its first request, for a minute on a CPU
        async with asyncio.TaskGroup() as tasks:
            askers = [Asker(http, number, vocabulary) for number in range(groups)]
            asking = [tasks.create_task(asker.for_ever()) for asker in askers]
            watching = tasks.create_task(watched())
            found = await watching
            for task in asking:
                task.cancel()
        return found


def main(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Folder of a model with random weights.")],
    groups: Annotated[int, typer.Option(min=1, help=f"Groups of {GROUP} completions in flight.")] = 80,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time in which rates are measured.")] = 15.0,
    trace_seconds: Annotated[float, typer.Option(min=0.1, help="Time that is traced.")] = 1.0,
    log: Annotated[Path, typer.Option(help="The server's log.")] = Path("server_pace.log"),
    trace_file: Annotated[Path | None, typer.Option(help="Keep the trace here, as vLLM's profiler writes it.")] = None,
) -> None:
    """Measure a server under the load of `grpo bench loop`. Other options go to the server."""
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    port = claim_ports({"server": 0})["server"]
    with tempfile.TemporaryDirectory(prefix="grpo-pace-") as name:
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": name,
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        }
        argv = [sys.executable, "-m", "vllm_server", "--model", str(model), "--port", str(port)]
        argv += ["--max-model-len", str(WORK.seq_len), "--max-num-seqs", "1024"]
        argv += ["--profiler-config", json.dumps(profiler), *context.args]
        url = f"http://127.0.0.1:{port}"
        spec = ProcessSpec("server", tuple(argv), ready_url=f"{url}/health")
        with OwnedServer(lambda model, version: spec, log, Path(name) / "served") as server:
            server.start(str(model), 0)
            server.wait_ready()
            try:
                rates = asyncio.run(measure(url, vocabulary, groups, seconds, trace_seconds))
            except* aiohttp.ClientError:
                server.check()  # if the server has ended, its last lines are the error
                raise
        trace = trace_in(Path(name))
        if trace_file:
            shutil.copyfile(trace, trace_file)
        traced = kernel_figures(read_events(trace))
    print(json.dumps({"groups": groups, "server_options": context.args, **rates, **traced}))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    try:
        app()
    except* GrpoError as errors:
        sys.exit("\n".join(f"grpo: {error}" for error in errors.exceptions))
