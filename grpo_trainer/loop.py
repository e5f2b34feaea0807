"""The algorithm on one screen: fetch, step, publish, log, save, acknowledge. The same for every weight bridge.

All processes of a trainer run it (`parallel/world.py`). The rollout API, metrics and samples are rank 0's, so they are
used within `world.lead`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from environments.api import wire
from grpo_common.trace import stage
from grpo_trainer.alignment.drift import drift_alarm
from grpo_trainer.batch.batching import ReadyBatch, import_own_parts
from grpo_trainer.config.rules import Hardware, checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.allocator import grow_segments
from grpo_trainer.feed import BatchFeed
from grpo_trainer.files import METRICS_FILE, SAMPLES_FILE, held_folder, refuse_to_mix_runs
from grpo_trainer.logs.console import Output, RunConsole
from grpo_trainer.logs.samples import SampleLog, build_sample_log, last_sample
from grpo_trainer.logs.sinks import MetricLog, build_metric_log
from grpo_trainer.metrics.health import last_line
from grpo_trainer.metrics.rows import read_rows
from grpo_trainer.metrics.types import Metrics, Sum
from grpo_trainer.parallel.world import World, join
from grpo_trainer.phases import COMMAND_VARIABLE, FIRST_STEP, START, report_start
from grpo_trainer.policy import build_policy
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.rollouts.filter import GroupFilter
from grpo_trainer.saving.checkpoint import Checkpoints, Progress, seed_generators
from grpo_trainer.saving.manifest import refuse_to_mix_checkpoints
from grpo_trainer.server_client import present, wait_for_servers
from grpo_trainer.shutdown import RunState, Writes, counts_as_trained, save_on_exit
from grpo_trainer.signals import StepWatch, StopSignal
from grpo_trainer.trainer import StepResult, Trainer
from grpo_trainer.weights.bridge import WeightBridge
from grpo_trainer.weights.build import build_bridge

log = logging.getLogger(__name__)

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable of a process that `torchrun` has started."""
SWITCH_SECONDS = 0.0005
"""For which a thread keeps the interpreter from others that wait for it; Python's own is 0.005. The thread that
prepares the next batch computes while generation is held for an update: beside such a thread an HTTP request to another
process took 17 ms, with this interval 2 ms (alone 1 ms; a CPU, 2026-11-29)."""


