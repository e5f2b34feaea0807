"""The stress test from beginning to end."""

from __future__ import annotations

import logging
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from grpo_trainer.bench.fence.judge import Case
from grpo_trainer.bench.fence.options import FenceOptions
from grpo_trainer.bench.fence.patterns import Heard, Quantiles, References, Verdicts, two_patterns
from grpo_trainer.bench.sync.common import placed
from grpo_trainer.bench.sync.figures import median_ms, p95_ms
from grpo_trainer.bench.sync.generator import Demand
from grpo_trainer.bench.sync.load import Meter, check_busy, generating
from grpo_trainer.bench.sync.shapes import SHAPES
from grpo_trainer.bench.sync.shared_vllm import SharedSubject, opened
from grpo_trainer.bench.sync.subject import Place
from grpo_trainer.errors import BridgeError, ProcessFailedError

log = logging.getLogger(__name__)

PROMPTS = 16
PROMPT_TOKENS = 24
SETTLE_SECONDS = 2.0
PROGRESS_EVERY = 1000
JUDGE_SECONDS = 120.0
"""Time limit for the last answers."""


@dataclass(frozen=True)
class FenceReport:
    """The measurements.

    Attributes:
        own: distances of answers while nothing but one pattern was there, as those that are judged have them.
        spread, allowed: see `References`.
        writes_ms: p50 and p95 of a write with its fence; stalls_ms: of the standstill alone.
        quiet_tokens_per_s, writing_tokens_per_s: of the load, without and with writes one after the other.
    """

    options: FenceOptions
    device: str
    vllm_version: str
    verdicts: Verdicts
    own: Quantiles
    spread: float
    allowed: float
    writes: int
    seconds: float
    writes_ms: tuple[float, float]
    stalls_ms: tuple[float, float]
    quiet_tokens_per_s: float
    writing_tokens_per_s: float


