"""A Slurm job script for a run: it starts Ray on the job's nodes, and `grpo run --cluster` on the first one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_common.redaction import redacted_arguments
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.launch.places import Node, gpus_of_run, place_run
from grpo_trainer.launch.plan import RunPlan

SPARE_SECONDS = 60
"""Seconds between Slurm's signal and its time limit, in addition to the time that the trainer has to save."""
OWN_FLAGS = {"--slurm": True, "--gpus-per-node": True, "--cluster": True, "--cluster-nodes": True}
OWN_FLAGS |= {"--dry-run": False, "--json": False}
"""Flags that the job's own command replaces or omits, and whether each takes a value."""


@dataclass(frozen=True)
class Job:
    """What a job script depends on."""

    plan: RunPlan
    """The processes, with their places on nodes of such a job."""
    nodes: int
    gpus_per_node: int
    command: tuple[str, ...]
    """The words after `grpo run`, without those of the cluster."""
    folder: Path
    """Where the run is started."""
    programs: Path
    """The folder of `grpo` and `ray`."""


def nodes_of_job(config: RunConfig, gpus_per_node: int) -> list[Node]:
    """Return the fewest equal nodes that hold the run, at least `--cluster-nodes`; raise a `ConfigError` if none do."""
    least = config.options.cluster_nodes
    if gpus_per_node == 0:
        return _nodes(least, 0)
    most = least + gpus_of_run(config)
    for number in range(least, most + 1):
        nodes = _nodes(number, gpus_per_node)
        try:
            place_run(config, nodes, on_gpu=True)
        except ConfigError:
            if number == most:
                raise
        else:
            return nodes
    raise AssertionError("the last number returns or raises")


def _nodes(number: int, gpus: int) -> list[Node]:
    return [Node(f"node {n + 1}", f"node-{n + 1}", gpus, id=str(n), is_head=n == 0) for n in range(number)]


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of `grpo run` that a job repeats; raise a `ConfigError` if the script would show a key."""
    shown = redacted_arguments(words)
    for position, (word, hidden) in enumerate(zip(words, shown, strict=True)):
        if word != hidden:
            flag = word.partition("=")[0] if "=" in word else words[position - 1]
            why = "the job's script would show it"
            fix = "set it in the --config file, or by ROLLOUT_API_KEY and VLLM_API_KEY in the job's environment"
            raise ConfigError(why, field="--slurm", got=flag, wanted="no key among the arguments", fix=fix)
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag not in OWN_FLAGS:
            kept.append(word)
        elif OWN_FLAGS[flag] and not equals:
            next(rest, None)
    return tuple(kept)


def job_script(job: Job) -> str:
    """Return the script, for `sbatch`: lines that depend on the job, then `job.sh`."""
    seconds = int(max(process.stop_seconds for process in job.plan.processes)) + SPARE_SECONDS
    command = [*job.command, "--cluster", "auto", "--cluster-nodes", str(job.nodes)]
    places = [(process.name, process.place) for process in job.plan.processes]
    lines = [
        "#!/bin/bash",
        "# Made by `grpo run --slurm`: starts Ray on the nodes of a job, and the run on the first one.",
        "# Options of sbatch win over those below: sbatch --partition=P --time=12:00:00 THIS_FILE",
        "#",
        *(
            f"#   {name:<20} {place.node.name if place.node else 'node 1'}"
            f"{', GPU ' + ','.join(map(str, place.gpus)) if place.gpus else ''}"
            for name, place in places
        ),
        "#",
        "#SBATCH --job-name=grpo",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        *([f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "#SBATCH --output=grpo-%j.log",
        "# Before the time limit, so that the trainer can save a checkpoint.",
        f"#SBATCH --signal=B:TERM@{seconds}",
        f"folder={shlex.quote(str(job.folder))}",
        f"programs={shlex.quote(str(job.programs))}",
        "# shellcheck disable=SC2016 # what was typed is not expanded a second time",
        f"command=({shlex.join(command)})",
    ]
    return "\n".join([*lines, (Path(__file__).parent / "job.sh").read_text()])
