"""Prefetches batches: one batch is leased, decoded and made into tensors while the batch before it trains.

A prefetched batch is one version older when it is trained on. So its staleness is judged again for the version that
trains on it, and the batch is rebuilt if the result differs. With `--max-staleness 0` there is no prefetch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from grpo_common.trace import stage
from grpo_trainer.batch.batching import ReadyBatch
from grpo_trainer.config.train import RolloutConfig
from grpo_trainer.errors import StoppedError, TrainingError
from grpo_trainer.metrics.types import Mean, Metric, Sum
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.rollouts.filter import GroupFilter, Judged, judge
from grpo_trainer.rollouts.groups import RolloutBatch
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.signals import running_time
from grpo_trainer.versions import NO_OFFSETS

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
LAST_EVALUATION_SECONDS = 600.0
"""Longest time that a run waits for evaluations of its last step."""
UNFIT_IN_A_ROW = 16
"""After this many batches in a row without a usable group, environments and model evidently don't fit."""


@dataclass(frozen=True)
class _Fetched:
    """A batch in main memory, with the staleness that was judged when it arrived."""

    rollouts: RolloutBatch
    judged: Judged
    ready: ReadyBatch | None  # None: all groups were too old
    fetch_seconds: float
    prepare_seconds: float


@dataclass
class _Search:
    """The search for a batch that can be trained on, over all calls of `next` that it takes."""

    started: float = field(default_factory=time.perf_counter)
    limited: float = field(default_factory=lambda: running_time())  # its start on the clock of `--rollout-timeout`
    dropped: int = 0  # groups
    refused: int = 0
    unfit: int = 0  # batches in a row


class _FeedClosedError(Exception):
    """Ends the wait for a batch when the feed is closing."""


