"""`grpo run --dry-run`: the processes that a run would start, as a table or as JSON. It leaves nothing behind.

The same checks as before a start apply, and environments are tried (`grpo_trainer.launch.trial`). But a machine without
the GPUs or the cluster that a run needs shows its plan all the same, and says what is missing: a plan may be read
before there is such a machine.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_common.redaction import redacted_arguments
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.rules import Hardware, check
from grpo_trainer.config.run import GPUS_PER_NODE
from grpo_trainer.doctor.before_start import refuse_missing, warn_of_lr, warn_of_memory
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import replace_file
from grpo_trainer.launch.places import NO_PLACES, Node, place_run
from grpo_trainer.launch.plan import ProcessSpec, RunPlan, reached, server_process
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.ray_cluster import joined
from grpo_trainer.launch.trial import trying
from grpo_trainer.machine import look, visible_names
from grpo_trainer.model.shape import shape_of
from grpo_trainer.run import hardware_of, planned, wanted_ports
from grpo_trainer.run_defaults import chosen, described
from grpo_trainer.saving.manifest import refuse_another_run
from grpo_trainer.slurm import Job, command_of, job_script, nodes_of_job


@dataclass(frozen=True)
class PlannedProcess:
    """One process that a run would start."""

    stage: int
    """From 1; a stage starts when the one before is ready."""
    name: str
    node: str
    """The machine that it runs on."""
    gpus: tuple[int | str, ...]
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them; empty: it uses none."""
    port: int | None
    """Where it listens; None: nowhere."""
    command: tuple[str, ...]
    """Its command line; values of secret flags are hidden."""
    variables: tuple[str, ...]
    """Names of the environment variables that the run sets for it; their values may be keys."""
    started_by: str = ""
    """The process that starts it; empty: the run itself."""


@dataclass(frozen=True)
class Ahead:
    """What `grpo run` would start."""

    summary: list[str]
    """What the start would say of model, training and memory; of memory only if the run would be on this machine."""
    processes: list[PlannedProcess]
    missing: list[str]
    """What a run needs and this machine lacks; the processes are then those on machines that have it."""


def look_ahead(config: RunConfig, say: Callable[[str], None]) -> Ahead:
    """Return what `grpo run` would start now, on this machine or on its cluster; `say` takes a line about each trial.

    Raises:
        GrpoError: a run could not start: the folder holds a run, the model is missing, an environment fails, a port is
            taken, options do not go together, the cluster has too few GPUs.
    """
    refuse_another_run(config.run_dir, config.trainer.resume)
    refuse_missing(config.trainer.model_name)
    with trying(config, patient=True) as trials:
        machine, shape = look(), shape_of(config.trainer.model_name)
        trials.check(say)
    given, missing = config, list[str]()
    config = chosen(given, machine, shape)
    if config.options.cluster:
        try:
            with joined(config.options.cluster, config.options.cluster_nodes, waits=False) as cluster:
                nodes: Sequence[Node] = cluster.nodes if cluster else []
        except ConfigError as error:
            nodes = nodes_of_job(config, GPUS_PER_NODE)
            missing = [f"{error}; planned for {len(nodes)} machines with {GPUS_PER_NODE} GPUs each"]
        on_gpu = any(node.gpus for node in nodes)
        places, ports = place_run(config, nodes, on_gpu=on_gpu), wanted_ports(config)  # its nodes' ports are not asked
    else:
        on_gpu, places, ports = machine.serves_on_gpu, NO_PLACES, claim_ports(wanted_ports(config))
        problems = check(config, hardware_of(machine, on_gpu=on_gpu))
        missing = [] if check(config, Hardware(on_gpu=True)) else [str(problem) for problem in problems]
        on_gpu = on_gpu or bool(missing)
    plan = planned(config, ports, places, on_gpu=on_gpu, machine=None if missing else machine)
    warn_of_lr(config.trainer)
    if missing or config.options.cluster:  # this machine's device and memory are not the run's
        summary = [f"model {config.trainer.model_name}", *described(given, config, machine, None)[1:]]
        return Ahead(summary, [*rows_of(config, plan, on_gpu=on_gpu)], missing)
    warn_of_memory(config, machine, shape)
    summary = described(given, config, machine, shape)
    return Ahead(summary, [*rows_of(config, plan, on_gpu=on_gpu, visible=machine.visible)], missing)


