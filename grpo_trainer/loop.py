"""The algorithm on one screen: fetch, step, publish, log, acknowledge, save. The same for every weight bridge."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from rich.console import Console

from environments.api import wire
from grpo_trainer.benchmark import print_time_split
from grpo_trainer.checkpoint import Checkpoints, Progress
from grpo_trainer.config import TrainConfig
from grpo_trainer.errors import DriftError, StoppedError
from grpo_trainer.files import METRICS_FILE, refuse_to_mix_runs
from grpo_trainer.metrics.samples import SampleLog, build_sample_log
from grpo_trainer.metrics.sinks import MetricLog, build_metric_log
from grpo_trainer.model.policy import build_policy
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.signals import StopSignal
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights.bridge import WeightBridge, build_bridge
from grpo_trainer.weights.drift import drift_alarm

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> None:
    """Train as configured; returns when all steps are done and the final checkpoint is written.

    Raises:
        GrpoError: whatever the user can mend. A signal saves a checkpoint first.
    """
    refuse_to_mix_runs(config.log_dir, config.checkpoints.resume, "--log-dir")
    with StopSignal() as stop:
        policy = build_policy(config, stop.check)
        trainer = Trainer(policy.model, config, stop.check)
        checkpoints = Checkpoints(config.checkpoints, policy, trainer.optimizer)
        progress = checkpoints.resume()
        bridge = build_bridge(config, policy, checkpoints, progress, stop)
        metrics = build_metric_log(config, Console(file=sys.stdout), progress.step)
        samples = build_sample_log(config, policy.model, progress.step)
        rollouts = RolloutClient(config.rollouts, registration(config, progress), stop.check)
        try:
            with bridge:
                run_steps(config, progress, trainer, bridge, rollouts, checkpoints, metrics, samples)
        finally:
            rollouts.close()
            metrics.close()
    if config.logging.benchmark:
        print_time_split(config.log_dir / METRICS_FILE, Console(file=sys.stdout))


def run_steps(
    config: TrainConfig,
    progress: Progress,
    trainer: Trainer,
    bridge: WeightBridge,
    rollouts: RolloutClient,
    checkpoints: Checkpoints,
    metrics: MetricLog,
    samples: SampleLog | None = None,
) -> None:
    """From the progress that was resumed to the last step."""
    progress = replace(progress, policy_version=bridge.connect(progress.policy_version))
    try:
        trainer.alarm = drift_alarm(config, bridge.prove(), trainer.model)
        bridge.publish(progress.policy_version)
        rollouts.register()
        for step in range(progress.step, config.training_steps):
            batch = rollouts.next_batch(progress.policy_version)
            if samples is not None:
                samples.take(step + 1, batch)
            try:
                result = trainer.step(trainer.ready(batch), step, bridge.updating)
            except (StoppedError, DriftError):
                rollouts.release(batch)
                raise
            progress = Progress(step + 1, progress.policy_version + int(result.updated))
            published = bridge.publish(progress.policy_version)
            rollouts.ack(batch, progress.step)
            metrics.log(progress.step, batch.metrics, result.metrics, published.metrics)
            checkpoints.maybe_save(progress)
    except StoppedError as stopped:
        saved = checkpoints.save(progress)
        message = f"{stopped} at step {progress.step}; saved {saved}, go on with --resume auto"
        raise StoppedError(message, stopped.signal_number) from None
    except DriftError as drift:
        saved = checkpoints.save(progress)
        message = f"{drift}. Stopped at step {progress.step}, before training on these samples; saved {saved}, go on "
        raise DriftError(f"{message}with --resume auto") from None
    final = checkpoints.save(progress, final=True)
    log.info("trained %d steps; the final weights are %s", progress.step, final)


def registration(config: TrainConfig, progress: Progress) -> wire.Register:
    """What the rollout API is told of this run."""
    return wire.Register(
        wandb_group=config.logging.wandb_group or "",
        wandb_project=config.logging.wandb_project or "",
        batch_size=config.sequences_per_step,
        max_token_len=config.model.seq_len,
        checkpoint_dir=str(config.checkpoints.save_path),
        save_checkpoint_interval=config.checkpoints.checkpoint_interval,
        starting_step=progress.step,
        num_steps=config.training_steps,
    )