def train(config: TrainConfig, meet: Callable[[TrainConfig], World] | None = None) -> None:
    """Train as configured; return when all steps are done and the final checkpoint is written.

    `meet` waits for all processes of this trainer and returns them as one `World`; None: `join_others`.

    Raises:
        GrpoError: an error that the user can fix; a checkpoint is saved first if the weights are consistent. Of several
            processes, rank 0 raises an error that all have met.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    import_own_parts(config)  # this check and the next two come before any process waits for the others
    refuse_to_mix_runs(config.log_dir, config.resume, "--log-dir")
    refuse_to_mix_checkpoints(config.save_path, config.resume, "--save-path")
    world = (meet or join_others)(config)
    config = config.model_copy(update={"server": present(config.server)})
    grow_segments()
    seed_generators(config.seed)
    # `grpo run` shows the steps itself, from metrics.jsonl: there they go to the trainer's log.
    output = Output(file=sys.stderr if COMMAND_VARIABLE in os.environ else sys.stdout)
    with ExitStack() as opened:
        console = world.only_first(lambda: opened.enter_context(RunConsole(output, config.training_steps, START.waits)))
        stop = opened.enter_context(StopSignal())
        folder = world.only_first(lambda: opened.enter_context(held_folder(config.save_path, "--save-path")))
        opened.enter_context(world)
        START.enter("model")
        policy = build_policy(config, stop.check, world)
        if not world.leads:
            # Rank 0 handles a signal that reaches all processes, and needs the others to save.
            stop.ignore(is_supervised=not {COMMAND_VARIABLE, TORCHRUN_VARIABLE}.isdisjoint(os.environ))
        START.enter("compile")
        ready = servers_there(config, world, stop.check)
        trainer = Trainer(policy.model, config, stop.check, world=world, before_measuring=ready)
        START.enter("resume")
        checkpoints = Checkpoints(config, policy, trainer.optimizer, trainer.norms, trainer.shards, world=world)
        progress = checkpoints.resume(_say)
        bridge = build_bridge(config, policy, checkpoints, progress, stop, world)
        watch = StepWatch(config.step_timeout, checkpoints.close)
        opened.callback(checkpoints.close)

        def desk() -> Desk:
            stop.watch(watch.check)
            stop.watch(folder.check)
            metrics = build_metric_log(config, console, progress.step)
            opened.callback(metrics.close)
            samples = build_sample_log(config, progress.step)
            rollouts = RolloutClient(config, registration(config, progress), stop.check)
            opened.callback(rollouts.close)
            groups = GroupFilter(trainer.vocabulary, rollouts.environment_name, config.seq_len, trainer.routed)
            feed = BatchFeed(rollouts, config, groups, trainer.ready, stop.check, trainer.device, bridge.has_news)
            return Desk(opened.enter_context(feed), metrics, samples)

        opened.enter_context(bridge)
        run_steps(config, progress, trainer, bridge, world.only_first(desk), checkpoints, watch, world)
    if world.leads:
        rows = read_rows(config.log_dir / METRICS_FILE)
        log.info("%s", last_line(rows, last_sample(config.log_dir / SAMPLES_FILE)))


def join_others(config: TrainConfig) -> World:
    """Wait for all processes of this trainer, and return them.

    Raises:
        ConfigError: the options do not go together on this machine; see also `world.join`.
        TrainingError: the other processes did not connect.
    """
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    checked(config, Hardware(on_gpu, torch.cuda.device_count()))
    return join(config, on_gpu=on_gpu)


def servers_there(config: TrainConfig, world: World, check_stop: Callable[[], None]) -> Callable[[], None]:
    """Return a function that waits until servers that start at the same time have allocated their memory.

    All trainer processes call it before they measure the free memory of their GPUs; rank 0 asks the servers. There is
    nothing to wait for if the trainer starts the server itself later, or if it shares the weights of a running server.
    """
    if config.owns_server or config.shares_weights:
        return lambda: None
    return lambda: world.lead(lambda: wait_for_servers(config.server, check_stop))


@dataclass(frozen=True)
class Desk:
    """What only rank 0 has. Its methods are called within `World.lead`."""

    feed: BatchFeed
    metrics: MetricLog
    samples: SampleLog | None = None

    def begin(self, progress: Progress) -> None:
        """Register at the rollout API."""
        self.feed.begin(progress)
        self.metrics.start()

    def shares(self, version: int, last: bool) -> list[ReadyBatch] | None:
        """Wait for a batch, and return each process's share of it; None: the wait was interrupted."""
        batch = self.feed.next(version, last=last)
        if batch is None:
            return None
        if self.samples is not None:
            batch = replace(batch, shown=self.samples.choose(batch.rollouts.groups))
        return batch.shares()

    def report(self, progress: Progress, result: StepResult, last: bool) -> Metrics:
        """Log the samples of a step, and report it to the rollout API; return the environments' new evaluations."""
        self._log_samples(progress.step, result)  # after the publish, for which the servers wait
        return self.feed.report(progress.step, last=last)

    def _log_samples(self, step: int, result: StepResult) -> None:
        if self.samples is not None and (line := self.samples.write(step, result.logprobs)) and step == 1:
            _say(f"step 1: {line}")

    def log(self, step: int, rows: Sequence[Metrics]) -> None:
        """Write a step's row of metrics; after the first step since the start, report how long the start took."""
        passed = START.passed if START.waits() else {}
        self.metrics.log(step, *rows, {f"start/{phase}_reached": Sum(seconds) for phase, seconds in passed.items()})
        report_start(_say)

    def log_ended(self, step: int, result: StepResult, saved: Metrics) -> None:
        """Log a step that is trained, and will be in a checkpoint, if an error came before its row."""
        if step > self.metrics.newest:
            try:
                self.log(step, (result.metrics, saved))
                self._log_samples(step, result)
            except Exception as error:  # the user sees the error that ended the run
                log.warning("step %d could not be logged", step, exc_info=error)


