"""One optimisation step: microbatches, backward, clip, update. Knows neither rollout API nor server."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from grpo_trainer.batching import MicroBatch, TrainingSequence, prepare, split
from grpo_trainer.config import TrainConfig
from grpo_trainer.errors import TrainingError
from grpo_trainer.logprobs import chosen_logprobs
from grpo_trainer.losses import LossInputs, old_logprobs, policy_loss
from grpo_trainer.metrics.types import Mean, Metric, Metrics, Sum, merge
from grpo_trainer.optim import build_optimizer, changed_fraction, sampled
from grpo_trainer.rollouts.types import RolloutBatch
from grpo_trainer.schedules import learning_rate
from grpo_trainer.weights.drift import DriftAlarm, gap_metrics, recheck_version, row_gaps, sample_gaps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What a step did. `updated` is False when it was skipped and the weights are as before."""

    updated: bool
    metrics: dict[str, Metric]


def loss_scale(sequences: Sequence[TrainingSequence]) -> float:
    """A power of two that brings the largest token weight near 1 during the backward pass.

    A token's weight is one over the tokens of the batch: in 16 bits such gradients would lose bits or vanish. Powers of
    two change nothing in fp32.
    """
    largest = max((sequence.weight for sequence in sequences), default=1.0)
    return 2.0 ** -math.floor(math.log2(largest))


class Trainer:
    """Owns the model's trained parameters and their optimizer.

    Args:
        model: returns an object with `logits` for token ids.
        check_stop: called between microbatches; raises to abandon the step, weights untouched.

    Attributes:
        alarm: looks at each step's samples before the weights change, once it is set.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, check_stop: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.config = config
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.parameters, config.optimizer, master_weights=config.master_weights)
        self.device = self.parameters[0].device
        self._check_stop = check_stop
        self.alarm: DriftAlarm | None = None
        self._bad_steps = 0

    def step(
        self, batch: RolloutBatch, step: int, writing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> StepResult:
        """Train once on a batch.

        Args:
            step: from 0; sets the learning rate.
            writing: entered around the write of the weights and nothing else; not at all if the step is skipped.

        Raises:
            TrainingError: the loss or the gradient was not finite for `--max-bad-steps` steps in a row.
            DriftError: the samples are not of the trainer's policy, and `--on-drift` is stop; weights untouched.
        """
        started = time.perf_counter()
        prepared = prepare(batch, self.config.loss, self.config.model.seq_len)
        lr = learning_rate(self.config.optimizer, step, self.config.training_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        parts: list[Metrics] = [prepared.metrics]
        microbatches = split(prepared.sequences, self.config.batch_size)
        scale = loss_scale(prepared.sequences)
        rows: list[Tensor] = []
        for microbatch in microbatches:
            self._check_stop()
            parts.append(self._accumulate(microbatch.to(self.device), scale, rows))
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        gaps = sample_gaps(rows)
        if self.alarm is not None:
            self.alarm.look(step, gaps, batch.policy_version, partial(recheck_version, self.model, prepared.sequences))
        metrics = merge([*parts, gap_metrics(gaps, batch.policy_version)])
        metrics.setdefault("train/loss", Sum(0.0))  # no group had a spread of rewards: nothing to learn from
        backward_seconds = time.perf_counter() - started
        updated = bool(microbatches) and self._update(metrics, writing)
        metrics |= {
            "train/lr": Mean(lr),
            "train/skipped": Sum(int(not updated)),
            "train/forward_backward_time": Sum(backward_seconds),
            "train/optimizer_time": Sum(time.perf_counter() - started - backward_seconds),
            "train/step_time": Sum(time.perf_counter() - started),
        }
        return StepResult(updated, metrics)

    def _accumulate(self, microbatch: MicroBatch, scale: float, rows: list[Tensor]) -> Metrics:
        """Forward and backward of one microbatch; gradients add up in the parameters, times `scale`.

        How far its sequences are from what the server said is added to `rows`.
        """
        logits_BTV: Tensor = self.model(input_ids=microbatch.tokens_BT, use_cache=False).logits
        trainer_logprobs_N, entropy_N = chosen_logprobs(
            logits_BTV,
            microbatch.tokens_BT,
            microbatch.rows_N,
            microbatch.columns_N,
            microbatch.temperature_N,
        )
        inputs = LossInputs(
            trainer_logprobs_N=trainer_logprobs_N,
            entropy_N=entropy_N,
            rollout_logprobs_N=microbatch.rollout_logprobs_N,
            has_rollout_N=microbatch.has_rollout_N,
            advantages_N=microbatch.advantages_N,
            weights_N=microbatch.weights_N,
        )
        loss = self.config.loss
        output = policy_loss(
            inputs,
            old_logprobs(inputs, loss.ratio_against),
            eps_low=loss.clip_eps,
            eps_high=loss.clip_eps if loss.clip_eps_high is None else loss.clip_eps_high,
        )
        (output.loss * scale).backward()
        rows.append(row_gaps(microbatch, trainer_logprobs_N))
        return {**output.metrics, "train/loss": Sum(output.loss.detach())}

    def _update(self, metrics: dict[str, Metric], writing: Callable[[], AbstractContextManager[None]]) -> bool:
        """Clip and step, unless loss or gradient is not finite."""
        limit = self.config.optimizer.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        loss = metrics["train/loss"].value()
        metrics["train/grad_norm"] = Mean(norm)
        if not torch.isfinite(torch.tensor([norm, loss])).all():
            self._bad_steps += 1
            log.warning("step skipped, weights untouched: loss %s, gradient norm %s", loss, norm)
            if self._bad_steps >= self.config.optimizer.max_bad_steps:
                raise TrainingError(
                    f"{self._bad_steps} steps in a row had a loss or gradient that is not finite "
                    f"(last: loss {loss}, gradient norm {norm}); lower --lr, or look at the rewards and logprobs "
                    "in metrics.jsonl (--max-bad-steps sets the limit)"
                )
            return False
        self._bad_steps = 0
        before = [sampled(parameter).clone() for parameter in self.parameters]
        self.optimizer.prepare()
        with writing():
            self.optimizer.step()
        changed = changed_fraction(before, [sampled(parameter) for parameter in self.parameters])
        metrics["train/changed_fraction"] = Mean(changed)
        if changed == 0.0 and norm > 0.0:
            raise TrainingError(
                f"the optimizer step changed no weight (gradient norm {norm:.3g}, learning rate "
                f"{self.optimizer.param_groups[0]['lr']:.3g}); raise --lr"
            )
        return True
