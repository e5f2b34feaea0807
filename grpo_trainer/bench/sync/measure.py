"""The whole measurement."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass

import torch

from grpo_trainer.bench.devices import cpu_name
from grpo_trainer.bench.sync.common import gpu_used_gb, placed
from grpo_trainer.bench.sync.figures import Baseline, LoadFigures, Publish, PublishFigures, publish_figures
from grpo_trainer.bench.sync.load import LoadTest
from grpo_trainer.bench.sync.memory import MemoryFigures, Snapshot, gpus_in_use, memory_figures, snapshot
from grpo_trainer.bench.sync.open import OPENERS
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.shapes import SHAPES
from grpo_trainer.bench.sync.step import StepFigures, measure_step
from grpo_trainer.bench.sync.subject import Facts, Place, Subject
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)

EARLY_PUBLISH = 10
PROGRESS_EVERY = 100


@dataclass(frozen=True)
class Report:
    """The measurements."""

    options: SyncOptions
    info: BridgeInfo
    device: str
    torch_version: str
    python_version: str
    facts: Facts
    publish: PublishFigures
    load: LoadFigures | None
    memory: MemoryFigures
    baseline: Baseline | None
    step: StepFigures | None


def measure(options: SyncOptions, server_args: tuple[str, ...]) -> Report:
    """Start a server, publish to it, load it, and end it.

    Raises:
        GrpoError: the server did not start, the bridge failed its proof, …
    """
    with (
        placed(options.model, options.log_dir, server_args) as place,
        OPENERS[options.choice.bridge](options, place) as subject,
    ):
        return _measure(options, place, subject)


def _measure(options: SyncOptions, place: Place, subject: Subject) -> Report:
    gpus = gpus_in_use(options.server.server_gpus)
    publishes, early, late = _publish(options, subject, gpus)
    quiet = publish_figures(publishes)
    log.info("publish: median %.1f ms, 95th percentile %.1f ms", quiet.publish_p50_ms, quiet.publish_p95_ms)
    load = None if options.load.skip_load or not subject.serves_on else _load(options, place, subject)
    end = snapshot(subject, late.publishes, gpus)
    memory = memory_figures(early, late, end)
    step = _step(options, subject) if options.step.step_seqs else None
    baseline = subject.baseline(options.baseline_repeat) if options.baseline_repeat else None
    return Report(
        options=options,
        info=subject.info,
        device=torch.cuda.get_device_name() if place.on_gpu else cpu_name(),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        facts=subject.facts(),
        publish=quiet,
        load=load,
        memory=memory,
        baseline=baseline,
        step=step,
    )


def _publish(options: SyncOptions, subject: Subject, gpus: str | None) -> tuple[list[Publish], Snapshot, Snapshot]:
    """Run the warm-up publishes, then the measured ones, and return the latter."""
    subject.warm_up()
    log.info("warmed up: %s", subject.facts())
    publishes: list[Publish] = []
    early: Snapshot | None = None
    for number in range(1, options.repeat + 1):
        publishes.append(subject.publish())
        if number == min(EARLY_PUBLISH, options.repeat):
            early = snapshot(subject, number, gpus)
        if number % PROGRESS_EVERY == 0:
            log.info("%d of %d publishes", number, options.repeat)
    assert early is not None
    return publishes, early, snapshot(subject, options.repeat, gpus)


def _load(options: SyncOptions, place: Place, subject: Subject) -> LoadFigures:
    vocab = SHAPES[options.model.shape].vocab
    sequences = options.concurrency(on_gpu=place.on_gpu)
    return LoadTest(subject, place, options.load, subject.url, sequences, vocab).run()


def _step(options: SyncOptions, subject: Subject) -> StepFigures:
    vocab = SHAPES[options.model.shape].vocab
    return measure_step(subject.training(), options.step, vocab, lambda: gpu_used_gb(options))
