"""The stress test from beginning to end."""

from __future__ import annotations

import logging
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from grpo_trainer.bench.fence.asking import Answer, Case
from grpo_trainer.bench.fence.options import FenceOptions
from grpo_trainer.bench.fence.patterns import References, Verdicts, quantiles, two_patterns
from grpo_trainer.bench.figures import Meter, median_ms, p95_ms
from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.bench.sync.bridges import AllWeightsSubject, opened
from grpo_trainer.bench.sync.generator import Demand
from grpo_trainer.bench.sync.load import generating
from grpo_trainer.bench.sync.subject import Place, placed
from grpo_trainer.errors import BridgeError, ProcessFailedError

log = logging.getLogger(__name__)

PROMPTS = 16
PROMPT_TOKENS = 24
LEAST_REFERENCES = 4
"""Answers of a pattern to each prompt."""
SETTLE_SECONDS = 2.0
PROGRESS_EVERY = 1000
ASKING_SECONDS = 120.0
"""Time limit for the last answers."""


def measure(options: FenceOptions, server_args: tuple[str, ...]) -> dict[str, Any]:
    """Start a server, attach to its weights, write them repeatedly under load, judge the answers; return the figures.

    Raises:
        BridgeError: the patterns can't be distinguished.
        GrpoError: the server did not start, or ended; a request was refused; …
    """
    with (
        placed(options.model, options.log_dir, server_args) as place,
        opened(options.sync(), place, in_flight=options.in_flight) as subject,
    ):
        assert isinstance(subject, AllWeightsSubject)
        return Stress(options, place, subject).run()


class Stress:
    """One server under load and writes."""

    def __init__(self, options: FenceOptions, place: Place, subject: AllWeightsSubject) -> None:
        self._options = options
        self._place = place
        self._subject = subject
        self._meter = Meter(subject.url)
        self._vocab = SHAPES[options.model.shape].vocab
        draw = random.Random(0)
        self._prompts = [draw.choices(range(2, self._vocab), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
        self._patterns = two_patterns(subject.parameters)

    def run(self) -> dict[str, Any]:
        options, url = self._options, self._subject.url
        demand = Demand(url, options.concurrency, PROMPT_TOKENS, options.completion_len, self._vocab, {})
        writes: list[float] = []
        stalls: list[float] = []
        with generating(demand, self._place.logs / "load.log", self._meter):
            time.sleep(SETTLE_SECONDS)
            references = self._references()
            # The second pattern has just been written, as `version`.
            even = (1 + self._subject.version) % 2 if options.fenced else None
            before = self._quiet()
            with self._asked(Case(url, options.judges, self._prompts)) as answers:
                written, seconds = self._meter.during(lambda: self._write_all(writes, stalls))
            after = self._quiet()
        self._subject.check()
        verdicts = self._judge(references, answers, even)
        quiet, writing = (before + after) / 2, written / seconds
        return {
            "bridge": options.bridge,
            "shape": options.model.shape,
            "device": torch.cuda.get_device_name() if self._place.on_gpu else "CPU",
            "vllm": self._subject.info.vllm_version,
            "in_flight": options.in_flight,
            "fenced": options.fenced,
            "writes": len(writes),
            "concurrency": options.concurrency,
            **verdicts.figures(),
            **{f"reference_{name}": value for name, value in quantiles(references.own).items()},
            "spread": references.spread,
            "allowed": references.allowed,
            "seconds": round(seconds, 1),
            "write_p50_ms": median_ms(writes),
            "write_p95_ms": p95_ms(writes),
            "stall_p50_ms": median_ms(stalls),
            "stall_p95_ms": p95_ms(stalls),
            "writes_per_s": round(len(writes) / seconds, 1),
            "quiet_tokens_per_s": round(quiet, 1),
            "writing_tokens_per_s": round(writing, 1),
            "writing_over_quiet": round(writing / quiet, 4),
        }

    def _references(self) -> References:
        """Collect answers of each pattern under the same load as the judged ones, including writes.

        The load must be the same because rounding depends on the batch. Each write repeats the present pattern, always
        within a fence, so these answers are correct references.

        Raises:
            BridgeError: the patterns can't be distinguished.
        """
        first, second = (self._answers_of(pattern) for pattern in self._patterns)
        references = References.of(first, second)
        log.info(
            "%d answers of one pattern are %s nats from others of it, the patterns' at least %.3g from each other; "
            "allowed: %.3g",
            len(references.own),
            ", ".join(f"{name} {value:.3g}" for name, value in quantiles(references.own).items()),
            *(references.spread, references.allowed),
        )
        if not references.distinct:
            raise BridgeError(
                "the answers of the two patterns can't be distinguished",
                field="--shape",
                got=f"{references.spread:.3g} nats from pattern to pattern",
                wanted=f"more than the {references.noise:.3g} nats between answers of one",
                fix="choose another --shape",
            )
        return references

    def _answers_of(self, pattern: Sequence[Tensor]) -> list[Answer]:
        self._write(pattern, fenced=True)
        with self._asked(Case(self._subject.url, self._options.judges, self._prompts, LEAST_REFERENCES)) as answers:
            until = time.perf_counter() + self._options.reference_seconds
            while time.perf_counter() < until:
                self._write(pattern, fenced=True)
        return answers

    def _judge(self, references: References, answers: Sequence[Answer], even: int | None) -> Verdicts:
        verdicts = Verdicts()
        for answer in answers:
            verdicts.judge(references, answer, even)
        for torn in verdicts.examples:
            log.warning(
                "torn: prompt %d of patterns %s is %.4g and %.4g nats from them, allowed %.4g; its logprobs: %s",
                *(torn.answer.prompt, torn.patterns, *torn.distances, references.allowed),
                " ".join(f"{logprob:.3f}" for logprob in torn.answer.logprobs),
            )
        return verdicts

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

    def _quiet(self) -> float:
        """Return the tokens per second that the server generates without writes."""
        tokens, seconds = self._meter.during(lambda: time.sleep(self._options.quiet_seconds))
        return tokens / seconds

    @contextmanager
    def _asked(self, case: Case) -> Iterator[list[Answer]]:
        """Run the asking process during the block, from its first answer on; its answers are available after it."""
        argv = [sys.executable, "-m", "grpo_trainer.bench.fence.asking"]
        answers: list[Answer] = []
        path, log_path = self._place.folder / "answers.jsonl", self._place.logs / "asking.log"
        with (
            path.open("wb") as out,
            log_path.open("ab") as log_file,
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=log_file) as process,
        ):
            try:
                assert process.stdin is not None
                process.stdin.write(msgspec.json.encode(case) + b"\n")
                process.stdin.flush()
                while not path.stat().st_size and process.poll() is None:
                    time.sleep(0.01)
                yield answers
                process.communicate(timeout=ASKING_SECONDS)
            finally:
                process.kill()
        if process.returncode:
            last = log_path.read_text(errors="replace").strip().splitlines()[-1:]
            got, fix = f"exit code {process.returncode}", f"see {log_path.name}"
            raise ProcessFailedError(" ".join(last), field="the process that asks", got=got, fix=fix)
        decoder = msgspec.json.Decoder(Answer)
        answers += [decoder.decode(line) for line in path.read_bytes().splitlines()]


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