def measure(options: FenceOptions, server_args: tuple[str, ...]) -> FenceReport:
    """Start a server, attach to its weights, write them repeatedly under load, and judge the answers.

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
    """One server under load and writes."""

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
        demand = Demand(
            self._subject.url, self._options.concurrency, PROMPT_TOKENS, self._options.completion_len, self._vocab, {}
        )
        writes: list[float] = []
        stalls: list[float] = []
        with generating(demand, self._place.logs / "load.log", self._meter) as generator:
            time.sleep(SETTLE_SECONDS)
            references = self._references()
            quiet = [self._rate(self._rest)]
            with self._judged(references) as verdicts:
                started = time.perf_counter()
                writing = self._rate(lambda: self._write_all(writes, stalls))
                seconds = time.perf_counter() - started
            quiet.append(self._rate(self._rest))
            check_busy(generator)
        self._subject.check()
        for torn in verdicts.examples:
            log.warning(
                "torn: prompt %d of patterns %s is %.4g and %.4g nats from them, allowed %.4g; its logprobs: %s",
                *(torn.prompt, torn.patterns, *torn.distances, references.allowed),
                " ".join(f"{logprob:.3f}" for logprob in torn.answer),
            )
        return FenceReport(
            options=self._options,
            device=torch.cuda.get_device_name() if self._place.on_gpu else "CPU",
            vllm_version=self._subject.info.vllm_version,
            verdicts=verdicts,
            own=Quantiles.of(references.own),
            spread=references.spread,
            allowed=references.allowed,
            writes=len(writes),
            seconds=seconds,
            writes_ms=(median_ms(writes), p95_ms(writes)),
            stalls_ms=(median_ms(stalls), p95_ms(stalls)),
            quiet_tokens_per_s=sum(quiet) / len(quiet),
            writing_tokens_per_s=writing,
        )

    def _references(self) -> References:
        """Collect answers of each pattern under the same load as the judged ones, including writes.

        The load must be the same because rounding depends on the batch. Each write repeats the present pattern, always
        within a fence, so these answers are correct references.

        Raises:
            BridgeError: the patterns can't be told apart.
        """
        first, second = (self._heard(pattern) for pattern in self._patterns)
        references = References.of(first, second)
        own = Quantiles.of(references.own)
        log.info(
            "%d answers of one pattern are %.3g nats from others of it (p50; p95 %.3g, p99 %.3g, most %.3g), the "
            "patterns' at least %.3g from each other; allowed: %.3g",
            *(len(references.own), own.p50, own.p95, own.p99, own.max, references.spread, references.allowed),
        )
        if not references.distinct:
            raise BridgeError(
                "the answers of the two patterns can't be told apart",
                field="--shape",
                got=f"{references.spread:.3g} nats from pattern to pattern",
                wanted=f"more than the {references.noise:.3g} nats between answers of one",
                fix="choose another --shape",
            )
        return references

    def _heard(self, pattern: Sequence[Tensor]) -> Heard:
        """What is answered with a pattern."""
        self._write(pattern, fenced=True)
        with self._asked(Case(self._subject.url, self._options.judges, self._prompts)) as said:
            until = time.perf_counter() + self._options.reference_seconds
            while time.perf_counter() < until:
                self._write(pattern, fenced=True)
        return msgspec.json.decode(said[0], type=Heard)

    def _write_all(self, writes: list[float], stalls: list[float]) -> None:
        """Write the two patterns in turn, the second one last."""
        until = time.perf_counter() + (self._options.max_seconds or math.inf)
        for number in range(1, self._options.writes + 1):
            if time.perf_counter() > until:
                log.warning("%d of %d writes in %.0f s", number - 1, self._options.writes, self._options.max_seconds)
                return
            taken, stalled = self._write(self._patterns[(number - 1) % 2], fenced=self._options.fenced)
            writes.append(taken)
            stalls.append(stalled)
            if number % PROGRESS_EVERY == 0:
                log.info("%d of %d writes, median %.1f ms", number, self._options.writes, median_ms(writes))

    def _write(self, pattern: Sequence[Tensor], *, fenced: bool) -> tuple[float, float]:
        """Write a pattern, and return the seconds of the write and of the pause in generation."""
        if fenced:
            written = self._subject.write(lambda: _copy(self._subject.parameters, pattern))
            return written.seconds, written.stall_seconds
        started = time.perf_counter()
        _copy(self._subject.parameters, pattern)
        if self._place.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started, 0.0

    def _rest(self) -> None:
        time.sleep(self._options.quiet_seconds)

    def _rate(self, meanwhile: Callable[[], None]) -> float:
        """Return the tokens per second that the server generates during another action."""
        tokens, began = self._meter.counted()
        meanwhile()
        more, ended = self._meter.counted()
        return (more - tokens) / (ended - began)

    @contextmanager
    def _judged(self, references: References) -> Iterator[Verdicts]:
        """Judge the answers generated within the block; the verdicts are available after it."""
        # The second pattern has just been written, as `version`.
        even = (1 + self._subject.version) % 2 if self._options.fenced else None
        verdicts = Verdicts()
        with self._asked(Case(self._subject.url, self._options.judges, self._prompts, references, even)) as said:
            yield verdicts
        vars(verdicts).update(vars(msgspec.json.decode(said[0], type=Verdicts)))

    @contextmanager
    def _asked(self, case: Case) -> Iterator[list[bytes]]:
        """Run the judging process during the block; its findings are available after it."""
        argv = [sys.executable, "-m", "grpo_trainer.bench.fence.judge"]
        said: list[bytes] = []
        with (
            (self._place.logs / "judge.log").open("ab") as log_file,
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file) as process,
        ):
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(msgspec.json.encode(case) + b"\n")
                process.stdin.flush()
                process.stdout.readline()  # the first answer is there, or the process has ended
                yield said
                said.append(process.communicate(timeout=JUDGE_SECONDS)[0])
            finally:
                process.kill()
        if process.returncode:
            last = (self._place.logs / "judge.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise ProcessFailedError(
                " ".join(last), field="judge", got=f"exit code {process.returncode}", fix="see judge.log"
            )


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