@dataclass(eq=False, repr=False)
class BatchFeed:
    """Feeds the loop. A context manager: its exit releases a prefetched batch."""

    client: RolloutClient
    config: RolloutConfig
    groups: GroupFilter
    """Leaves out those that can't be trained on."""
    make_ready: Callable[[RolloutBatch], ReadyBatch]
    """Turns scored groups into tensors; runs in a thread during a step."""
    check_stop: Callable[[], None]
    """Called while waiting; raises to end the wait."""
    device: torch.device | None = None
    """For a GPU, tensors are placed in page-locked memory, from which copies to the GPU are asynchronous."""
    is_needed: Callable[[], bool] = lambda: False
    """Called in `next` while it waits for a batch; returns whether the wait is to be interrupted."""

    def __post_init__(self) -> None:
        self._gpu = self.device if self.device is not None and self.device.type == "cuda" else None
        # A new thread uses the first GPU, and would allocate memory there.
        select = {} if self._gpu is None else {"initializer": torch.cuda.set_device, "initargs": (self._gpu,)}
        self._thread = ThreadPoolExecutor(1, "prefetch", **select)
        self._ahead: Future[_Fetched] | None = None
        self._closing = False
        self._numbering = NO_OFFSETS
        self._search: _Search | None = None

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        ahead, self._ahead = self._ahead, None
        # The thread looks at `_closing` between requests, and each of these has a time limit.
        if ahead is not None and not ahead.cancel() and ahead.exception() is None:
            self.client.release(ahead.result().rollouts)
        self._thread.shutdown()

    def begin(self, progress: Progress) -> None:
        """Register at the rollout API as a trainer that continues from `progress`.

        First acknowledge the batches that the checkpoint contains: the process that trained on them may have ended
        before it could.
        """
        self._numbering = progress.numbering
        self.client.settle(progress.batches, resumed=True)
        self.client.register()

    def trained(self, batch: ReadyBatch) -> tuple[str, ...]:
        """Record that a batch was trained on, and return all trained batches that are not acknowledged yet."""
        return self.client.trained(batch.rollouts)

    def report(self, step: int, *, last: bool = False) -> dict[str, Metric]:
        """Report the step to the rollout API, and return the environments' new evaluations on held-out prompts.

        After the run's last step, wait for evaluations of it, or for a signal.
        """
        self.client.report(step)
        metrics: dict[str, Metric] = {}
        if last and (self.config.eval_every or self.client.has_evaluations):
            started = time.perf_counter()
            with suppress(StoppedError):
                self.client.wait_until_alone(LAST_EVALUATION_SECONDS)
            metrics["train/evaluation_time"] = Sum(time.perf_counter() - started)
        for each in self.client.evaluations():
            metrics |= {f"eval/{each.name}/{key}": Mean(value) for key, value in each.metrics.items()}
            metrics[f"eval/{each.name}/step"] = Mean(each.step)
        return metrics

    def settle(self, batches: Sequence[str], *, patient: bool = True) -> None:
        """Acknowledge those of `batches` that are not acknowledged yet; see `RolloutClient.settle`."""
        unsettled = set(self.client.unsettled)
        own = [batch_id for batch_id in batches if batch_id in unsettled]
        (self.client.settle if patient else self.client.settle_at_once)(own)

    def release(self, batch: ReadyBatch) -> None:
        self.client.release(batch.rollouts)

    def next(self, version: int, *, last: bool = False) -> ReadyBatch | None:
        """Wait for the next batch and return it; unless it is the last, start to prefetch the one after it.

        The weights that will train on it have this version. Its metrics also have its staleness, the time to fetch it,
        and the number of dropped groups. None: the wait was interrupted, and the next call goes on with it.

        Raises:
            TrainingError: no batch came within `--rollout-timeout`, or too many had no usable group.
        """
        search = self._search = self._search or _Search()
        while True:
            if (fetched := self._taken(version)) is None:
                return None
            search.refused += fetched.rollouts.refused
            judged = self._judge(fetched.rollouts, version)
            if judged.groups:
                break
            search.dropped += len(fetched.rollouts.groups)
            search.unfit = 0 if fetched.rollouts.groups else search.unfit + 1
            self.client.drop(fetched.rollouts, self._why(fetched.rollouts))
            if search.unfit == UNFIT_IN_A_ROW:
                summary = f"{search.unfit} batches in a row can't be trained on"
                raise TrainingError.of([replace(self.groups.last, summary=summary)])
            if 0 < self.config.rollout_timeout < (waited := running_time() - search.limited):
                old = "let the environments ask a server that gets this trainer's versions, or raise --max-staleness"
                raise TrainingError(
                    f"no batch could be trained on for {waited:.0f} s",
                    field="--rollout-timeout",
                    got=self._why(fetched.rollouts),
                    fix=old if fetched.rollouts.groups else "correct the environment",
                )
        self._search = None
        again = time.perf_counter()
        ready = fetched.ready
        if ready is None or judged.shares != fetched.judged.shares:
            ready = self._ready(fetched.rollouts, judged)
        waited = time.perf_counter() - search.started
        if self.config.prefetch and self.config.max_staleness != 0 and not last:
            self._ahead = self._thread.submit(self._fetch, version + 1)
        metrics = judged.metrics | {
            "train/data_fetch_time": Sum(waited),
            "rollout/fetch_time": Sum(fetched.fetch_seconds),
            "rollout/prepare_time": Sum(fetched.prepare_seconds + time.perf_counter() - again),
            "rollout/dropped_stale_groups": Sum(search.dropped + len(fetched.rollouts.groups) - len(judged.groups)),
            "rollout/refused_groups": Sum(search.refused),
        }
        return replace(ready, metrics=ready.metrics | metrics, policy_version=version)

    def _taken(self, version: int) -> _Fetched | None:
        """Return the prefetched batch, or fetch one; None: the wait was interrupted."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = self._thread.submit(self._fetch, version)
        while not wait([ahead], POLL_SECONDS).done:
            try:
                self.check_stop()
                interrupted = self.is_needed()
            except BaseException:
                self._ahead = ahead
                raise
            if interrupted:
                self._ahead = ahead
                return None
        return ahead.result()

    def _fetch(self, version: int) -> _Fetched:
        started = time.perf_counter()

        def check_wanted() -> None:
            if self._closing:
                raise _FeedClosedError
            self.check_stop()

        with stage("fetch", version=version):
            rollouts = self.groups.sift(self.client.lease(check_wanted))
        came = time.perf_counter()
        with stage("prepare", batch=rollouts.batch_id, version=version):
            judged = self._judge(rollouts, version)
            ready = self._ready(rollouts, judged) if judged.groups else None
        return _Fetched(rollouts, judged, ready, came - started, time.perf_counter() - came)

    def _why(self, unused: RolloutBatch) -> str:
        if unused.groups:
            return f"it was more than {self.config.max_staleness} versions old (--max-staleness)"
        return f"no group of it can be trained on, the last one for {self.groups.last}"

    def _judge(self, rollouts: RolloutBatch, version: int) -> Judged:
        return judge(rollouts.groups, version, self.config.max_staleness, self.config.on_stale, self._numbering)

    def _ready(self, rollouts: RolloutBatch, judged: Judged) -> ReadyBatch:
        ready = self.make_ready(replace(rollouts, groups=judged.groups))
        if self._gpu is None:
            return ready
        return replace(ready, microbatches=tuple(each.moved(Tensor.pin_memory) for each in ready.microbatches))
