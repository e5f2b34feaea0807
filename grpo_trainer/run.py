"""`grpo run`: check, plan, start, watch, and say how it went."""

from __future__ import annotations

import os
import secrets
import shlex
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import tomli_w
from rich.console import Console

from environments.api.wire import STORE_FORMAT
from grpo_common.formats import check_sqlite
from grpo_common.http import address
from grpo_common.locks import HeldError, hold
from grpo_common.roster import FOLDER as SERVERS
from grpo_common.roster import read_members, read_served
from grpo_common.trace import begin_file, end_file
from grpo_trainer.config.processes import RunConfig, claim_folder, link_latest
from grpo_trainer.config.rules import Hardware, checked
from grpo_trainer.doctor.before_start import refuse_missing, refuse_without_room, warn_of_lr, warn_of_memory
from grpo_trainer.errors import FolderGoneError, ProcessFailedError, StoppedError, from_os_error
from grpo_trainer.files import LOCK_FILE, METRICS_FILE, SAMPLES_FILE, HeldFolder, held_folder, replace_file
from grpo_trainer.launch.places import HERE, LOOPBACK, NO_PLACES, Places, place_run
from grpo_trainer.launch.plan import ProcessSpec, RunPlan, plan_run
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.process import Process
from grpo_trainer.launch.ray_cluster import joined
from grpo_trainer.launch.replan import Replanner
from grpo_trainer.launch.supervisor import Supervisor
from grpo_trainer.launch.trial import trying
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.logs.samples import last_sample
from grpo_trainer.machine import Machine, look
from grpo_trainer.metrics.health import last_line
from grpo_trainer.metrics.rows import NewRows, last_rows, read_rows, which
from grpo_trainer.model.shape import shape_of
from grpo_trainer.phases import COMMAND_VARIABLE, process_start
from grpo_trainer.record import write_record
from grpo_trainer.run_defaults import chosen, described, planned_cache
from grpo_trainer.saving.manifest import (
    STATE_FILE,
    DamagedError,
    read_state,
    refuse_another_run,
    refuse_unreadable,
    saved_checkpoints,
)

