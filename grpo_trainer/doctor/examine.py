"""All checks, in the order in which their answers are of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_common.errors import Problem
from grpo_common.models import find_folder
from grpo_trainer.config.rules import Hardware, check
from grpo_trainer.config.run import RunConfig
from grpo_trainer.doctor import machine_checks as of_machine
from grpo_trainer.doctor import run_checks as of_run
from grpo_trainer.doctor.disk import check_disk
from grpo_trainer.doctor.findings import Finding, fail, ok, skip
from grpo_trainer.doctor.hub import check_name
from grpo_trainer.doctor.trials import check_cuda_ipc, check_nccl
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.launch.trial import Trials, trying
from grpo_trainer.machine import Machine
from grpo_trainer.memory import MemoryPlan
from grpo_trainer.model.shape import ModelFiles, ModelShape, read_model
from grpo_trainer.run_defaults import chosen


def _trying_all(config: RunConfig) -> AbstractContextManager[Trials]:
    return trying(config, everything=True)


@dataclass(frozen=True)
class Probes:
    """The checks that start processes of their own.

    Attributes:
        ipc: tries CUDA IPC; called with `on_gpu` and `needed`.
        nccl: tries NCCL; called with `gpus`, their number.
        named: whether a model's name means anything; it may ask the hub.
        trying: tries the environments in the background.
    """

    ipc: Callable[..., Finding] = check_cuda_ipc
    nccl: Callable[..., Finding] = check_nccl
    named: Callable[[str], Finding] = check_name
    trying: Callable[[RunConfig], AbstractContextManager[Trials]] = _trying_all


@dataclass(frozen=True)
class Examination:
    """What was found. `memory` is None where it can't be planned."""

    findings: tuple[Finding, ...]
    memory: MemoryPlan | None = None

    @property
    def fails(self) -> bool:
        return any(finding.status == "fail" for finding in self.findings)


def examine(machine: Machine, config: RunConfig | ConfigError | None, probes: Probes | None = None) -> Examination:
    """Run the checks.

    Args:
        config: the run; or the error of its configuration; None: look at the machine alone.
    """
    probes = probes or Probes()
    run = config if isinstance(config, RunConfig) else None
    findings = list(_machine(machine, run, probes))
    if isinstance(config, ConfigError):
        findings += [_refusal("configuration", each) for each in config.problems]
    if run is None:
        return Examination(tuple(findings))
    with probes.trying(run) as trials:
        return _of_run(machine, run, probes, findings, trials)


def _of_run(machine: Machine, run: RunConfig, probes: Probes, findings: list[Finding], trials: Trials) -> Examination:
    """Add the checks of a run to the machine's; meanwhile its environments are tried."""
    problems = check(run, Hardware(machine.on_gpu, len(machine.gpus)))
    together = [_refusal("options together", each) for each in problems]
    findings += [
        ok("configuration", f"--model-name {run.trainer.model.name}, --weight-bridge-mode {run.trainer.bridge.mode}"),
        *(together or [ok("options together", "no rule speaks against them")]),
        of_run.check_wandb(run.trainer, machine.environment, Path.home()),
        of_run.check_ports(run),
        of_run.check_run_folder(run),
    ]
    files, found = _model_files(run.trainer.model.name, probes)
    shape, shape_found = _shape(files)
    run = chosen(run, machine, shape)
    findings += [found, *shape_found, check_disk(run.trainer, run.run_dir, shape, on_gpu=machine.on_gpu)]
    findings += [of_run.check_lr(run.trainer, shape), of_run.check_distribution(run, shape)]
    plan = None
    if files is not None:
        findings += [of_run.check_tokenizer(files), of_run.check_kind(files)]
        findings += [of_run.check_shareable(run.trainer, files), of_run.check_lora_modules(run.trainer, files)]
    if shape is not None:
        findings.append(of_run.check_length(run, shape))
        if run.options.cluster is None:
            findings.append(
                of_run.check_spread(of_run.server_spread(run), shape, machine, shares=run.trainer.shares_weights)
            )
            memory, plan = of_run.check_memory(run, shape, machine)
            findings.append(memory)
        else:
            findings.append(skip("memory", "this machine is one of a cluster; see grpo run --dry-run"))
    findings += [of_run.check_environment(outcome) for outcome in trials.outcomes()]
    if not run.options.try_environments:
        findings.append(skip("environments", "--no-try: not tried"))
    return Examination(tuple(findings), plan)


def _refusal(name: str, problem: Problem) -> Finding:
    return fail(name, str(replace(problem, wanted="", fix="")), problem.wanted, problem.fix)


def _machine(machine: Machine, run: RunConfig | None, probes: Probes) -> Iterator[Finding]:
    shares = run is not None and run.trainer.shares_weights
    server = of_run.server_spread(run) if run else None
    yield of_machine.check_python(machine)
    for package in ("torch", "vllm", "transformers", "peft"):
        yield of_machine.check_package(machine, package)
    yield of_machine.check_pins(machine)
    yield of_machine.check_gpu(machine)
    yield of_machine.check_driver(machine)
    yield of_machine.check_expandable_segments(machine, shares=shares)
    yield probes.ipc(on_gpu=machine.on_gpu, needed=shares)
    yield probes.nccl(gpus=len(machine.gpus))
    yield of_machine.check_shm(machine, workers=server.workers if server else 1)


def _model_files(name: str, probes: Probes) -> tuple[ModelFiles | None, Finding]:
    named, folder = probes.named(name), find_folder(name)
    if named.status != "ok" or folder is None:
        return None, named
    try:
        files = read_model(folder)
    except ModelError as error:
        return None, fail("model", f"{error.field}: {error.got}", error.wanted, error.fix)
    return files, ok("model", f"{folder}: {len(files.shapes)} tensors")


def _shape(files: ModelFiles | None) -> tuple[ModelShape | None, list[Finding]]:
    if files is None:
        return None, [skip("memory", "can't be planned without the model's files")]
    try:
        return ModelShape.from_config(files.config), []
    except ValueError as error:
        return None, [skip("memory", f"can't be planned: {error}")]
