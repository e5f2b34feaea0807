"""One optimisation step: microbatches, backward, clip, update. It knows neither the rollout API nor the server."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_common.trace import since, stage
from grpo_trainer.alignment.drift import (
    UNKNOWN,
    DriftAlarm,
    Recheck,
    gap_metrics,
    recheck_version,
    row_gaps,
    sample_gaps,
)
from grpo_trainer.batch.batching import ReadyBatch, ready
from grpo_trainer.batch.microbatches import MicroBatch, idle_microbatch
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.forward import check_teacher
from grpo_trainer.engine.head import TokenScores
from grpo_trainer.errors import TrainingError, WeightsError, warn_once
from grpo_trainer.losses import BatchCounts, LossInputs, batch_loss
from grpo_trainer.metrics.types import Mean, Metric, Metrics, Sum, merge
from grpo_trainer.model.reference import Reference, build_reference
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.optim.steps import NormHistory, changed_fraction, first_not_finite, learning_rate, not_finite, sampled
from grpo_trainer.parallel.strategies import ShardedStates, hold
from grpo_trainer.parallel.world import World
from grpo_trainer.rollouts.groups import RolloutBatch
from vllm_server.protocol.routed_experts import RoutedShape

log = logging.getLogger(__name__)

T = TypeVar("T")

Logprobs = dict[int, NDArray[np.float32]]
"""By the number of a sample in the batch."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    updated: bool
    """False if the step was skipped, which leaves the weights unchanged."""
    metrics: dict[str, Metric]
    logprobs: Logprobs = field(default_factory=dict)
    """The trainer's, of trained tokens before the update, for those of the batch's samples in `shown` that it trained
    on."""


@dataclass(eq=False)
class Pass:
    """A microbatch, and the results of its first forward pass that later updates on the same batch need."""

    microbatch: MicroBatch
    old_logprobs_N: Tensor | None = None
    """The trainer's before the first update; None: before the first forward pass."""
    ref_logprobs_N: Tensor | None = None
    """The reference's; None: not computed yet, or there is no reference."""


def shown_logprobs(passes: Sequence[Pass], shown: Sequence[int]) -> Logprobs:
    """Return the logprobs that the first forward pass of each microbatch gave to the trained tokens of some samples."""
    found: Logprobs = {}
    for one in passes if shown else ():
        numbers = one.microbatch.numbers_B.tolist()
        if one.old_logprobs_N is None or not (here := set(shown) & set(numbers)):
            continue
        logprobs_N, rows_N = one.old_logprobs_N.float().cpu().numpy(), one.microbatch.rows_N.cpu().numpy()
        found |= {number: logprobs_N[rows_N == numbers.index(number)] for number in here}
    return found


def loss_scale(largest_weight: float) -> float:
    """Return a power of two that scales the largest token weight to about 1 for the backward pass.

    A token's weight is about one over the number of tokens in the batch. In 16 bits, gradients that small would lose
    bits or vanish. A power of two causes no rounding.
    """
    return 2.0 ** -math.floor(math.log2(largest_weight))