def write_job(config: RunConfig, path: Path, gpus_per_node: int, words: Sequence[str]) -> Job:
    """Write a Slurm job script for a run with the arguments `words`, and return what it was made from.

    Without GPUs of a node, server and trainer run on CPUs.

    Raises:
        GrpoError: the run could not start on such nodes, or an argument holds a key.
    """
    on_gpu, nodes, command = gpus_per_node > 0, nodes_of_job(config, gpus_per_node), command_of(words)
    places = place_run(config, nodes, on_gpu=on_gpu)
    plan = planned(config, wanted_ports(config), places, on_gpu=on_gpu)
    job = Job(plan, len(nodes), gpus_per_node, command, Path.cwd(), Path(sys.executable).parent)
    replace_file(path, job_script(job).encode(), mode=0o755)
    return job


def rows_of(
    config: RunConfig, plan: RunPlan, *, on_gpu: bool, visible: Sequence[str] | None = None
) -> Iterator[PlannedProcess]:
    """Yield a row for each process of a plan, and for the servers that its trainer starts.

    GPUs are named as this machine's `visible` ones in CUDA_VISIBLE_DEVICES; None: they are counted from 0.
    """
    head = next((spec.place.node.name for spec in plan.processes if spec.place.node), socket.gethostname())

    def row(stage: int, spec: ProcessSpec, started_by: str = "") -> PlannedProcess:
        return PlannedProcess(
            stage,
            spec.name,
            spec.place.node.name if spec.place.node else head,
            _gpus(config, spec, visible) if on_gpu else (),
            plan.ports.get("trainers" if spec.name == "trainer" else spec.name),
            redacted_arguments(spec.argv),
            tuple(sorted(spec.env)),
            started_by,
        )

    for stage, specs in enumerate(plan.stages, 1):
        for spec in specs:
            yield row(stage, spec)
            if spec.ends_run and config.trainer.owns_server:
                trainer = reached(config, plan.ports, on_gpu)
                for name, vllm in zip(config.server.names, trainer.server.each, strict=True):
                    one = trainer.model_copy(update={"server": vllm})
                    server = server_process(one, python=spec.argv[0], on_gpu=on_gpu, model=one.model_name, name=name)
                    yield row(stage, server, spec.name)


def _gpus(config: RunConfig, spec: ProcessSpec, visible: Sequence[str] | None) -> tuple[int | str, ...]:
    """Return the GPUs of one process, as CUDA_VISIBLE_DEVICES names them."""
    if spec.place.node:
        return spec.place.gpus
    if spec.name in config.server.names:
        places = range(config.server.degree)
    elif spec.name.startswith("trainer"):
        first = int(spec.env.get("LOCAL_RANK") or config.trainer.device.partition(":")[2] or 0)
        places = range(first, first + 1)
    else:
        return ()
    seen = (visible or ())[places.start : places.stop]
    names = visible_names(spec.env) or seen or map(str, places)
    return tuple(int(name) if name.isdecimal() else name for name in names)


def print_ahead(ahead: Ahead, console: Console) -> None:
    """Print what the start would say, a table, each process's command line below it, and what this machine lacks."""
    for line in ahead.summary:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    for column in ("process", "node", "GPUs"):
        table.add_column(column)
    table.add_column("port", justify="right")
    for row in ahead.processes:
        gpus, port = ",".join(map(str, row.gpus)), str(row.port or "")
        table.add_row(str(row.stage), row.name, row.node, gpus, port)
    console.print(table)
    for row in ahead.processes:
        by = f" (started by {row.started_by})" if row.started_by else ""
        command = shlex.join(row.command)
        console.print(f"\n{row.name}{by}:\n  {command}", markup=False, highlight=False, soft_wrap=True)
    for what in ahead.missing:
        console.print(f"\nnot here: {what}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "\nnothing was started. A port that was to be any free one may differ in the run",
        highlight=False,
        soft_wrap=True,
    )


def as_json(ahead: Ahead) -> str:
    """Return one object with the attributes of `Ahead` and `PlannedProcess`."""
    return json.dumps(asdict(ahead))
