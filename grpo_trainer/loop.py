"""The algorithm on one screen: fetch, step, publish, log, save, acknowledge. The same for every weight bridge."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from environments.api import wire
from grpo_common.trace import stage
from grpo_trainer.alignment.drift import drift_alarm
from grpo_trainer.batch.batching import import_own_parts
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.allocator import grow_segments
from grpo_trainer.feed import BatchFeed
from grpo_trainer.files import METRICS_FILE, SAMPLES_FILE, held_folder, refuse_to_mix_runs
from grpo_trainer.follower import follow, join_others, servers_there
from grpo_trainer.logs.console import Output, RunConsole, print_time_split
from grpo_trainer.logs.samples import SampleLog, build_sample_log, last_sample
from grpo_trainer.logs.sinks import MetricLog, build_metric_log
from grpo_trainer.metrics.health import last_line
from grpo_trainer.metrics.rows import read_rows
from grpo_trainer.metrics.types import Metrics
from grpo_trainer.parallel.world import Restore, World
from grpo_trainer.phases import COMMAND_VARIABLE, FIRST_STEP, START, report_start
from grpo_trainer.policy import build_policy
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.rollouts.filter import GroupFilter
from grpo_trainer.saving.checkpoint import Checkpoints, Progress, seed_generators
from grpo_trainer.server_client import present
from grpo_trainer.shutdown import RunState, Writes, counts_as_trained, save_on_exit
from grpo_trainer.signals import StopSignal
from grpo_trainer.trainer import Trainer
from grpo_trainer.watchdog import StepWatch
from grpo_trainer.weights.bridge import WeightBridge
from grpo_trainer.weights.build import build_bridge

log = logging.getLogger(__name__)


def train(config: TrainConfig, meet: Callable[[TrainConfig], World] = join_others) -> None:
    """Train as configured; return when all steps are done and the final checkpoint is written.

    Args:
        meet: waits for all processes of this trainer and returns them as one `World`.

    Raises:
        GrpoError: an error that the user can fix; a checkpoint is saved first if the weights are consistent.
    """
    import_own_parts(config)  # this check and the next come before any process waits for the others
    refuse_to_mix_runs(config.log_dir, config.resume, "--log-dir")
    world = meet(config)
    config = config.model_copy(update={"server": present(config.server)})
    grow_segments()
    seed_generators(config.seed)
    if not world.leads:
        follow(config, world)
        return
    # `grpo run` shows the steps itself, from metrics.jsonl: there they go to the trainer's log.
    output = Output(file=sys.stderr if COMMAND_VARIABLE in os.environ else sys.stdout)
    with (
        RunConsole(output, config.training_steps, START.waits) as console,
        StopSignal() as stop,
        held_folder(config.save_path, "--save-path") as folder,
        world,
    ):
        with world.working():
            START.enter("model")
            policy = build_policy(config, stop.check, world)
            START.enter("compile")
            trainer = Trainer(
                policy.model, config, stop.check, world=world, before_measuring=servers_there(config, world, stop.check)
            )
        START.enter("resume")
        checkpoints = Checkpoints(config, policy, trainer.optimizer, trainer.norms, trainer.shards)
        progress = checkpoints.resume(_say)
        if checkpoints.safe_path is not None:
            world.give_all(Restore(checkpoints.safe_path))
        bridge = build_bridge(config, policy, checkpoints, progress, stop, world)
        metrics = build_metric_log(config, console, progress.step)
        samples = build_sample_log(config, progress.step)
        rollouts = RolloutClient(config, registration(config, progress), stop.check)
        groups = GroupFilter(trainer.vocabulary, rollouts.environment_name, config.seq_len, trainer.routed)

        def welcome() -> None:
            """Let servers join, after the copy of weights for a checkpoint: the proof of a server changes weights."""
            trainer.optimizer.wait_for_copy()
            bridge.welcome()

        feed = BatchFeed(rollouts, config, groups, trainer.ready, stop.check, trainer.device, welcome)
        watch = StepWatch(config.step_timeout, checkpoints.close)
        stop.watch(watch.check)
        stop.watch(folder.check)
        try:
            with bridge, feed:
                run_steps(config, progress, trainer, bridge, feed, checkpoints, metrics, samples, watch, world)
        finally:
            rollouts.close()
            metrics.close()
            checkpoints.close()
    _say_how_it_went(config)


def run_steps(
    config: TrainConfig,
    progress: Progress,
    trainer: Trainer,
    bridge: WeightBridge,
    feed: BatchFeed,
    checkpoints: Checkpoints,
    metrics: MetricLog,
    samples: SampleLog | None = None,
    watch: StepWatch | None = None,
    world: World | None = None,
) -> None:
    """Train from the resumed step to the last one. On early exit, save a checkpoint if the weights are consistent."""
    watch = watch or StepWatch(0.0)
    START.enter("connect")
    progress = start = progress.going_on_as(bridge.connect(progress.policy_version))
    writes: Writes | None = None
    saved: Metrics = {}
    try:
        START.enter("proof")
        trainer.check_finite()
        trainer.alarm = drift_alarm(config, bridge.prove(), trainer.model)
        START.enter("publish")
        bridge.publish(progress.policy_version)
        START.enter("rollouts")
        feed.begin(progress)
        progress = replace(progress, batches=())
        metrics.start()
        while progress.step < config.training_steps:
            with stage("wait", step=progress.step + 1):
                batch = feed.next(progress.policy_version, last=progress.step + 1 == config.training_steps)
            START.enter(FIRST_STEP)
            if samples is not None:
                batch = replace(batch, shown=samples.choose(batch.rollouts.groups))
            with watch.over(f"step {progress.step + 1}"):
                writes = Writes(bridge.updating)
                try:
                    result = trainer.step(batch, progress.step, writes.updating)
                except Exception:
                    if counts_as_trained(writes, trainer, world):
                        progress = progress.after_step(feed.trained(batch), updated=True)
                    else:
                        feed.release(batch)
                    raise
                progress = progress.after_step(feed.trained(batch), updated=result.updated)
                with stage("publish", version=progress.policy_version):
                    published = bridge.publish(progress.policy_version)
                if samples is not None:  # after the publish, for which the servers wait
                    line = samples.write(progress.step, result.logprobs)
                    if progress.step == 1 and line:
                        _say(f"step 1: {line}")
            # Not watched: it may wait for the last evaluation, and has its own time limits.
            evaluated = feed.report(progress.step, last=progress.step == config.training_steps)
            with watch.over(f"step {progress.step}"):
                metrics.log(progress.step, result.metrics, published.metrics, saved, evaluated)
                report_start(config.log_dir, _say)
                saved = checkpoints.maybe_save(progress)  # after the row, so a resumed run has all its rows
                feed.settle(checkpoints.settled(progress))
    except Exception as end:
        save_on_exit(end, RunState(start, progress, writes, config.saves), checkpoints, feed, world or World())
        raise
    final = checkpoints.save(progress, final=True) if config.saves else None
    feed.settle(progress.batches)
    log.info("trained %d steps; the final weights are %s", progress.step, final or "not saved")


def _say_how_it_went(config: TrainConfig) -> None:
    path = config.log_dir / METRICS_FILE
    log.info("%s", last_line(read_rows(path), last_sample(config.log_dir / SAMPLES_FILE)))
    if config.benchmark:
        print_time_split(path, Console(file=sys.stdout))


def _say(line: str) -> None:
    """Write a line to the log and to the console; `grpo run` shows what its trainer prints."""
    log.info("%s", line)
    Output(file=sys.stdout).print(line, markup=False, highlight=False, soft_wrap=True)


def registration(config: TrainConfig, progress: Progress) -> wire.Register:
    """Return the trainer's registration at the rollout API."""
    staleness = config.max_staleness
    return wire.Register(
        wandb_group=config.wandb_group or "",
        wandb_project=config.wandb_project or "",
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path.absolute()),
        save_checkpoint_interval=config.environment_interval,
        starting_step=progress.step,
        num_steps=config.training_steps,
        eval_every=config.eval_every or None,
        max_staleness=None if staleness is None else staleness - config.versions_behind,
    )