CACHE_VARIABLE = "GRPO_CACHE"
"""Environment variable with a folder to use instead of `~/.cache/grpo`."""
COMPILE_CACHES = MappingProxyType(
    {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
)
"""Environment variable of a library's cache -> our folder for it. It is safe to delete: runs rebuild it."""


def run(config: RunConfig, console: Console) -> None:
    """Start and watch everything that `config` describes, until the trainer is done.

    Raises:
        GrpoError: nothing was started when the configuration, the model, a port or the run folder was at fault;
            everything was ended again when a process failed.
    """
    if (config.run_dir / LOCK_FILE).exists():
        with held_folder(config.run_dir, "--run-dir"):
            pass  # a run that goes on there holds the ports, too, and is to be named first
    refuse_another_run(config.run_dir, config.trainer.resume)
    refuse_newer(config)
    if config.trainer.resume == "auto":
        refuse_unreadable(config.run_dir / "checkpoints")
    refuse_missing(config.trainer.model_name)
    warn_of_lr(config.trainer)
    with (
        joined(config.options.cluster, config.options.cluster_nodes) as cluster,
        own_folder(config) as config,
        trying(config) as trials,
    ):
        ports = {} if cluster else claim_ports(wanted_ports(config))  # a cluster's are those of its machines
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        trials.check(say)

        machine, shape = look(), shape_of(config.trainer.model_name)
        on_gpu, given = machine.serves_on_gpu, config
        config = chosen(given, machine, shape)
        for line in described(given, config, machine, shape):
            say(line)
        warn_of_memory(config, machine, shape)

        places = NO_PLACES
        if cluster:
            places = place_run(config, cluster.nodes, on_gpu=on_gpu)
            cluster.occupy(places)
            ports, config = cluster.claim(wanted_ports(config), places), with_key(config, places)
        again = partial(planned, on_gpu=on_gpu, machine=machine if on_gpu else None)
        plan = again(config, ports, places)
        start = partial(cluster.start, contents(plan)) if cluster else Process
        refuse_without_room(config.trainer, config.run_dir, "--run-dir", on_gpu=on_gpu)  # its trainer warns of less
        try:
            with held_folder(config.run_dir, "--run-dir") as folder:
                empty_old_queue(config)
                write_configs(plan)
                if "run_dir" in config.unset:
                    link_latest(config.run_dir)
                write_record(config, [gpu.name for gpu in machine.gpus])
                replanner = Replanner(config, ports, places, again, machines=cluster, on_gpu=on_gpu)
                if config.trace_file:
                    begin_file(config.trace_file)
                try:
                    supervise(config, plan, console, folder, start, replanner)
                finally:
                    if config.trace_file:
                        end_file(config.trace_file)
        except OSError as error:
            raise from_os_error(error, "write into the run folder") or error from error


@contextmanager
def own_folder(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the run with a folder that no other run has, unless it was named; remove it if nothing was written."""
    if "run_dir" not in config.unset:
        yield config
        return
    folder = claim_folder()
    try:
        yield config.model_copy(update={"options": config.options.model_copy(update={"run_dir": folder})})
    finally:
        with suppress(OSError):  # it is not empty, or gone
            folder.rmdir()


def wanted_ports(config: RunConfig) -> dict[str, int]:
    """Return the port that each process asks for; 0: any free one."""
    together = {"trainers": 0} if config.options.trainer_gpus > 1 else {}
    return {"api": config.api.port, **config.server.wanted_ports, **together}


def with_key(config: RunConfig, places: Places, make: Callable[[], str] = secrets.token_urlsafe) -> RunConfig:
    """Return the run with a new key for its servers, if one of them listens beyond loopback, or may do so later.

    The key goes to the server by its environment, and to trainer and environments by configuration files that only
    their owner may read. No command line and no log has it. A key that the user has given stays. The rollout API
    listens on loopback: all its clients are on its machine.
    """
    trainer = config.trainer
    reachable = [name for name in config.server.names if not places.get(name, HERE).is_here]
    may_come = bool(places) and trainer.servers_may_change
    if not (reachable or may_come) or trainer.server.api_key:
        return config
    vllm = trainer.server.model_copy(update={"api_key": make()})
    return config.model_copy(update={"trainer": trainer.model_copy(update={"server": vllm})})


def hardware_of(machine: Machine | None, *, on_gpu: bool) -> Hardware:
    """Return what the rules know of a machine; of a GPU that is split (MIG), NVIDIA's library lists nothing."""
    return Hardware(on_gpu, (len(machine.gpus) or None if machine else None) if on_gpu else 0)


def planned(
    config: RunConfig,
    ports: Mapping[str, int],
    places: Places = NO_PLACES,
    *,
    on_gpu: bool,
    machine: Machine | None = None,
) -> RunPlan:
    """Return the plan for this machine, or for places on a cluster; raise a `ConfigError` if options do not suit it.

    On a cluster, and where this machine is not known or of no use, a server measures the memory for its cache.
    """
    here = machine if on_gpu else None
    checked(config, hardware_of(machine, on_gpu=on_gpu))
    rows = last_rows(config.run_dir / METRICS_FILE).rows
    return plan_run(
        config,
        ports,
        python=sys.executable,
        on_gpu=on_gpu,
        cache_bytes=planned_cache(config, here) if here and not places else None,
        env={**compile_caches(os.environ), COMMAND_VARIABLE: str(process_start())},
        places=places,
        step=rows[-1]["step"] if rows else 0,
    )


def compile_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that put the compilers' caches into our folder.

    Variables that the user has set already are left out; all, if there is no home folder, or it may not be written.
    """
    try:
        folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grpo").absolute()
    except RuntimeError:
        return {}
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not os.access(there, os.W_OK):
        return {}
    return {name: str(folder / place) for name, place in COMPILE_CACHES.items() if not environment.get(name)}


def supervise(
    config: RunConfig,
    plan: RunPlan,
    console: Console,
    folder: HeldFolder,
    start: Callable[[ProcessSpec, Path, Callable[[str, bool], None]], Process] = Process,
    replanner: Replanner | None = None,
) -> None:
    """Start and watch the processes of a plan, show the run's progress, and at the end whether it learnt."""
    metrics = config.run_dir / METRICS_FILE
    earlier, new_rows = {*map(which, read_rows(metrics))}, NewRows(metrics)
    saves = config.trainer.saves

    def show() -> None:
        view.say_waits()
        for row in new_rows.read() if supervisor.begun else ():
            if which(row) in earlier:  # of a run that is resumed
                view.remember(row)
            else:
                view.write(row["step"], row)

    supervisor = Supervisor(
        config.run_dir / "logs",
        say=lambda line: view.say(line, style="dim"),
        echo=lambda line: view.say(line),
        check=folder.check,
        show=show,
        start=start,
        max_restarts=config.options.max_restarts,
        has_checkpoint=lambda: _saved(config),
        servers=config.roster,
        replanner=replanner,
        saves=saves,
    )
    view = RunConsole(console, config.trainer.training_steps, lambda: supervisor.waits)
    where = {process.name: process.place.address for process in plan.processes}
    spoken_to = {name: port for name, port in plan.ports.items() if name in ("api", *config.server.names)}
    listen = ", ".join(f"{name} http://{address(where.get(name, LOOPBACK), port)}" for name, port in spoken_to.items())
    stops = "stops the run and keeps it resumable" if saves else "stops the run"
    view.say(f"run folder {config.run_dir}; {listen}; Ctrl-C {stops}")
    this_run = shlex.quote(str(config.run_dir))
    try:
        with closing(new_rows), view, supervisor:
            supervisor.run(plan.stages)
    except (StoppedError, FolderGoneError, ProcessFailedError) as error:
        again = _way_on(config)
        if isinstance(error, StoppedError):
            error.add(summary="; all processes have ended", fix=again)
        else:
            error.add(summary=f"; the run is over, {again}")
        raise
    saved = f"{config.run_dir}/checkpoints, " if saves else ""
    view.say(f"done: {saved}{config.run_dir}/{METRICS_FILE}; `grpo report {this_run}` shows it")
    view.say(last_line(read_rows(config.run_dir / METRICS_FILE), last_sample(config.run_dir / SAMPLES_FILE)))


def _way_on(config: RunConfig) -> str:
    """Return which checkpoint the run continues from and by what command, and which trained steps are not saved."""
    saved = saved_checkpoints(config.run_dir / "checkpoints")
    if not saved:
        return "nothing was saved"
    newest, rows = saved[-1], last_rows(config.run_dir / METRICS_FILE).rows
    is_lost = rows and rows[-1]["step"] > newest.progress.step
    lost = f"what followed step {newest.progress.step}, up to {rows[-1]['step']}, was not saved; " if is_lost else ""
    return f"{lost}continue from {newest.path} by: grpo run --resume {shlex.quote(str(config.run_dir))}"


def _saved(config: RunConfig) -> bool:
    """Return whether there is a checkpoint to resume from."""
    return any(config.run_dir.glob(f"checkpoints/*/{STATE_FILE}"))


def refuse_newer(config: RunConfig) -> None:
    """Check the formats of all files that an earlier run has left and this one would read or replace.

    Raises:
        FormatError: a newer version wrote one of them. Nothing in the folder has changed.
    """
    folder = config.run_dir
    for rows in (folder / METRICS_FILE, folder / SAMPLES_FILE):
        read_rows(rows)
    for state in folder.glob(f"checkpoints/*/{STATE_FILE}"):
        with suppress(DamagedError):  # the trainer moves it aside
            read_state(state.parent)
    read_members(folder / SERVERS)
    read_served(folder / SERVERS)
    if config.store is not None:
        with suppress(sqlite3.Error):  # the rollout API reports it
            check_sqlite(config.store, STORE_FORMAT)


def empty_old_queue(config: RunConfig) -> None:
    """A new run must not train on groups that an earlier run in the same folder has left in the API's queue.

    Only the run's own file goes, never one that `--api.store` names; one that an API still has open stays, and the new
    API says so.
    """
    store = config.store
    goes_on = config.trainer.resume != "never" and _saved(config)
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


def contents(plan: RunPlan) -> dict[Path, bytes]:
    """Return what the configuration file of each process holds."""
    return {path: tomli_w.dumps(dict(table)).encode() for path, table in plan.config_files.items()}


def write_configs(plan: RunPlan) -> None:
    """Write each process's configuration file, whole or not at all."""
    for path, content in contents(plan).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, mode=0o600)  # it may hold an API key
