"""A Slurm job script for a run: it starts Ray on the job's nodes, and `grpo run --cluster` on the first one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_common.redaction import redacted_arguments
from grpo_trainer.config.run import RunConfig
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
    """What a job script depends on.

    Attributes:
        plan: the processes, with their places on nodes of such a job.
        nodes: their number.
        gpus_per_node: 0: none are asked for.
        command: the words after `grpo run`, without those of the cluster.
        folder: where the run is started.
        programs: the folder of `grpo` and `ray`.
    """

    plan: RunPlan
    nodes: int
    gpus_per_node: int
    command: tuple[str, ...]
    folder: Path
    programs: Path


def nodes_of_job(config: RunConfig, gpus_per_node: int) -> list[Node]:
    """Return the fewest equal nodes that hold the run, at least `--cluster-nodes`.

    Raises:
        ConfigError: no number of such nodes holds it.
    """
    least = config.options.cluster_nodes
    if gpus_per_node == 0:
        return _nodes(least, 0)
    most = least + gpus_of_run(config)
    for number in range(least, most):
        with suppress(ConfigError):
            place_run(config, nodes := _nodes(number, gpus_per_node), on_gpu=True)
            return nodes
    place_run(config, nodes := _nodes(most, gpus_per_node), on_gpu=True)
    return nodes


def _nodes(number: int, gpus: int) -> list[Node]:
    return [Node(f"node {n + 1}", f"node-{n + 1}", gpus, id=str(n), is_head=n == 0) for n in range(number)]


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of `grpo run` that a job repeats.

    Raises:
        ConfigError: one of them holds a key, which the script would show.
    """
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
    """Return the script, for `sbatch`."""
    seconds = int(max(process.stop_seconds for process in job.plan.processes)) + SPARE_SECONDS
    command = [*job.command, "--cluster", "auto", "--cluster-nodes", str(job.nodes)]
    lines = [
        "#!/bin/bash",
        "# Made by `grpo run --slurm`: starts Ray on the nodes of a job, and the run on the first one.",
        "# Options of sbatch win over those below: sbatch --partition=P --time=12:00:00 THIS_FILE",
        *_placement(job.plan),
        "#SBATCH --job-name=grpo",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        *([f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "#SBATCH --output=grpo-%j.log",
        "# Before the time limit, so that the trainer can save a checkpoint.",
        f"#SBATCH --signal=B:TERM@{seconds}",
        "set -euo pipefail",
        "umask 077",
        f"cd {shlex.quote(str(job.folder))}",
        f"programs={shlex.quote(str(job.programs))}",
        _BODY.format(command=" ".join(map(shlex.quote, command))),
    ]
    return "\n".join(lines)


def _placement(plan: RunPlan) -> Iterator[str]:
    """Yield a comment for each process."""
    yield "#"
    for process in plan.processes:
        place = process.place
        node = place.node.name if place.node else "node 1"
        gpus = f", GPU {','.join(map(str, place.gpus))}" if place.gpus else ""
        yield f"#   {process.name:<20} {node}{gpus}"
    yield "#"


_BODY = """\
ray=$programs/ray

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" \\
    "$programs/python" -c 'import ray; print(ray.util.get_node_ip_address())')
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS=$address:$port RAY_USAGE_STATS_ENABLED=0

# Anyone who reaches Ray could run programs, so it requires this token, which only the job's processes have.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

started=()
# shellcheck disable=SC2329 # the trap calls it
finish() {{
    [ "${{#started[@]}}" -eq 0 ] || kill "${{started[@]}}" 2>/dev/null || true
    wait
}}
trap finish EXIT

cores=(--cpus-per-task="${{SLURM_CPUS_ON_NODE:-1}}")
srun --overlap "${{cores[@]}}" --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" \\
    "$ray" start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --block &
started+=($!)
others=$((${{#nodes[@]}} - 1))
if [ "$others" -gt 0 ]; then
    srun --overlap "${{cores[@]}}" --nodes="$others" --ntasks="$others" --exclude="${{nodes[0]}}" \\
        "$ray" start --address="$RAY_ADDRESS" --block &
    started+=($!)
fi

# shellcheck disable=SC2016 # what was typed is not expanded a second time
"$programs/grpo" run {command} &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM INT
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal has ended the wait, not the run
    code=0
    wait "$run" || code=$?
done
exit "$code"
"""
