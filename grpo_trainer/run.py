"""`grpo run`: check, plan, start, watch, and say how it went."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tomli_w
from rich.console import Console

from grpo_common.locks import HeldError, hold
from grpo_trainer.config.run import RunConfig
from grpo_trainer.doctor.disk import refuse_without_room
from grpo_trainer.doctor.model_files import refuse_missing
from grpo_trainer.errors import StoppedError, from_os_error
from grpo_trainer.files import held_folder, refuse_to_mix_runs, replace_file
from grpo_trainer.launch.plan import RunPlan, plan_run
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.preflight import preflight
from grpo_trainer.launch.supervisor import Supervisor
from grpo_trainer.saving.manifest import STATE_FILE


def run(config: RunConfig, console: Console) -> None:
    """Start and watch everything that `config` describes, until the trainer is done.

    Raises:
        GrpoError: nothing was started when the configuration, the model, a port or the run folder was at fault;
            everything was ended again when a process failed.
    """
    refuse_to_mix_runs(config.run_dir, config.trainer.checkpoints.resume, "--run-dir")
    refuse_missing(config.trainer.model.name)
    together = {"trainers": 0} if config.options.trainer_gpus > 1 else {}
    ports = claim_ports({"api": config.api.port, **config.server.wanted_ports, **together})
    with console.status("checking the model and vLLM"):
        report = preflight(config.trainer.model.name)
    on_gpu = report.device == "cuda"
    console.print(
        f"model {config.trainer.model.name} ({', '.join(report.architectures)}), "
        f"vLLM {report.vllm_version} on {report.device}",
        highlight=False,
        soft_wrap=True,
    )
    refuse_without_room(config.trainer, config.run_dir, "--run-dir", on_gpu=on_gpu)  # its trainer warns of less
    plan = plan_run(config, ports, python=sys.executable, on_gpu=on_gpu)
    try:
        with held_folder(config.run_dir, "--run-dir"):
            empty_old_queue(config)
            write_configs(plan)
            _supervise(config, plan, console)
    except OSError as error:
        raise from_os_error(error, "write into the run folder") or error from error


def _supervise(config: RunConfig, plan: RunPlan, console: Console) -> None:
    spoken_to = ("api", *config.server.names)
    addresses = ", ".join(f"{name} http://127.0.0.1:{port}" for name, port in plan.ports.items() if name in spoken_to)
    console.print(f"run folder {config.run_dir}; {addresses}", highlight=False, soft_wrap=True)
    try:
        with (
            console.status("running; Ctrl-C stops the run and keeps it resumable"),
            Supervisor(
                config.run_dir / "logs",
                say=lambda line: console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True),
                echo=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            ) as supervisor,
        ):
            supervisor.run(plan.stages)
    except StoppedError as stopped:
        stopped.add(summary="; all processes have ended", fix="go on with the same command and --resume auto")
        raise
    console.print(
        f"done: {config.run_dir}/checkpoints, {config.run_dir}/metrics.jsonl; `grpo report {config.run_dir}` shows it",
        highlight=False,
        soft_wrap=True,
    )


def empty_old_queue(config: RunConfig) -> None:
    """A run that begins anew must not train on what one before it, in the same folder, has left in the API's queue.

    Only the run's own file goes, never one that `--api.store` names; one that an API still has open stays, and the new
    API says so.
    """
    store = config.store
    goes_on = config.trainer.checkpoints.resume != "never" and any(
        config.run_dir.glob(f"checkpoints/*/{STATE_FILE}"),
    )
    if config.api.store is not None or store is None or goes_on or not store.exists():
        return
    try:
        lock = hold(Path(f"{store}.lock"))
    except HeldError:
        return
    try:
        for end in ("-wal", "-shm", ""):
            Path(f"{store}{end}").unlink(missing_ok=True)
    finally:
        os.close(lock)


def write_configs(plan: RunPlan) -> None:
    """Write each process's configuration file, whole or not at all."""
    for path, table in plan.config_files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, tomli_w.dumps(dict(table)).encode(), mode=0o600)  # it may hold an API key
