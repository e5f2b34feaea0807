"""Is there room for what a run keeps? Asked by `grpo doctor`, and before every start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo_trainer.config.bridge import CheckpointRestart, LoraOptions, LoraRestart, SharedVllm
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.findings import Finding, fail, ok, warn
from grpo_trainer.errors import ConfigError
from grpo_trainer.memory import GB, STATE_BYTES, trained_parameters
from grpo_trainer.model.shape import ModelShape, shape_of

LOGS = 100_000_000
"""Bytes that logs and metrics of a long run may take."""
MOVE = "free space, or put the run elsewhere (--run-dir; --save-path of `grpo train`)"


def check_disk(config: TrainConfig, folder: Path, shape: ModelShape | None, *, on_gpu: bool) -> Finding:
    """Room for the checkpoints, of which the new one is whole before an old one goes, and for what the server loads.

    Args:
        folder: of the run; what it holds already is not needed again.
        shape: None: the model is not here to be asked, only the logs are counted.
    """
    there = existing(folder)
    free, held = shutil.disk_usage(there).free, _bytes_in(folder)
    saves = config.checkpoints.saves
    each = checkpoint_bytes(config, shape) if shape and saves else 0
    served = served_bytes(config, shape, on_gpu=on_gpu) if shape else 0
    most = most_checkpoints(config)
    least, whole = min(most, 2) * each + served, most * each + served + LOGS
    got = f"{free / GB:.1f} GB free at {there}" + (f", {held / GB:.1f} GB in use by the run" if held else "")
    models = f", {served / GB:.2f} GB of models to serve" if served else ""

    def wanted(size: int, count: int) -> str:
        checkpoints = f"{count} checkpoints of {each / GB:.2f} GB" if saves else "no checkpoints"
        return f"{size / GB:.1f} GB for {checkpoints}{models}"

    if free + held < least or free < each:
        return fail("disk", got, wanted(least, min(most, 2)), MOVE)
    if free + held < whole:
        fix = f"a larger --checkpoint-interval, in steps; or {MOVE}" if saves else MOVE
        if saves and config.checkpoints.keep_checkpoints != 2:
            fix = f"--keep-checkpoints 2; or {fix}"
        return warn("disk", got, f"{wanted(whole, most)} and logs", fix)
    return ok("disk", got)


def refuse_without_room(config: TrainConfig, folder: Path, flag: str, *, on_gpu: bool) -> Finding:
    """The same, as a refusal to start where the first checkpoints would not fit.

    Args:
        flag: that names the folder.

    Raises:
        ConfigError: they would not.
    """
    finding = check_disk(config, folder, shape_of(config.model.name), on_gpu=on_gpu)
    if finding.status == "fail":
        raise ConfigError(f"no room in {folder}", field=flag, got=finding.got, wanted=finding.wanted, fix=finding.fix)
    return finding


def checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Of one checkpoint: trained weights, what of them is kept exactly, and the optimizer's states."""
    trained = trained_parameters(config, shape)
    states = STATE_BYTES[config.optimizer.optimizer] * trained
    if isinstance(config.bridge, LoraOptions):
        return int(4 * trained + states)
    if isinstance(config.bridge, SharedVllm):
        return int(2 * shape.parameters + states + (4 * trained if config.bridge.master_weights else 0))
    return int((2 + 4) * shape.parameters + states)


def served_bytes(config: TrainConfig, shape: ModelShape, *, on_gpu: bool) -> int:
    """Of the models that a server is started on, besides checkpoints: those that are kept, and the next one."""
    model = shape.parameters * (4 if config.served_dtype(on_gpu=on_gpu) == "float32" else 2)
    match config.bridge:
        case LoraRestart():
            return model * (max(1, config.checkpoints.keep_checkpoints) + 1)
        case CheckpointRestart() if config.bridge.vllm_restart_interval != config.checkpoints.checkpoint_interval:
            return model * 2
        case _:
            return 0


def most_checkpoints(config: TrainConfig) -> int:
    """At most how many lie there at one time: those that stay, and a new one or the final one.

    Of checkpoints by time, any step may have one.
    """
    interval, keep = config.checkpoints.environment_interval, config.checkpoints.keep_checkpoints
    made = config.training_steps // interval if interval else 0
    return 1 + (min(keep, made) if keep else made)


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(each for each in (path, *path.parents) if each.exists())


def _bytes_in(folder: Path) -> int:
    """Of its files, at any depth; those that vanish meanwhile count nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue
    return total
