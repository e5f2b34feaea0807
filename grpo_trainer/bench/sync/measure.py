"""The whole measurement, and the line that it prints."""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from grpo_common.ports import listener
from grpo_trainer.bench.devices import cpu_name
from grpo_trainer.bench.figures import median_ms, p95_ms
from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.bench.step.options import BatchChoice
from grpo_trainer.bench.step.work import synthetic_batch
from grpo_trainer.bench.sync.bridges import opened
from grpo_trainer.bench.sync.load import load_figures
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.subject import Place, Publish, Subject, gpu_used_mb, placed
from grpo_trainer.metrics.types import reduce
from grpo_trainer.trainer import Trainer

log = logging.getLogger(__name__)

EARLY_PUBLISH = 10
PROGRESS_EVERY = 100
TRAINED_STEPS = 2
"""Of which the first creates the optimizer's states."""


def measure(options: SyncOptions, server_args: tuple[str, ...]) -> dict[str, Any]:
    """Start a server, publish to it, load it, and end it; return the figures.

    Raises:
        GrpoError: the server did not start, the bridge failed its proof, …
    """
    with (
        placed(options.model, options.log_dir, server_args) as place,
        opened(options, place) as subject,
    ):
        return _measure(options, place, subject)


def _measure(options: SyncOptions, place: Place, subject: Subject[Any]) -> dict[str, Any]:
    choice, info = options.choice, subject.info
    vocab = SHAPES[options.model.shape].vocab
    publishes, early, late = _publish(options, subject)
    quiet = publish_figures(publishes)
    log.info("publish: median %.1f ms, 95th percentile %.1f ms", quiet["publish_p50_ms"], quiet["publish_p95_ms"])
    facts = subject.facts(publishes)
    load = step = None
    if subject.serves_on and not options.load.skip_load:
        load = load_figures(subject, place.logs, options.load, options.concurrency(on_gpu=place.on_gpu), vocab)
    memory = memory_figures(early, late, Snapshot.of(subject, late.publishes, gpu_used_mb(options)))
    if options.step.step_seqs:
        step = step_figures(subject, options)
    baseline = subject.baseline(options.baseline_repeat) if options.baseline_repeat else None
    return {
        "bridge": choice.bridge,
        "shape": options.model.shape,
        "share_base": choice.share_base,
        "lora_r": choice.lora_r if choice.bridge == "lora_only" else None,
        "repeat": options.repeat,
        "dtype": info.dtype.removeprefix("torch."),
        "device": torch.cuda.get_device_name() if place.on_gpu else cpu_name(),
        "server_device": info.device,
        "server_workers": len(info.workers),
        "versions": {"vllm": info.vllm_version, "torch": torch.__version__, "python": platform.python_version()},
        "max_loras": info.max_loras,
        "keep_versions": info.keep_versions,
        "gpu_total_gb": memory["gpu_total_gb"],
        **facts,
        **quiet,
        **(baseline or {"baseline_ms": None, "baseline_save_ms": None, "baseline_repeat": 0}),
        "load": load,
        "memory": memory,
        "step": step,
    }


@dataclass(frozen=True)
class Snapshot:
    """Resources at one moment. Sizes in units of 1e6 bytes; the server's are those of all its processes."""

    publishes: int
    server_rss_mb: float
    server_open_files: int
    trainer_rss_mb: float
    gpu_mb: float | None
    adapters: int
    files: int

    @classmethod
    def of(cls, subject: Subject[Any], publishes: int, gpu_mb: float | None) -> Snapshot:
        server = listener(subject.config.vllm.port)
        assert server is not None
        rss = open_files = 0
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended since it was listed
                rss += process.memory_info().rss
                open_files += process.num_fds()
        return cls(
            publishes=publishes,
            server_rss_mb=round(rss / 1e6, 1),
            server_open_files=open_files,
            trainer_rss_mb=round(psutil.Process().memory_info().rss / 1e6, 1),
            gpu_mb=gpu_mb,
            adapters=len(subject.client.lora_status().versions),
            files=sum(1 for path in subject.written.rglob("*") if path.is_file()),
        )


