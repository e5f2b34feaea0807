"""Batches ready to be trained on, one of them ahead: leased, decoded and made into tensors while the one before trains.

One batch ahead is one version older when its turn comes. So it is judged by the version that trains on it, and made
ready anew if that makes a difference; with `--max-staleness 0` nothing is fetched ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from grpo_common.trace import stage
from grpo_trainer.batch.batching import ReadyBatch
from grpo_trainer.batch.microbatches import MicroBatch
from grpo_trainer.config.train import RolloutConfig
from grpo_trainer.errors import TrainingError
from grpo_trainer.metrics.types import Mean, Metric, Sum
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.rollouts.fit import Sieve
from grpo_trainer.rollouts.staleness import Judged, judge, same_judgement
from grpo_trainer.rollouts.types import Leased, RolloutBatch
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.versions import NO_JUMPS

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
UNFIT_IN_A_ROW = 16
"""So many batches without one group that can be trained on mean that environments and model don't go together."""


@dataclass(frozen=True)
class FedBatch:
    """A batch to train on now.

    Attributes:
        leased: what is acknowledged, or given back.
        metrics: what it took to come, how old it is, what was left out of it.
    """

    leased: Leased
    ready: ReadyBatch
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class _Fetched:
    """A batch in main memory, as it was judged when it came."""

    leased: Leased
    judged: Judged
    ready: ReadyBatch | None  # None: nothing of it was young enough
    fetch_seconds: float
    prepare_seconds: float


class _FeedClosedError(Exception):
    """Ends the wait for a batch that nobody wants any more."""