def run_steps(
    config: TrainConfig,
    progress: Progress,
    trainer: Trainer,
    bridge: WeightBridge,
    desk: Desk,
    checkpoints: Checkpoints,
    watch: StepWatch | None = None,
    world: World | None = None,
) -> None:
    """Train from the resumed step to the last one. On early exit, save a checkpoint if the weights are consistent."""
    watch, world = watch or StepWatch(0.0), world or World()
    START.enter("connect")
    with world.alike():
        progress = start = progress.going_on_as(bridge.connect(progress.policy_version))
    writes: Writes | None = None
    result: StepResult | None = None
    saved: Metrics = {}
    try:
        START.enter("proof")
        trainer.check_finite()
        with world.alike():
            trainer.alarm = drift_alarm(config, bridge.prove(), trainer.model)
            START.enter("publish")
            bridge.publish(progress.policy_version)
        START.enter("rollouts")
        world.lead(partial(Desk.begin, desk, progress))
        progress = replace(progress, batches=())
        while progress.step < config.training_steps:
            last = progress.step + 1 == config.training_steps
            with stage("wait", step=progress.step + 1):
                wait = partial(Desk.shares, desk, progress.policy_version, last)
                while (batch := world.scatter(wait)) is None:
                    trainer.optimizer.wait_for_copy()  # of weights, for a checkpoint: a proof changes them
                    with world.alike():
                        bridge.welcome()
            START.enter(FIRST_STEP)
            with watch.over(f"step {progress.step + 1}"):
                writes = Writes(bridge.updating)
                try:
                    result = trainer.step(batch, progress.step, writes.updating)
                except Exception as end:
                    if counts_as_trained(end, writes, trainer, world):
                        progress = progress.after_step(trained(desk, batch, world), updated=True)
                        result = StepResult(True, batch.metrics)
                    elif world.leads:
                        desk.feed.release(batch)
                    raise
                progress = progress.after_step(trained(desk, batch, world), updated=result.updated)
                trainer.optimizer.wait_for_copy()  # a skipped step did not, and here too a server may join
                with stage("publish", version=progress.policy_version), world.alike():
                    published = bridge.publish(progress.policy_version)
            # Not watched: it may wait for the last evaluation, and has its own time limits.
            evaluated = world.lead(partial(Desk.report, desk, progress, result, last))
            with watch.over(f"step {progress.step}"):
                rows = (result.metrics, published.metrics, saved, evaluated)
                world.lead(partial(Desk.log, desk, progress.step, rows))
                saved = checkpoints.maybe_save(progress)  # after the row, so a resumed run has all its rows
                world.lead(partial(settle, desk, progress, checkpoints))
    except Exception as end:
        if world.leads and result is not None:
            desk.log_ended(progress.step, result, saved)

        def acknowledge(batches: Sequence[str]) -> None:
            if world.leads:
                desk.feed.settle(batches, patient=False)

        save_on_exit(end, RunState(start, progress, writes, config.saves), checkpoints, acknowledge, world)
        raise
    final = checkpoints.save(progress, final=True) if config.saves else None
    world.lead(partial(settle, desk, progress))
    log.info("trained %d steps; the final weights are %s", progress.step, final or "not saved")


def trained(desk: Desk, batch: ReadyBatch, world: World) -> tuple[str, ...]:
    """Return all trained batches that are not acknowledged yet, as rank 0 counts them."""
    return desk.feed.trained(batch) if world.leads else ()


def settle(desk: Desk, progress: Progress, checkpoints: Checkpoints | None = None) -> None:
    """Acknowledge the batches that are in a checkpoint, or at the end all."""
    desk.feed.settle(progress.batches if checkpoints is None else checkpoints.settled(progress))


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
