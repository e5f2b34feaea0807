"""The stress test from beginning to end."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import msgspec
import torch
from torch import Tensor

from grpo_trainer.bench.fence.judge import Case
from grpo_trainer.bench.fence.options import FenceOptions
from grpo_trainer.bench.fence.patterns import Answer, References, Verdicts, answer_of, request, two_patterns
from grpo_trainer.bench.sync.common import placed
from grpo_trainer.bench.sync.figures import median_ms, p95_ms
from grpo_trainer.bench.sync.generator import Demand
from grpo_trainer.bench.sync.load import Meter, check_busy, generating
from grpo_trainer.bench.sync.shapes import SHAPES
from grpo_trainer.bench.sync.shared_vllm import SharedSubject, opened
from grpo_trainer.bench.sync.subject import Place
from grpo_trainer.errors import BridgeError, ProcessFailedError, ServerError
from vllm_server.protocol import GENERATE_ROUTE

log = logging.getLogger(__name__)

PROMPTS = 16
PROMPT_TOKENS = 24
REPEATS = 4
SETTLE_SECONDS = 2.0
PROGRESS_EVERY = 1000
JUDGE_SECONDS = 120.0
"""For the last answers to come."""


@dataclass(frozen=True)
class FenceReport:
    """All that was measured.

    Attributes:
        noise, spread, allowed: see `References`.
        writes_ms: p50 and p95 of a write with its fence; stalls_ms: of the standstill alone.
        quiet_tokens_per_s, writing_tokens_per_s: of the load, without and with writes one after the other.
    """

    options: FenceOptions
    device: str
    vllm_version: str
    verdicts: Verdicts
    noise: float
    spread: float
    allowed: float
    seconds: float
    writes_ms: tuple[float, float]
    stalls_ms: tuple[float, float]
    quiet_tokens_per_s: float
    writing_tokens_per_s: float


def measure(options: FenceOptions, server_args: tuple[str, ...]) -> FenceReport:
    """Start a server, attach to its weights, write them over and over under load, and judge the answers.

    Raises:
        BridgeError: the patterns can't be told apart.
        GrpoError: the server did not start, or ended; a request was refused; …
    """
    with (
        placed(options.model, options.log_dir, server_args) as place,
        opened(options.bridge(), place, options.in_flight) as subject,
    ):
        return Stress(options, place, subject).run()


class Stress:
    """One server under fire."""

    def __init__(self, options: FenceOptions, place: Place, subject: SharedSubject) -> None:
        self._options = options
        self._place = place
        self._subject = subject
        self._meter = Meter(subject.url)
        self._vocab = SHAPES[options.model.shape].vocab
        draw = random.Random(0)
        self._prompts = [draw.choices(range(2, self._vocab), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
        self._patterns = two_patterns(subject.parameters)

    def run(self) -> FenceReport:
        references = self._references()
        log.info(
            "answers of one pattern differ by up to %.3g nats, of the two by at least %.3g; allowed: %.3g",
            *(references.noise, references.spread, references.allowed),
        )
        if not references.distinct:
            raise BridgeError(
                f"the patterns can't be told apart: their answers are {references.spread:.3g} nats apart, those of one "
                f"pattern {references.noise:.3g}; choose another --shape"
            )
        demand = Demand(
            self._subject.url, self._options.concurrency, PROMPT_TOKENS, self._options.completion_len, self._vocab, {}
        )
        with generating(demand, self._place.logs / "load.log", self._meter) as generator:
            time.sleep(SETTLE_SECONDS)
            quiet = [self._rate(self._rest)]
            with self._judged(references) as verdicts:
                writes: list[float] = []
                stalls: list[float] = []
                started = time.perf_counter()
                writing = self._rate(lambda: self._write_all(writes, stalls))
                seconds = time.perf_counter() - started
            quiet.append(self._rate(self._rest))
            check_busy(generator)
        self._subject.check()
        return FenceReport(
            options=self._options,
            device=torch.cuda.get_device_name() if self._place.on_gpu else "CPU",
            vllm_version=self._subject.info.vllm_version,
            verdicts=verdicts,
            noise=references.noise,
            spread=references.spread,
            allowed=references.allowed,
            seconds=seconds,
            writes_ms=(median_ms(writes), p95_ms(writes)),
            stalls_ms=(median_ms(stalls), p95_ms(stalls)),
            quiet_tokens_per_s=sum(quiet) / len(quiet),
            writing_tokens_per_s=writing,
        )

    def _references(self) -> References:
        """Each prompt alone, and together with the others."""
        known: list[list[list[Answer]]] = []
        for pattern in self._patterns:
            self._subject.write(lambda pattern=pattern: _copy(self._subject.parameters, pattern))
            rounds = [self._ask_all(threads) for threads in (1, *(PROMPTS for _ in range(REPEATS - 1)))]
            known.append([[answers[prompt] for answers in rounds] for prompt in range(PROMPTS)])
        return References((known[0], known[1]))

    def _ask_all(self, at_once: int) -> list[Answer]:
        with httpx.Client(base_url=self._subject.url, timeout=60.0, trust_env=False) as http:

            def ask(prompt: list[int]) -> Answer:
                response = http.post(GENERATE_ROUTE, json=request(prompt))
                if response.status_code != 200:
                    raise ServerError(f"{response.status_code}: {response.text[:500]}")
                return answer_of(response.content)[0]

            with ThreadPoolExecutor(at_once) as pool:
                return list(pool.map(ask, self._prompts))

    def _write_all(self, writes: list[float], stalls: list[float]) -> None:
        for number in range(1, self._options.writes + 1):
            pattern = self._patterns[(number - 1) % 2]  # the second one was written last
            if self._options.fenced:
                written = self._subject.write(lambda pattern=pattern: _copy(self._subject.parameters, pattern))
                writes.append(written.seconds)
                stalls.append(written.stall_seconds)
            else:
                started = time.perf_counter()
                _copy(self._subject.parameters, pattern)
                if self._place.on_gpu:
                    torch.cuda.synchronize()
                writes.append(time.perf_counter() - started)
                stalls.append(0.0)
            if number % PROGRESS_EVERY == 0:
                log.info("%d of %d writes, median %.1f ms", number, self._options.writes, median_ms(writes))

    def _rest(self) -> None:
        time.sleep(self._options.quiet_seconds)

    def _rate(self, meanwhile: Callable[[], None]) -> float:
        """Tokens per second that the server generates while something else is done."""
        tokens, began = self._meter.counted()
        meanwhile()
        more, ended = self._meter.counted()
        return (more - tokens) / (ended - began)

    @contextmanager
    def _judged(self, references: References) -> Iterator[Verdicts]:
        """What is generated within the block is judged; the verdicts are there when it has been left."""
        answers = ([list(each) for each in references.answers[0]], [list(each) for each in references.answers[1]])
        # The second pattern has just been written, as `version`.
        even = (1 + self._subject.version) % 2 if self._options.fenced else None
        case = Case(self._subject.url, self._options.judges, self._prompts, answers, even)
        verdicts = Verdicts()
        argv = [sys.executable, "-m", "grpo_trainer.bench.fence.judge"]
        with (
            (self._place.logs / "judge.log").open("wb") as log_file,
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file) as process,
        ):
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(msgspec.json.encode(case) + b"\n")
                process.stdin.flush()
                process.stdout.readline()  # it judges from now on, or has ended
                yield verdicts
                said, _ = process.communicate(timeout=JUDGE_SECONDS)
            finally:
                process.kill()
        if process.returncode:
            last = (self._place.logs / "judge.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise ProcessFailedError(f"the judge ended with exit code {process.returncode}: {' '.join(last)}")
        vars(verdicts).update(msgspec.json.decode(said))


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