def _publish(options: SyncOptions, subject: Subject[Any]) -> tuple[list[Publish], Snapshot, Snapshot]:
    """Run the warm-up publishes, then the measured ones; return these, and snapshots after the 10th and the last."""
    subject.warm_up()
    log.info("warmed up")
    publishes: list[Publish] = []
    early: Snapshot | None = None
    for number in range(1, options.repeat + 1):
        publishes.append(subject.publish())
        if number == min(EARLY_PUBLISH, options.repeat):
            early = Snapshot.of(subject, number, gpu_used_mb(options))
        if number % PROGRESS_EVERY == 0:
            log.info("%d of %d publishes", number, options.repeat)
    assert early is not None
    return publishes, early, Snapshot.of(subject, options.repeat, gpu_used_mb(options))


def publish_figures(publishes: Sequence[Publish]) -> dict[str, Any]:
    """Return medians and 95th percentiles of publishes on an idle server; each publish's phases add up to it."""
    stalls = [publish.stall_seconds for publish in publishes]
    total = [publish.seconds for publish in publishes]
    return {
        "publish_p50_ms": median_ms(total),
        "publish_p95_ms": p95_ms(total),
        "stall_ms": median_ms(stalls),
        "stall_p95_ms": p95_ms(stalls),
        "phases": {
            "pack_ms": median_ms([publish.pack_seconds for publish in publishes]),
            "request_ms": median_ms([publish.request_seconds for publish in publishes]),
            "engine_ms": median_ms([publish.engine_seconds for publish in publishes]),
        },
    }


def memory_figures(early: Snapshot, late: Snapshot, end: Snapshot) -> dict[str, Any]:
    """Return what is used at the end, and as `flat_…` what was used early and late, which shows leaks.

    Args:
        early, late: after the 10th and after the last publish without load.
        end: after the load as well.
    """
    pairs = {name: (value, getattr(late, name)) for name, value in asdict(early).items()}
    flat = {f"flat_{name}": None if None in pair else pair for name, pair in pairs.items()}
    peak = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None
    return {
        "gpu_total_gb": _gb(end.gpu_mb),
        "trainer_peak_gb": _gb(peak),
        "server_rss_mb": end.server_rss_mb,
        **flat,
        "server_rss_growth_mb": round(late.server_rss_mb - early.server_rss_mb, 1),
        "gpu_growth_mb": None if early.gpu_mb is None or late.gpu_mb is None else round(late.gpu_mb - early.gpu_mb, 1),
        "files_at_end": end.files,
    }


def step_figures(subject: Subject[Any], options: SyncOptions) -> dict[str, Any]:
    """Train on synthetic rollouts, twice. Sizes are in units of 1e9 bytes, None without a GPU.

    * `seconds`: of the last step;
    * `weights_gb`: allocated by the trainer before the first step;
    * `peak_gb`: the most that the trainer had allocated at one time: weights, gradients, states, activations;
    * `server_gb`: taken by the server alone; `together_gb`: used on the GPU after the steps, by whomever;
    * `together_over_parts`: above 1 by what CUDA and torch keep for themselves.
    """
    choice, vocab = options.step, SHAPES[options.model.shape].vocab
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 1e6 if on_gpu else None
    trainer = Trainer(subject.model, subject.config)
    batch = BatchChoice(
        seqs=choice.step_seqs, prompt_len=choice.step_prompt_len, completion_len=choice.step_completion_len
    )
    seconds, loss = 0.0, 0.0
    for number in range(TRAINED_STEPS):
        ready = trainer.ready(synthetic_batch(batch, vocab, number))
        started = time.perf_counter()
        result = trainer.step(ready, number, subject.bridge.updating)
        if on_gpu:
            torch.cuda.synchronize()
        seconds, loss = time.perf_counter() - started, reduce(result.metrics)["train/loss"]
        subject.trained()
        log.info("training step %d: %.2f s", number, seconds)
    peak = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None
    server, together = subject.server_mb, gpu_used_mb(options)
    parts = None if peak is None or server is None else server + peak
    return {
        "sequences": choice.step_seqs,
        "optimizer": choice.step_optimizer,
        "seconds": round(seconds, 3),
        "loss": loss,
        "weights_gb": _gb(before),
        "peak_gb": _gb(peak),
        "server_gb": _gb(server),
        "together_gb": _gb(together),
        "together_over_parts": None if parts is None or together is None else round(together / parts, 4),
    }


def _gb(megabytes: float | None) -> float | None:
    return None if megabytes is None else round(megabytes / 1e3, 3)
