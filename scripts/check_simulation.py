#!/usr/bin/env python
"""Does `simulate_scale.py` predict what runs do? Costs from runs of one server, then predictions against other runs.

python scripts/check_simulation.py OUT              a CPU with two cores that do nothing else; about 15 minutes
python scripts/check_simulation.py OUT --rounds 5   more runs of each

All runs are `grpo bench loop --shape tiny` with `lora_only` and one thread a process (OMP_NUM_THREADS=1). Two runs of
one server, which differ in batch and lengths, give the CPU time that each process takes. From these alone the goodput
of a third workload is predicted, with one server and with two, which share the cores. Then that workload runs. The
speed of a core can change from minute to minute, so each round measures all four one after the other, and the table
has the medians of the rounds. OUT keeps each run's line as NAME.json; a line that is there is not measured again.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulate_scale import Costs, Setup, simulate

from grpo_trainer.bench.loop.options import GROUP
from grpo_trainer.bench.shapes import SHAPES

VOCABULARY = SHAPES["tiny"].vocab
PROMPT = 16
WARMUP = 5
SEEDS = range(8)
"""A prediction is the mean of these simulations."""

Line = Mapping[str, Any]
"""What `grpo bench loop` prints."""


@dataclass(frozen=True)
class Workload:
    """Sizes of a run.

    Attributes:
        ends: token ids of the vocabulary that end a completion.
        longest: tokens at which a completion is truncated.
    """

    sequences: int
    ends: int
    longest: int

    @property
    def mean(self) -> float:
        """Return the mean tokens of a completion before truncation."""
        return VOCABULARY / self.ends


CALIBRATION = (Workload(64, 4, 96), Workload(128, 2, 160))
HELD = Workload(96, 3, 128)
SERVERS = (1, 2)


def measured(out: Path, name: str, workload: Workload, servers: int, steps: int) -> Line:
    """Return the line of a run, which is measured unless `out` has it."""
    file = out / f"{name}.json"
    if not file.exists():
        asked = {
            "shape": "tiny", "bridge": "lora_only", "model-dir": out / "model", "sequences": workload.sequences,
            "prompt-len": PROMPT, "completion-mean": workload.mean, "completion-len": workload.longest,
            "max-tokens-per-microbatch": 2048, "steps": steps, "warmup-steps": WARMUP,
        }  # fmt: skip
        command = [sys.executable, "-m", "grpo_trainer", "bench", "loop"]
        command += [word for flag, value in asked.items() for word in (f"--{flag}", str(value))]
        command += ["--", "--server.replicas", str(servers), "--checkpoint-interval", "0", "--compile", "off"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        file.write_text(done.stdout)
    return json.loads(file.read_text())


def line_through(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Return a and b of y = a + b x through two points (x, y)."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


@dataclass(frozen=True)
class Run:
    """A line's figures, as costs are made of them."""

    line: Line

    def cpu(self, *names: str) -> float:
        """Return seconds of CPU of processes for a group."""
        return sum(self.line["cpu_ms_per_group"][name] for name in names) / 1e3

    @property
    def groups(self) -> int:
        """Return the groups of a step."""
        return self.line["sequences"] // GROUP

    @property
    def tokens(self) -> float:
        """Return the completion tokens of a group."""
        return GROUP * self.line["completion_tokens_mean"]

    @property
    def step_tokens(self) -> float:
        """Return the tokens of a step, with prompts."""
        return self.line["trained_tokens_per_s"] * self.line["step_s"]

    @property
    def token_cpu(self) -> float:
        """Return seconds of CPU of the server for a completion token."""
        return self.cpu("server_front_end", "server_engine") / self.tokens

    @property
    def others(self) -> float:
        """Return the cores that `grpo run` itself and the measurement use."""
        return self.cpu("supervisor", "bench") * self.groups / self.line["step_s"]


def costs_from(first: Run, second: Run, workload: Workload) -> Costs:
    """Return the costs of a workload, each on the straight line through those of two other runs.

    A decode step of n sequences takes the server a + b n seconds, so that a token takes a / n + b. A training step
    takes a fixed time, which is `publish`, and one for each token. Environment and rollout API take a time for
    each group and one for each of its tokens.
    """
    both = (first, second)
    each, step = line_through(*((1 / run.line["server"]["running_mean"], run.token_cpu) for run in both))
    most = min(run.line["server"]["can_hold"] for run in both) // GROUP * GROUP
    fixed, token = line_through(*((run.step_tokens, run.cpu("trainer") * run.groups) for run in both))
    tokens = GROUP * setup_of(workload, 1).mean_tokens

    def of_group(name: str) -> float:
        start, more = line_through(*((run.tokens, run.cpu(name)) for run in both))
        return start + more * tokens

    return Costs(
        server_tokens=most / (step + each * most),
        server_groups=most // GROUP,
        growing=each * most / (step + each * most),
        trainer_tokens=1 / token,
        publish=fixed,
        publish_each=0.0,
        api=of_group("api"),
        environment=of_group("environment"),
    )


def setup_of(workload: Workload, servers: int, cores: float | None = None, seed: int = 0) -> Setup:
    """Return the simulated run of a workload."""
    return Setup(
        servers,
        trainer_gpus=1,
        batch_groups=workload.sequences // GROUP,
        group_size=GROUP,
        completion_tokens=workload.mean,
        prompt_tokens=PROMPT,
        longest=workload.longest,
        cores=cores,
        seed=seed,
    )


def predicted(first: Run, second: Run, workload: Workload, servers: int, cores: int) -> float:
    """Return the completion tokens a second that a workload would do, from two runs of others.

    Args:
        cores: of the machine.
    """
    costs, left = costs_from(first, second, workload), cores - fmean((first.others, second.others))
    return fmean(simulate(setup_of(workload, servers, left, seed), costs).tokens for seed in SEEDS)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, predict, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the lines")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each workload (default: %(default)s)")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    rounds: list[list[tuple[float, float]]] = []
    for number in range(1, given.rounds + 1):
        first, second = (
            Run(measured(given.out, f"{number}-calibration-{which}", workload, 1, given.steps))
            for which, workload in enumerate(CALIBRATION, 1)
        )
        print(f"round {number}: {costs_from(first, second, HELD)}", file=sys.stderr)
        held = [measured(given.out, f"{number}-held-{servers}", HELD, servers, given.steps) for servers in SERVERS]
        rounds.append(
            [
                (predicted(first, second, HELD, servers, cores), line["completion_tokens_per_s"])
                for servers, line in zip(SERVERS, held, strict=True)
            ]
        )
    print("| servers | predicted completion tokens/s | measured | error | error by round |\n|---|---|---|---|---|")
    for servers, pairs in zip(SERVERS, zip(*rounds, strict=True), strict=True):
        expected, found = (median(figures) for figures in zip(*pairs, strict=True))
        by_round = ", ".join(f"{one / other - 1:+.1%}" for one, other in pairs)
        print(f"| {servers} | {expected:,.0f} | {found:,.0f} | {expected / found - 1:+.1%} | {by_round} |")


if __name__ == "__main__":
    main()
