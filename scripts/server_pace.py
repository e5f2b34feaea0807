#!/usr/bin/env python
"""What sets a server's pace under the load of `grpo bench loop`: a step's time, its CPU time, and its kernels' time.

python scripts/server_pace.py MODEL [--sequences 256] [OPTIONS OF grpo serve]

Starts a server, measures it for --seconds, and then has vLLM's profiler trace --trace-seconds of it. Prints one JSON
line. The GPU sets the pace if `kernels_ms` is near `step_ms`; the engine's process does if its main thread computes all
of the time. The profiler slows the host and not the kernels, so times of calls are longer than without it.
"""

import asyncio
import gzip
import json
import random
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

STEPS = "vllm:iteration_tokens_total_count"
"""vLLM's counter of engine steps."""
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
    """Counters of a server and of its engine's process at one time."""

    seconds: float
    tokens: float
    steps: float
    running: float
    main_cpu: float
    engine_cpu: float


class Server:
    """The server that this process has started, as its client sees it and as the kernel does."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        family = psutil.Process().children(recursive=True)
        self._engine = next(each for each in family if "EngineCore" in " ".join(each.cmdline()))

    async def read(self) -> Reading:
        async with self._http.get("/metrics") as answer:
            metrics = await answer.text()
        main = next(thread for thread in self._engine.threads() if thread.id == self._engine.pid)
        whole = self._engine.cpu_times()
        tokens, steps, running = (counter_total(metrics, name) for name in (TOKENS, STEPS, RUNNING))
        now = time.perf_counter()
        return Reading(now, tokens, steps, running, main.user_time + main.system_time, whole.user + whole.system)

    async def rates(self, seconds: float) -> dict[str, float]:
        """Return a step's time and tokens, and the share of a CPU core that the engine uses."""
        first = await self.read()
        running = []
        while time.perf_counter() < first.seconds + seconds:
            await asyncio.sleep(0.5)
            running.append((await self.read()).running)
        last = await self.read()
        passed = last.seconds - first.seconds
        return {
            "tokens_per_s": round((last.tokens - first.tokens) / passed, 1),
            "running_mean": round(sum(running) / len(running), 1),
            "step_ms": round(1e3 * passed / (last.steps - first.steps), 3),
            "main_thread_cpu": round((last.main_cpu - first.main_cpu) / passed, 3),
            "engine_cpu": round((last.engine_cpu - first.engine_cpu) / passed, 3),
        }

    async def trace(self, seconds: float) -> None:
        """Have vLLM's profiler write its traces."""
        await self._post("/start_profile")
        await asyncio.sleep(seconds)
        await self._post("/stop_profile")

    async def _post(self, route: str) -> None:
        async with self._http.post(route) as answer:
            answer.raise_for_status()


async def ask_for_ever(http: aiohttp.ClientSession, number: int, vocabulary: int) -> None:
    """Ask for one completion after the other. `GROUP` askers have the same prompts, as completions of a group do."""
    draw = random.Random(number // GROUP)
    sampling = {
        "max_tokens": WORK.completion_len,
        "temperature": 1.0,
        "logprobs": 0,
        "stop_token_ids": [*stop_token_ids(vocabulary, WORK.completion_mean, eos=0)],
    }
    while True:
        prompt = draw.choices(range(vocabulary), k=WORK.prompt_len)
        async with http.post("/generate", json={"prompt": {"prompt_token_ids": prompt}, **sampling}) as answer:
            if answer.status != 200:
                raise ServerError(field="/generate", got=(await answer.text())[:300], wanted="a completion")
            await answer.read()


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


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the engine's trace.

    Raises:
        ServerError: vLLM's profiler wrote none.
    """
    files = sorted(folder.glob("*rank0*.json*"))
    if not files:
        raise ServerError(field="vLLM's profiler", got="no trace", wanted="one of rank 0", fix="see the server's log")
    data = files[0].read_bytes()
    return json.loads(gzip.decompress(data) if files[0].suffix == ".gz" else data)["traceEvents"]


async def measure(url: str, vocabulary: int, sequences: int, seconds: float, traced: float) -> dict[str, float]:
    """Keep a server busy. Return its rates; then its profiler writes a trace."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:

        async def watched() -> dict[str, float]:
            await asyncio.sleep(WARM_UP_SECONDS)
            own = Server(http)
            rates = await own.rates(seconds)
            await own.trace(traced)
            return rates

        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(ask_for_ever(http, number, vocabulary)) for number in range(sequences)]
            watching = tasks.create_task(watched())
            found = await watching
            for task in asking:
                task.cancel()
        return found


def main(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Folder of a model with random weights.")],
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in flight.")] = 256,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time in which rates are measured.")] = 15.0,
    trace_seconds: Annotated[float, typer.Option(min=0.1, help="Time that is traced.")] = 1.0,
    log: Annotated[Path, typer.Option(help="The server's log.")] = Path("server_pace.log"),
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
                rates = asyncio.run(measure(url, vocabulary, sequences, seconds, trace_seconds))
            except* aiohttp.ClientError:
                server.check()  # if the server has ended, its last lines are the error
                raise
        traced = kernel_figures(read_events(Path(name)))
    print(json.dumps({"sequences": sequences, "server_options": context.args, **rates, **traced}))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    try:
        app()
    except* GrpoError as errors:
        sys.exit("\n".join(f"grpo: {error}" for error in errors.exceptions))