class Trainer:
    """Owns the model's trained parameters and their optimizer.

    Args:
        model: returns an object with `logits` for token ids.
        check_stop: called between microbatches; raises to abandon the step and leave the weights unchanged. It is not
            called if there are other processes, which would then wait for this one.
        world: the processes that train together; each has its own `Trainer`.
        before_measuring: called before the free memory of a GPU is read; returns when the other processes on the GPU
            have allocated their memory.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        check_stop: Callable[[], None] = lambda: None,
        reference: Reference | None = None,
        world: World | None = None,
        before_measuring: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.config = config
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self.parameters:
            # FSDP2 sums in fp32 anyway. In float16, small gradients would vanish when they are divided by the scale.
            wide = config.grad_dtype == "float32" or parameter.dtype == torch.float16
            if wide and not isinstance(model, FSDPModule):
                parameter.grad_dtype = torch.float32
        self.device = self.parameters[0].device
        self._world = world or World()
        self._check_stop = check_stop if self._world.alone else lambda: None
        self._reference = build_reference(model, config) if reference is None else reference
        self.holding = hold(self._world, model, config, self.parameters, before_measuring)
        self.parameters, self.forward = self.holding.parameters, self.holding.forward
        self.optimizer = AdamW(
            self.parameters,
            config,
            master_weights=config.master_weights,
            in_two_parts=self.holding.in_two_parts,
        )
        if self.forward.plan.is_compiled:
            self.optimizer.compile()
        self.alarm: DriftAlarm | None = None  # checks each step's samples before the weights change
        self.norms = NormHistory(config.grad_spike_factor)
        self._bad_steps = 0
        self._said_unused = False

    @property
    def shards(self) -> ShardedStates | None:
        """This process's shards; None: neither weights nor optimizer states are sharded."""
        return self.holding if isinstance(self.holding, ShardedStates) else None

    @cached_property
    def vocabulary(self) -> int | None:
        """Upper bound of the model's token ids; None: unknown before the first logits."""
        head, config = self.forward.head, getattr(self.model, "config", None)
        if head is not None:
            return head.out_features
        return None if config is None else config.get_text_config().vocab_size

    @property
    def routed(self) -> RoutedShape | None:
        """What the routed experts of samples must be of; None: they are not replayed."""
        routing = self.forward.routing
        return None if routing is None else routing.shape

    def ready(self, batch: RolloutBatch) -> ReadyBatch:
        """Make a batch ready for `step`. This uses no device, and may run in a thread during a step."""
        form = {"packed": self.forward.packed, "shared": self.forward.shared}
        processes, same_batch = self._world.size, self.holding.same_batch
        return ready(batch, self.config, processes=processes, same_batch=same_batch, **form)

    def share(self, batch: RolloutBatch) -> ReadyBatch:
        """Make this process's share of a batch that all processes have."""
        return self.ready(batch).shares()[self._world.rank]

    def step(
        self,
        batch: ReadyBatch | RolloutBatch,
        step: int,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> StepResult:
        """Train on a batch with `--updates-per-batch` updates. All processes call it together.

        Args:
            batch: this process's share. Of a `RolloutBatch`, which all processes have whole, it is made here.
            step: from 0; sets the learning rate.
            writing: returns the context for each write of the weights; a skipped update does not enter it.

        Raises:
            TrainingError: loss or gradient was not finite or exploded for `--max-bad-steps` steps in a row, or the new
                weights are not finite.
            DriftError: the samples are not of the trainer's policy, and `--on-drift` is stop; the weights don't change.
        """
        started = time.perf_counter()
        batch = batch if isinstance(batch, ReadyBatch) else self.share(batch)
        if batch.counts.teacher_tokens:
            self._world.lead(lambda: self._check_teachers(batch))
        if batch.counts.teacher_tokens and not self.config.distill_coef and not self._said_unused:
            self._said_unused = True
            warn_once(log, "samples come with a teacher's logprobs, which are not used: --distill-coef is 0")
        lr = learning_rate(self.config, step, self.config.training_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        passes = [Pass(microbatch) for microbatch in batch.microbatches]
        logprobs: Logprobs = {}
        look = partial(self._look, step, batch, passes, logprobs)
        updates: list[StepResult] = []
        for _ in range(self.config.updates_per_batch if batch.largest_weight else 0):
            untouched = not any(update.updated for update in updates)
            looking = look if not updates else None
            updates.append(self._learn(step, passes, batch, looking, writing, untouched))
            if not updates[-1].updated:  # the same weights would have the same gradient again
                break
        metrics = merge([batch.metrics, *(update.metrics for update in updates)])
        if not updates:  # all rewards of each group are equal, so no token has a gradient
            metrics |= {"train/loss": Sum(0.0), "train/skipped": Sum(1)}
        metrics |= {"train/lr": Mean(lr), "train/step_time": Sum(time.perf_counter() - started)}
        return StepResult(any(update.updated for update in updates), metrics, logprobs)

    def _learn(
        self,
        step: int,
        passes: Sequence[Pass],
        batch: ReadyBatch,
        look: Callable[[Metrics, Sequence[Tensor]], Metrics] | None,
        writing: Callable[[], AbstractContextManager[None]],
        untouched: bool,
    ) -> StepResult:
        """Make one update over the whole batch, with gradient accumulation over the microbatches.

        `look` checks the samples for drift before the weights change. The step may still be abandoned while they are
        `untouched` by an earlier update of it.
        """
        started = time.monotonic()
        self.optimizer.zero_grad(set_to_none=True)
        scale = loss_scale(batch.largest_weight)
        parts: list[Metrics] = []
        rows: list[Tensor] = []
        idle = self.holding.passes(len(passes)) - len(passes)  # sharded: each pass needs all processes
        with self.forward.learning(), self.holding.in_step():
            for one in passes:
                if untouched:
                    self._check_stop()
                parts.append(self._accumulate(one, batch.counts, scale, rows))
            for _ in range(idle):
                microbatch = idle_microbatch(self.forward.packed, self.forward.shared)
                self._accumulate(Pass(microbatch), batch.counts, 0.0, [])
        self.holding.finish_gradients()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_div_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
        # Sums over microbatches become means: the losses of several updates must not be added up.
        found: Metrics = merge(parts)
        if not self._world.alone:  # those of all processes, sent as plain numbers
            found = merge(self._of_ranks({key: metric.numbers() for key, metric in found.items()}))
        sums = found.items()
        metrics: dict[str, Metric] = {key: Mean(each.total) if isinstance(each, Sum) else each for key, each in sums}
        if look is not None:
            metrics |= look(metrics, rows)
        backward_seconds = time.monotonic() - started
        since("forward_backward", started, passes=len(passes))
        with stage("optimizer"):
            updated = self.optimizer_step(step, metrics, writing)
        metrics |= {
            "train/skipped": Sum(int(not updated)),
            "train/forward_backward_time": Sum(backward_seconds),
            "train/optimizer_time": Sum(time.monotonic() - started - backward_seconds),
        }
        return StepResult(updated, metrics)

    def _look(
        self,
        step: int,
        batch: ReadyBatch,
        passes: Sequence[Pass],
        logprobs: Logprobs,
        metrics: Metrics,
        rows: Sequence[Tensor],
    ) -> Metrics:
        """Check the gap between the trainer's and the samples' logprobs on all ranks, and return its metrics.

        `logprobs` gets those of the samples in `shown`, from all ranks; `metrics` are of all ranks' passes.
        """
        found = self._of_ranks((sample_gaps(rows), shown_logprobs(passes, batch.shown)))
        gaps, version = [gap for of_rank, _ in found for gap in of_rank], batch.policy_version
        for _, of_rank in found:
            logprobs |= of_rank

        def recheck(of_version: int) -> Recheck:
            # A process that holds only a shard can't compute a forward pass alone.
            return recheck_version(self.forward, batch.sequences, of_version) if self.holding.whole else UNKNOWN

        def check() -> None:
            if self.alarm is None:
                return
            if self.forward.routing is not None:
                self.alarm.check_routing(step, metrics, self.forward.routing.shape)
            self.alarm.check_samples(step, gaps, version, recheck)

        self._world.lead(check)
        return gap_metrics(gaps, version)

    def _of_ranks(self, own: T) -> list[T]:
        """Return what the ranks found in their shares of the batch, or what rank 0 found if all have the same batch."""
        found = self._world.gather(own)
        return found[:1] if self.holding.same_batch else found

    def _accumulate(self, one: Pass, counts: BatchCounts, scale: float, rows: list[Tensor]) -> Metrics:
        """Run forward and backward of one microbatch, and accumulate gradients times `scale` in the parameters.

        The gap of each sequence is appended to `rows`. A scale of 0 gives gradients of 0.
        """
        microbatch = one.microbatch.to(self.device)
        if self._reference is not None and one.ref_logprobs_N is None:
            with torch.no_grad(), self._reference():
                one.ref_logprobs_N = self._scores(microbatch).logprobs_N
        scores = self._scores(microbatch)
        inputs = LossInputs(microbatch, scores, counts, one.old_logprobs_N, one.ref_logprobs_N)
        output = batch_loss(inputs, self.config)
        (output.loss * (scale * self.holding.loss_factor)).backward()
        if one.old_logprobs_N is None:
            one.old_logprobs_N = scores.logprobs_N.detach()
        rows.append(row_gaps(microbatch, scores.logprobs_N))
        routed = {} if self.forward.routing is None else self.forward.routing.metrics()
        return {**output.metrics, **routed, "train/loss": Sum(output.loss.detach())}

    def _scores(self, microbatch: MicroBatch) -> TokenScores:
        return self.forward.scores(microbatch, entropy_gradient=self.config.entropy_coef > 0)

    def _check_teachers(self, batch: ReadyBatch) -> None:
        """Check the teachers' tokens in the whole batch."""
        if self.vocabulary is None:
            return
        for sequence in batch.sequences:
            if sequence.teacher is not None:
                check_teacher(sequence.teacher.ids_NK, self.vocabulary)

    def _is_bad(self, loss: float, norm: float) -> bool:
        """Return whether to skip the step; raise an error after too many such steps in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            reason = "explodes" if self.norms.is_spike(norm) else ""
        else:
            reason = "is not finite"
        if not reason:
            self._bad_steps = 0
            return False
        self._bad_steps += 1
        warn_once(log, "step skipped, weights untouched: loss %s, gradient norm %s, which %s", loss, norm, reason)
        if self._bad_steps >= self.config.max_bad_steps:
            sound = not any(self._world.gather(self._first_not_finite(self.parameters)))
            raise self._world.common(
                (TrainingError if sound else WeightsError)(
                    f"{self._bad_steps} steps in a row had a loss or gradient that {reason}",
                    field="--max-bad-steps",
                    got=f"loss {loss}, gradient norm {norm}",
                    fix="lower --lr, or look at the rewards and logprobs in metrics.jsonl",
                )
            )
        return True

    def check_finite(self, values: Sequence[Tensor] | None = None, when: str = "before the first step") -> None:
        """Raise a `WeightsError` with the first weight (or value for it) that is not finite in any process.

        All processes call it together.
        """
        for name in self._world.gather(self._first_not_finite(self.parameters if values is None else values)):
            if name is not None:
                raise self._world.common(not_finite(name, when))

    def _first_not_finite(self, values: Sequence[Tensor]) -> str | None:
        """Return the name of the first parameter whose value is not finite, or None; `values` has one for each."""
        index = first_not_finite(values, self.parameters)
        return None if index is None else self.holding.names[index]

    def optimizer_step(
        self, step: int, metrics: dict[str, Metric], writing: Callable[[], AbstractContextManager[None]]
    ) -> bool:
        """Clip and step, unless loss or gradient is not finite, or the gradient explodes; return whether it stepped.

        Raises:
            WeightsError: the new weights are not finite. Inside `writing` it also aborts the bridge's write.
        """
        limit = self.config.max_grad_norm or float("inf")
        norm = self.holding.clip(limit)
        loss = metrics["train/loss"].value()
        metrics["train/grad_norm"] = Mean(norm)
        if self._is_bad(loss, norm):
            return False
        before, after = sampled(self.holding.written), f"after step {step + 1}"
        self.optimizer.wait_for_copy()
        self.optimizer.prepare()
        if self.optimizer.prepares:  # checked before `writing`, so bad weights are never written
            self.check_finite([each if each.grad is None else each.grad for each in self.parameters], after)
        self.holding.share_update()
        with writing():
            self.optimizer.step()
            self.holding.finish_update()
            if not self.optimizer.prepares:
                self.check_finite(when=after)
        now = sampled(self.holding.written)
        self.holding.check(now)
        changed = self.holding.mean(changed_fraction(before, now), sum(map(len, now)))
        metrics["train/changed_fraction"] = Mean(changed)
        lr = self.optimizer.param_groups[0]["lr"]
        if changed == 0.0 and norm > 0.0 and lr >= self.config.lr:  # at its end a schedule's rate is near 0
            raise self._world.common(
                TrainingError(
                    "the optimizer step changed no weight",
                    field="--lr",
                    got=f"{lr:.3g}, with a gradient norm of {norm:.3g}",
                    fix="raise --lr",
                )
            )
        return True