class BatchFeed:
    """Feeds the loop. A context manager: leaving it gives back what was fetched ahead.

    Args:
        make_ready: scored groups to tensors; runs in a thread beside a step.
        check_stop: called while waiting; raises to end the wait.
        device: for a GPU, tensors go into page-locked memory, from where copies to it need not be waited for.
        vocabulary: ids of tokens are below it; groups with others are left out. None: not known.
        longest: tokens of a sequence that are trained on; None: all.
    """

    def __init__(
        self,
        client: RolloutClient,
        config: RolloutConfig,
        make_ready: Callable[[RolloutBatch], ReadyBatch],
        check_stop: Callable[[], None],
        device: torch.device | None = None,
        vocabulary: int | None = None,
        longest: int | None = None,
    ) -> None:
        self._client = client
        self._sieve = Sieve(vocabulary, lambda environment: client.environment_name(environment), longest)
        self._config = config
        self._make_ready = make_ready
        self._check_stop = check_stop
        self._device = device if device is not None and device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "prefetch", initializer=self._begin_thread)
        self._ahead: Future[_Fetched] | None = None
        self._closing = False
        self._numbering = NO_JUMPS

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.cancel() and ahead.exception() is None:
            self._client.release(ahead.result().leased)
        self._thread.shutdown()

    def begin(self, progress: Progress) -> None:
        """Register at the rollout API, as one who goes on from there.

        What a former process trained on is acknowledged first: a checkpoint holds it, but nobody may have said so.
        """
        self._numbering = progress.numbering
        self._client.settle(progress.batches, resumed=True)
        self._client.register()

    def trained(self, batch: FedBatch) -> tuple[str, ...]:
        """Note that a batch was trained on; all those that were and are not acknowledged yet."""
        return self._client.trained(batch.leased)

    def report(self, step: int) -> dict[str, Metric]:
        """Tell the rollout API what step that led to; what environments have measured on held-out prompts meanwhile."""
        self._client.report(step)
        metrics: dict[str, Metric] = {}
        for each in self._client.evaluations():
            metrics |= {f"eval/{each.name}/{key}": Mean(value) for key, value in each.metrics.items()}
            metrics[f"eval/{each.name}/step"] = Mean(each.step)
        return metrics

    def settle(self, batches: Sequence[str], *, patient: bool = True) -> None:
        """Acknowledge those of these that are not yet; see `RolloutClient.settle`."""
        unsettled = set(self._client.unsettled)
        own = [batch_id for batch_id in batches if batch_id in unsettled]
        (self._client.settle if patient else self._client.settle_at_once)(own)

    def release(self, batch: FedBatch) -> None:
        """Give a batch back untrained."""
        self._client.release(batch.leased)

    def next(self, version: int, *, last: bool = False) -> FedBatch:
        """The next batch; waits for one. Unless it is the last, the one after it is fetched from now on.

        Args:
            version: of the weights that are about to be trained.

        Raises:
            TrainingError: none came within `--rollout-timeout`, or too many had nothing that can be trained on.
        """
        started = time.perf_counter()
        dropped = refused = unfit = 0
        while True:
            fetched = self._taken(version)
            refused += fetched.leased.refused
            judged = self._judge(fetched.leased, version)
            if judged.groups:
                break
            dropped += len(fetched.leased.groups)
            unfit = 0 if fetched.leased.groups else unfit + 1
            self._client.drop(fetched.leased, self._why(fetched.leased))
            if unfit == UNFIT_IN_A_ROW:
                summary = f"{unfit} batches in a row can't be trained on"
                raise TrainingError.of([replace(self._sieve.last, summary=summary)])
        again = time.perf_counter()
        ready = fetched.ready
        if ready is None or not same_judgement(judged.groups, fetched.judged.groups):
            ready = self._ready(fetched.leased, judged, version)
        waited = time.perf_counter() - started
        if self._config.prefetch and self._config.max_staleness != 0 and not last:
            self._ahead = self._thread.submit(self._fetch, version + 1)
        metrics = judged.metrics | {
            "train/data_fetch_time": Sum(waited),
            "rollout/fetch_time": Sum(fetched.fetch_seconds),
            "rollout/prepare_time": Sum(fetched.prepare_seconds + time.perf_counter() - again),
            "rollout/dropped_stale_groups": Sum(dropped + len(fetched.leased.groups) - len(judged.groups)),
            "rollout/refused_groups": Sum(refused),
        }
        return FedBatch(fetched.leased, replace(ready, policy_version=version), metrics)

    def _taken(self, version: int) -> _Fetched:
        """What was fetched ahead, or what comes next."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._fetch(version)
        while not wait([ahead], POLL_SECONDS).done:
            try:
                self._check_stop()
            except BaseException:
                self._ahead = ahead
                raise
        return ahead.result()

    def _fetch(self, version: int) -> _Fetched:
        started = time.perf_counter()
        with stage("fetch", version=version):
            leased = self._sieve.sift(self._client.lease(self._check_wanted))
        came = time.perf_counter()
        with stage("prepare", batch=leased.batch_id, version=version):
            judged = self._judge(leased, version)
            ready = self._ready(leased, judged, version) if judged.groups else None
        return _Fetched(leased, judged, ready, came - started, time.perf_counter() - came)

    def _why(self, unused: Leased) -> str:
        if unused.groups:
            return f"it was more than {self._config.max_staleness} versions old (--max-staleness)"
        return f"no group of it can be trained on, the last one for {self._sieve.last}"

    def _begin_thread(self) -> None:
        """A thread begins with the first GPU, and would take memory there that it has no use for."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _check_wanted(self) -> None:
        if self._closing:
            raise _FeedClosedError
        self._check_stop()

    def _judge(self, leased: Leased, version: int) -> Judged:
        return judge(leased.groups, version, self._config.max_staleness, self._config.on_stale, self._numbering)

    def _ready(self, leased: Leased, judged: Judged, version: int) -> ReadyBatch:
        ready = self._make_ready(RolloutBatch(leased.batch_id, judged.groups, {}, version))
        if self._device is None:
            return ready
        return replace(ready, microbatches=tuple(_pinned(microbatch) for microbatch in ready.microbatches))


def _pinned(microbatch: MicroBatch) -> MicroBatch:
    """Its tensors in page-locked memory."""
    return microbatch.moved(Tensor.pin_memory)
