"""What a run needs before it starts: its model, room on the disk and in memory, a usual learning rate.

`grpo doctor` lists these findings; `grpo run` and `grpo train` refuse to start, or warn, by the same ones.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from grpo_common.models import WANTED, find_folder, missing_path, models_below
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.rules import unusual_lr
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.files import existing
from grpo_trainer.machine import Machine
from grpo_trainer.memory import (
    GB,
    NEARLY_FULL,
    STATE_BYTES,
    MemoryPlan,
    Setup,
    advice,
    device_name,
    trained_parameters,
    trainer_item,
)
from grpo_trainer.model.shape import ModelShape, shape_of
from grpo_trainer.run_defaults import is_planned

HUB_SECONDS = 5.0
"""Time limit of each request to the hub. It is short, because some machines have no connection to the hub."""
LOGS = 100_000_000
"""Bytes that logs and metrics of a long run may take."""
MOVE = "free space, or put the run elsewhere (--run-dir; --save-path of `grpo train`)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One check's answer."""

    status: Literal["ok", "warn", "fail", "skip"]
    """ok; warn: it may work, but look; fail: it would not; skip: there is nothing to look at, `got` says why."""
    got: str
    wanted: str = ""
    fix: str = ""
    """What to do; empty where there is nothing to do."""
    name: str = ""
    """Of the check."""


ok, warn, fail, skip = (partial(Finding, status) for status in ("ok", "warn", "fail", "skip"))


# the model -------------------------------------------------------------------------------------------------


def refuse_missing(name: str) -> None:
    """Say before anything loads that a model is neither here nor on the hub; warn when the hub can't be asked.

    Raises:
        ModelError: no folder is there, or the hub knows no such model or does not let us have it.
    """
    if (problem := missing_path(name)) is not None:
        raise ModelError.of([replace(problem, field="--model-name")])
    found = check_name(name)
    if found.status == "fail":
        raise ModelError(field="--model-name", got=found.got, wanted=found.wanted, fix=found.fix)
    if found.status == "warn":
        log.warning("--model-name: %s; %s", found.got, found.fix)


def check_name(name: str) -> Finding:
    """Return whether the model is on this machine, or else what the hub says; no answer of it is a warning."""
    if (problem := missing_path(name)) is not None:
        return fail(f"{problem.got}: {problem.summary}", problem.wanted, problem.fix)
    if (folder := find_folder(name)) is not None:
        return ok(str(folder))
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    below = models_below(Path())
    here = f"; models in this folder: {', '.join(map(str, below))}" if below else ""
    try:
        model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        fix = f"accept its terms at https://huggingface.co/{name}, then `hf auth login`"
        return fail(f"{name}: the hub gives it only to who accepted its terms", "a model you may have", fix)
    except (RepositoryNotFoundError, HFValidationError):
        fix = "correct --model-name; for a private model, `hf auth login`" + here
        return fail(f"{name}: no folder here, and no model on the hub", WANTED, fix)
    except OfflineModeIsEnabled:
        fix = "correct --model-name; or download it first where the hub can be reached (unset HF_HUB_OFFLINE)" + here
        return fail(f"{name}: no folder here, and none in the hub's cache", WANTED, fix)
    except Exception as error:  # its HTTP client, and so its errors' type, differs between releases
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        got = f"{name} is not on this machine, and the hub can't be asked for it: {reason}"
        return warn(got, "the model here, or a hub that answers", f"download it first: hf download {name}{here}")
    return ok(f"{name} is on the hub; the run downloads it when it starts")


# the disk --------------------------------------------------------------------------------------------------


def check_disk(config: TrainConfig, folder: Path, shape: ModelShape | None, *, on_gpu: bool) -> Finding:
    """Room for the checkpoints, of which the new one is whole before an old one goes, and for what the server loads.

    What the run's folder holds is not needed again. Without the model's shape, only the logs are counted.
    """
    there, held = existing(folder), 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it vanished meanwhile
            held += 0 if path.is_dir() else path.lstat().st_size
    free, saves = shutil.disk_usage(there).free, config.saves
    each = checkpoint_bytes(config, shape, on_gpu=on_gpu) if shape and saves else 0
    served = shape.parameters * _served_item(config, on_gpu=on_gpu) if shape else 0  # the models that a server loads
    if config.weight_bridge_mode == "lora_restart":
        served *= max(1, config.keep_checkpoints) + 1  # those that are kept, and the next one
    else:  # a server that starts on checkpoints needs no others
        own = config.weight_bridge_mode == "none" and config.vllm_restart_interval != config.checkpoint_interval
        served *= 2 if own else 0
    interval, keep = config.environment_interval, config.keep_checkpoints
    made = config.training_steps // interval if interval else 0
    most = 1 + (min(keep, made) if keep else made)
    least, whole = min(most, 2) * each + served, most * each + served + LOGS
    got = f"{free / GB:.1f} GB free at {there}" + (f", {held / GB:.1f} GB in use by the run" if held else "")
    models = f", {served / GB:.2f} GB of models to serve" if served else ""

    def wanted(size: int, count: int) -> str:
        checkpoints = f"{count} checkpoints of {each / GB:.2f} GB" if saves else "no checkpoints"
        return f"{size / GB:.1f} GB for {checkpoints}{models}"

    if free + held < least or free < each:
        return fail(got, wanted(least, min(most, 2)), MOVE)
    if free + held < whole:
        fix = f"a larger --checkpoint-interval, in steps; or {MOVE}" if saves else MOVE
        fix = f"--keep-checkpoints 2; or {fix}" if saves and config.keep_checkpoints != 2 else fix
        return warn(got, f"{wanted(whole, most)} and logs", fix)
    return ok(got)


def refuse_without_room(config: TrainConfig, folder: Path, flag: str, *, on_gpu: bool) -> Finding:
    """The same, but raise a `ConfigError` where the first checkpoints would not fit; `flag` names the folder."""
    found = check_disk(config, folder, shape_of(config.model_name), on_gpu=on_gpu)
    if found.status == "fail":
        raise ConfigError(f"no room in {folder}", field=flag, got=found.got, wanted=found.wanted, fix=found.fix)
    return found


def checkpoint_bytes(config: TrainConfig, shape: ModelShape, *, on_gpu: bool) -> int:
    """Return the bytes of one checkpoint: trained weights, what of them is kept exactly, and the optimizer's states."""
    trained = trained_parameters(config, shape)
    states = STATE_BYTES[config.optimizer] * trained
    if config.trains_adapter:
        return int(4 * trained + states)
    if config.weight_bridge_mode == "shared_vllm":
        item = trainer_item(config, on_gpu=on_gpu)
        masters = 4 * trained if config.master_weights and item < 4 else 0
        return int(item * shape.parameters + states + masters)
    return int((4 + _served_item(config, on_gpu=on_gpu)) * shape.parameters + states)  # in fp32, and what is served


def _served_item(config: TrainConfig, *, on_gpu: bool) -> int:
    return 4 if config.served_dtype(on_gpu=on_gpu) == "float32" else 2


# the learning rate and memory -------------------------------------------------------------------------------


def warn_of_lr(config: TrainConfig) -> None:
    """Warn before the start of a learning rate out of the usual range."""
    found = check_lr(config, shape_of(config.model_name))
    if found.status == "warn":
        log.warning("--lr: got %s, wanted %s; %s", found.got, found.wanted, found.fix)


def check_lr(config: TrainConfig, shape: ModelShape | None) -> Finding:
    """Is it in the usual range for what is trained, and for the model's size?"""
    problem = unusual_lr(config, shape.parameters if shape else None)
    return ok(f"{config.lr:g}") if problem is None else warn(problem.got, problem.wanted, problem.fix)


def warn_of_memory(config: RunConfig, machine: Machine, shape: ModelShape | None) -> None:
    """Warn before the start of a run that needs more of a GPU's memory than there is."""
    if shape is not None and is_planned(config, machine):
        found, _ = check_memory(config, shape, machine)
        if found.status == "fail":
            log.warning("the run may not fit: %s, wanted %s; %s", found.got, found.wanted, found.fix)


def check_memory(config: RunConfig, shape: ModelShape, machine: Machine) -> tuple[Finding, MemoryPlan]:
    """Would it fit? The plan comes along, for those who want to see it."""
    setup = Setup.of(config, shape, machine)
    devices, plan = setup.devices, setup.plan()
    device = plan.tightest if plan.is_tight and not plan.problems else plan.fullest
    got = f"{plan.used(device) / GB:.1f} of {devices.total / GB:.1f} GB on {device_name(devices, device)}"
    most = ", ".join(f"{row.owner} {row.what} {row.nbytes / GB:.1f} GB" for row in plan.largest_rows(device))
    if plan.problems:
        found = f"{'; '.join(map(str, plan.problems))}; most of it: {most}"
        return fail(found, "a plan that fits", advice(setup)), plan
    if plan.is_tight:
        wanted = f"{NEARLY_FULL:.0%} or less: activations are an estimate"
        return warn(f"{got}; most of it: {most}", wanted, advice(setup)), plan
    return ok(got), plan
