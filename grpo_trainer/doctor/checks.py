"""`grpo doctor`: all checks, in the order in which their findings are printed.

A check is a function that returns findings: those of `MACHINE_CHECKS` judge the machine, those of `RUN_CHECKS` a run on
it. Without a run nothing imports torch.
"""

from __future__ import annotations

import importlib.util
import netrc
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from grpo_common.errors import Problem, UserError
from grpo_common.models import config_parts, find_folder
from grpo_common.ports import port_holder
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.rules import Hardware, check
from grpo_trainer.config.server import arguments
from grpo_trainer.doctor import trials
from grpo_trainer.doctor.before_start import (
    Finding,
    check_disk,
    check_lr,
    check_memory,
    check_name,
    existing,
    fail,
    ok,
    skip,
    warn,
)
from grpo_trainer.errors import ConfigError, GrpoError, ModelError
from grpo_trainer.files import refuse_to_mix_runs
from grpo_trainer.launch.ports import is_free
from grpo_trainer.launch.trial import Trials, trying
from grpo_trainer.machine import Machine, links_in_words
from grpo_trainer.memory import GB, MemoryPlan, Server
from grpo_trainer.model.shape import ModelFiles, ModelShape, read_model, read_shape
from grpo_trainer.run_defaults import chosen
from grpo_trainer.saving.manifest import refuse_unreadable
from grpo_trainer.shared.names import ALIKE, EXPERTS, not_shareable
from vllm_server.protocol import VLLM_RUN, WORKER_QUEUE_BYTES

SUPPORTED = {
    "python": ">=3.11,<3.13",
    "torch": ">=2.11,<3",
    "vllm": f">={VLLM_RUN},<0.34",
    "transformers": ">=5,<6",
    "peft": ">=0.18,<1",
}
"""What is supported; `tests/unit/test_doctor.py` compares it with pyproject.toml."""

DRIVERS = {"12": 525, "13": 580}
"""CUDA's major version, which torch's build names -> the oldest branch of NVIDIA's driver that runs it
(https://docs.nvidia.com/deploy/cuda-compatibility)."""

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

SHM_NEEDED, SHM_COMFORTABLE, SHM_PARALLEL = 16 << 20, WORKER_QUEUE_BYTES, 1 << 30
"""Bytes: what NCCL, CUDA IPC and vLLM's queues need at least; that are enough; that several workers want."""

BENDING = {
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--override-generation-config": "",
}
"""Arguments of a server that change what it samples from, or the logprobs of it; and their value that does not."""


@dataclass
class MachineCase:
    """The machine; of a run only what its checks need."""

    machine: Machine
    shares: bool = False
    """Whether the run's trainer uses the server's weights."""
    workers: int = 1
    """Processes of the run's server."""


@dataclass
class Case:
    """A run on a machine."""

    machine: Machine
    given: RunConfig
    trials: Trials | None = None
    """Of the run's environments; None: they are not tried."""
    memory: MemoryPlan | None = None
    """Set by the check of the memory; None: it can't be planned."""

    @cached_property
    def run(self) -> RunConfig:
        """The run, with the options that nobody gave."""
        return chosen(self.given, self.machine, self.shape[0])

    @cached_property
    def files(self) -> tuple[ModelFiles | None, Finding]:
        """The model's files; and what is said of them."""
        name = self.given.trainer.model_name
        named, folder = check_name(name), find_folder(name)
        if named.status != "ok" or folder is None:
            return None, named
        try:
            files = read_model(folder)
        except ModelError as error:
            return None, fail("model", f"{error.field}: {error.got}", error.wanted, error.fix)
        return files, ok("model", f"{folder}: {len(files.shapes)} tensors")

    @cached_property
    def shape(self) -> tuple[ModelShape | None, str]:
        """The model's sizes; or why they are not known."""
        files, _ = self.files
        if files is None:
            return None, "can't be planned without the model's files"
        try:
            return read_shape(files.folder, files.config), ""
        except ValueError as error:
            return None, f"can't be planned: {error}"


def examine(machine: Machine, config: RunConfig | ConfigError | None) -> tuple[list[Finding], MemoryPlan | None]:
    """Run the checks.

    Args:
        config: the run; or the error of its configuration; None: look at the machine alone.

    Returns:
        The findings; and the memory plan, None where it can't be planned.
    """
    if not isinstance(config, RunConfig):
        refused = [_refusal("configuration", problem) for problem in (config.problems if config else ())]
        return [*_findings(MACHINE_CHECKS, MachineCase(machine)), *refused], None
    case = MachineCase(machine, config.trainer.shares_weights, Server.of(config).workers)
    findings = _findings(MACHINE_CHECKS, case)
    with trying(config, everything=True) as trials:  # in the background
        case = Case(machine, config, trials)
        return [*findings, *_findings(RUN_CHECKS, case)], case.memory


C = TypeVar("C", MachineCase, Case)
Check = Callable[[C], Finding | Iterable[Finding] | None]
"""Returns what it found: nothing where another check says what is missing."""


def _findings(checks: Iterable[Check[C]], case: C) -> list[Finding]:
    found = (check(case) for check in checks)
    return [finding for each in found if each for finding in ([each] if isinstance(each, Finding) else each)]


# the machine, and what is installed on it -------------------------------------------------------------------


def python(case: MachineCase) -> Finding:
    version, wanted = case.machine.python, SUPPORTED["python"]
    if Version(version) in SpecifierSet(wanted):
        return ok("python", version)
    return fail("python", version, wanted, "make a virtual environment with python3.11 or python3.12")


def packages(case: MachineCase) -> Iterator[Finding]:
    """Are they of a supported version? vLLM's CPU build is a package of another name."""
    machine = case.machine
    build = "gpu" if machine.on_gpu else "cpu"
    for name in ("torch", "vllm", "transformers", "peft"):
        package, wanted = machine.vllm if name == "vllm" else name, SUPPORTED[name]
        text = machine.version(package) if package else None
        if package is None or text is None:
            yield fail(name, "not installed", wanted, f"pip install 'grpo-trainer[{build}]'")
            continue
        version, got = Version(text), f"{package} {text}" if name == "vllm" else text
        if name == "vllm" and machine.on_gpu and not machine.serves_on_gpu:
            fix = "pip install 'grpo-trainer[gpu]'"
            yield fail(name, f"{got} on a machine with a GPU", "the CUDA build", fix)
        elif name == "vllm" and version < Version("0.2.dev0"):  # 0.1.devN: built from its repository without tags
            fix = f"if the run fails, pip install '{package}=={VLLM_RUN}.*'"
            yield warn(name, f"{got}, a build from source of unknown version", wanted, fix)
        elif version not in SpecifierSet(wanted, prereleases=True):
            yield fail(name, got if name == "vllm" else f"{name} {text}", wanted, f"pip install '{package}{wanted}'")
        elif name == "vllm" and version.release[:2] > Version(VLLM_RUN).release:
            yield warn(name, got, f"{VLLM_RUN}, the newest that was run", f"pip install '{package}=={VLLM_RUN}.*'")
        else:
            yield ok(name, got)


def versions_together(case: MachineCase) -> Finding:
    """Do vLLM's own requirements of torch and transformers hold? pip says so only while it installs."""
    machine, name = case.machine, "versions together"
    if (package := machine.vllm) is None:
        return skip(name, "vLLM is not installed")
    for need in map(Requirement, machine.requires(package)):
        if need.name not in ("torch", "transformers") or (need.marker and not need.marker.evaluate()):
            continue
        have = machine.version(need.name)
        if have is not None and not _satisfies(have, need.specifier):
            wanted = f"{need.name}{need.specifier}, which {package} {machine.version(package)} is built for"
            return fail(name, f"{need.name} {have}", wanted, f"pip install '{need.name}{need.specifier}'")
    return ok(name, f"as {package} wants them")


def _satisfies(version: str, specifier: SpecifierSet) -> bool:
    """The local part (+cpu, +cu130) says who built it, not what it is."""
    try:
        plain = Version(version).public
    except InvalidVersion:
        return True
    return SpecifierSet(str(specifier).partition("+")[0]).contains(plain, prereleases=True)


def gpu(case: MachineCase) -> Finding:
    machine = case.machine
    names = ", ".join(f"{gpu.name} ({gpu.free / GB:.0f} of {gpu.total / GB:.0f} GB free)" for gpu in machine.gpus)
    if machine.gpu_problem:
        fix = "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there"
        if "CUDA_VISIBLE_DEVICES" not in machine.gpu_problem:
            fix = "make `nvidia-smi` work: driver, container toolkit (docker run --gpus all)"
        return fail("gpu", machine.gpu_problem, "GPUs that can be used, or none", fix)
    if not machine.gpus:
        return skip("gpu", f"none; on the CPU, {machine.memory / GB:.0f} GB of main memory")
    if any(gpu.free < 0.9 * gpu.total for gpu in machine.gpus):
        fix = "see `nvidia-smi` for who uses it; end that, or choose another by CUDA_VISIBLE_DEVICES"
        return warn("gpu", names, "GPUs of which nine tenths are free", fix)
    return ok("gpu", names)


def driver(case: MachineCase) -> Finding:
    """Is the driver new enough for the CUDA that torch was built with?"""
    installed = case.machine.driver
    build = (case.machine.version("torch") or "").partition("+")[2]
    if installed is None:
        return skip("driver", "no GPU")
    if build == "cpu":
        fix = "pip uninstall torch, then pip install 'grpo-trainer[gpu]'"
        return fail("driver", "torch's CPU build on a machine with a GPU", "its CUDA build", fix)
    if not build.startswith("cu"):
        return ok("driver", installed)
    cuda = build[2:4]
    needed = DRIVERS.get(cuda, max(DRIVERS.values()))
    if int(installed.partition(".")[0]) < needed:
        got, fix = f"{installed}, with torch built for CUDA {cuda}", "install torch for an older CUDA"
        return fail("driver", got, f"{needed} or newer", f"update NVIDIA's driver, or {fix}")
    return ok("driver", f"{installed} for CUDA {cuda}")


def expandable_segments(case: MachineCase) -> Finding:
    """Weights in segments that grow can't be mapped by another process."""
    name = "expandable segments"
    for variable in ALLOCATOR_SETTINGS if case.shares else ():
        value = case.machine.environment.get(variable, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            wanted = "off: the memory of shared weights must be whole"
            return fail(name, f"{variable}={value}", wanted, f"unset {variable}")
    return ok(name, "off" if case.shares else "no matter here")


def cuda_ipc(case: MachineCase) -> Finding:
    """What shared weights need, and the transport `cuda_ipc`; other runs have slower transports."""
    name, wanted = "CUDA IPC", "a second process that reads the first one's memory"
    if not case.machine.on_gpu:
        return skip(name, "no GPU; on a CPU processes map one file")
    if (why := trials.tried("ipc")) is None:
        return ok(name, "a second process read and wrote this one's memory")
    fix = "run both in one container with --ipc=host (not WSL), without MIG and without expandable segments"
    if case.shares:
        return fail(name, why, wanted, fix)
    return warn(name, why, wanted, f"{fix}; or --lora-transport memory")


def nccl(case: MachineCase) -> Finding:
    """A broadcast between the first two GPUs, and how all are connected; without NCCL slower transports remain."""
    if len(case.machine.gpus) < 2:
        return skip("NCCL", "fewer than two GPUs")
    why, links = trials.tried("nccl"), links_in_words()
    if why is None:
        return ok("NCCL", f"a broadcast reached a second GPU; {links}")
    fix = "set NCCL_DEBUG=INFO to see why; until then use --broadcast-transport gloo or --lora-transport memory"
    return warn("NCCL", f"{why}; {links}", "a broadcast from the first GPU to the second", fix)


def shared_memory(case: MachineCase) -> Finding:
    """Shared memory files: NCCL, CUDA IPC's counters, and the queues between vLLM's processes lie there."""
    name, folder = "/dev/shm", case.machine.shm
    if not folder.is_dir():
        return fail(name, "not there", "a tmpfs", "mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage(folder)
    got = f"{usage.free / 1e6:.0f} MB free of {usage.total / 1e6:.0f}"
    needed = SHM_PARALLEL if case.workers > 1 else SHM_NEEDED
    fix = "docker run --shm-size 8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    if usage.free < needed:
        return fail(name, got, f"{needed / 1e6:.0f} MB or more", fix)
    if usage.free < SHM_COMFORTABLE:
        return warn(name, got, f"{SHM_COMFORTABLE / 1e6:.0f} MB or more", fix)
    return ok(name, got)


def _refusal(name: str, problem: Problem) -> Finding:
    return fail(name, str(replace(problem, wanted="", fix="")), problem.wanted, problem.fix)


# a run's options, and what it writes and listens to ---------------------------------------------------------


def configuration(case: Case) -> Iterator[Finding]:
    trainer, machine = case.given.trainer, case.machine
    yield ok("configuration", f"--model-name {trainer.model_name}, --weight-bridge-mode {trainer.weight_bridge_mode}")
    problems = check(case.given, Hardware(machine.on_gpu, len(machine.gpus)))
    yield from (_refusal("options together", problem) for problem in problems)
    if not problems:
        yield ok("options together", "no rule speaks against them")


def wandb(case: Case) -> Finding:
    """W&B without a key asks for one on a terminal that a run does not have."""
    environment = case.machine.environment
    mode = environment.get("WANDB_MODE", "online")
    if "wandb" not in case.given.trainer.trackers:
        return skip("wandb", "not asked for")
    if mode in ("offline", "disabled", "dryrun"):
        return ok("wandb", mode)
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        logins = netrc.netrc(str(environment.get("NETRC") or Path.home() / ".netrc"))
        has_login = logins.authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        has_login = False
    if environment.get("WANDB_API_KEY") or has_login:
        return ok("wandb", "has a key")
    return fail("wandb", "no API key", "one", "`wandb login`, or WANDB_API_KEY=…, or WANDB_MODE=offline")


def ports(case: Case) -> Finding:
    config = case.given
    wanted = {"api": config.api.port, **config.server.wanted_ports}
    busy = [(table, port) for table, port in wanted.items() if port and not is_free("127.0.0.1", port)]
    if busy:
        got = ", ".join(f"{port} is held by {port_holder(port)}" for _, port in busy)
        tables = dict.fromkeys(table.partition("-")[0] for table, _ in busy)
        fix = " and ".join(f"--{table}.port 0 (any free one)" for table in tables)
        return fail("ports", got, "free ones", f"end that, or {fix}")
    if wanted["api"] and wanted["api"] in [port for table, port in wanted.items() if table != "api"]:
        return fail("ports", f"{wanted['api']} twice", "one for each process", "--server.port 0 (any free one)")
    return ok("ports", ", ".join(f"{table} {port or 'any'}" for table, port in wanted.items()))


def run_folder(case: Case) -> Finding:
    """May it be written, and is it free?"""
    name, folder, resume = "run folder", case.given.run_dir, case.given.trainer.resume
    there, other = existing(folder), "choose another --run-dir"
    try:
        refuse_to_mix_runs(folder, resume, "--run-dir")
    except GrpoError:
        return fail(name, f"{folder} holds a run already", "a new folder", "--resume auto, or another --run-dir")
    try:
        if resume == "auto":
            refuse_unreadable(folder / "checkpoints")
    except UserError as error:
        return fail(name, error.got, error.wanted, error.fix)
    probe = there / ".grpo_doctor"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        is_file = not there.is_dir()
        got = f"{there} is a file" if is_file else f"{there} may not be written"
        return fail(name, got, "a folder" if is_file else "a folder of yours", other)
    return ok(name, str(folder))


def disk(case: Case) -> Finding:
    return check_disk(case.run.trainer, case.run.run_dir, case.shape[0], on_gpu=case.machine.on_gpu)


def learning_rate(case: Case) -> Finding:
    return check_lr(case.run.trainer, case.shape[0])


def distribution(case: Case) -> Finding:
    """Does the server sample from the distribution that the trainer computes?"""
    bent = list(_bent(case.run, case.shape[0]))
    if not bent:
        return ok("distribution", "samples and trainer have the same")
    got, fixes = zip(*bent, strict=True)
    wanted = "the same distribution on both sides (docs/training.md)"
    return warn("distribution", "; ".join(got), wanted, "; ".join(fixes))


def _bent(config: RunConfig, shape: ModelShape | None) -> Iterator[tuple[str, str]]:
    """Yield what bends it, and the fix."""
    trainer, vllm = config.trainer, config.trainer.server
    if shape is not None and shape.experts and trainer.routing_replay == "off":
        yield "experts that each side chooses for itself", "add --routing-replay server"
    coarse = "--load-in-4bit" if trainer.load_in_4bit else "a server in 8 bits" if vllm.in_8_bits else ""
    if coarse and trainer.correction == "none":
        yield f"{coarse} without a correction", "use --ratio-against trainer"
    for flag, value in arguments(vllm.extra_args):
        name = flag.replace("_", "-")
        if name in BENDING and value != BENDING[name]:
            yield f"{flag} {value}".rstrip(), f"leave {flag} out"


def environments(case: Case) -> Iterator[Finding]:
    """Did the trials of the run's environments go well?"""
    for outcome in case.trials.outcomes() if case.trials else ():
        name = f"environment {outcome.environment}"
        if outcome.problems:
            problem, *others = outcome.problems
            got = "; ".join([str(replace(problem, wanted="", fix="")), *map(str, others)])
            yield fail(name, got, problem.wanted or "no error", problem.fix or "correct it")
        elif not outcome.found:
            yield warn(name, f"not tried to its end: {outcome.doing}", "an end within 20 s", "--no-try leaves it out")
        else:
            yield ok(name, outcome.found)
    if not case.run.options.try_environments:
        yield skip("environments", "--no-try: not tried")


# the model, and where it goes -------------------------------------------------------------------------------


def model(case: Case) -> Finding:
    return case.files[1]


def tokenizer(case: Case) -> Finding | None:
    files, _ = case.files
    if files is None:
        return None
    if files.has_tokenizer:
        return ok("tokenizer", str(files.folder))
    wanted = "tokenizer.json or tokenizer.model in the model's folder"
    fix = f"AutoTokenizer.from_pretrained(BASE).save_pretrained('{files.folder}')"
    return fail("tokenizer", f"none in {files.folder}", wanted, fix)


def decoder_only(case: Case) -> Finding | None:
    """Is it a model that can be trained and served?"""
    if case.files[0] is None:
        return None
    from grpo_trainer.model.check import check_model  # imports transformers and torch
    from grpo_trainer.model.text_part import text_config_of

    try:
        config = check_model(str(case.files[0].folder))
    except ModelError as error:
        return fail("decoder-only", error.summary, error.wanted, "choose another --model-name")
    if text_config_of(config) is not None and importlib.util.find_spec("torchvision") is None:
        got, wanted = f"{config.model_type} without torchvision", "torchvision, without which vLLM does not serve it"
        return warn("decoder-only", got, wanted, "install torchvision's build for this torch (docs/training.md)")
    return ok("decoder-only", config.model_type)


def shared_weights(case: Case) -> Finding | None:
    """Can the trainer's parameters be views of the server's?"""
    files, name = case.files[0], "shared weights"
    if files is None:
        return None
    if not case.run.trainer.shares_weights:
        return skip(name, f"--weight-bridge-mode {case.run.trainer.weight_bridge_mode} needs none")
    strange = [
        tensor
        for tensor, shape in sorted(files.shapes.items())
        if len(shape) > 1 and _module(tensor) not in ALIKE and tensor.rpartition(".")[2] not in EXPERTS
    ]
    fix = "--weight-bridge-mode lora_only (without --share-base) or broadcast"
    if any(part.get("quantization_config") or part.get("compression_config") for part in config_parts(files.config)):
        wanted = "plain ones, which can be trained in place"
        return fail(name, "quantised weights (quantization_config)", wanted, fix)
    if why := not_shareable(files.config):
        return fail(name, why, "a model whose weights both can share", fix)
    if strange:
        got = f"{strange[0]} {list(files.shapes[strange[0]])} and {len(strange) - 1} more"
        return fail(name, got, "modules whose rows vLLM is known to lay out alike", fix)
    return ok(name, "every matrix has a known place")


def lora_modules(case: Case) -> Finding | None:
    files, trainer, name = case.files[0], case.run.trainer, "LoRA modules"
    if files is None:
        return None
    if not trainer.trains_adapter or not files.shapes:
        return skip(name, "no adapter" if files.shapes else "no safetensors to look into")
    names = [tensor for tensor, shape in files.shapes.items() if len(shape) > 1]
    if files.config.get("text_config"):
        names = [tensor for tensor in names if "language_model." in tensor]
    present = {_module(tensor) for tensor in names}
    missing = [module for module in trainer.lora_target_modules if module not in present]
    if missing:
        wanted = f"some of {', '.join(sorted(present - {'embed_tokens', 'lm_head'}))}"
        fix = f"--lora-target-modules {','.join(m for m in trainer.lora_target_modules if m in present) or '…'}"
        return fail(name, f"the model has no {', '.join(missing)}", wanted, fix)
    return ok(name, ", ".join(trainer.lora_target_modules))


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0].rpartition(".")[2]


def sequence_length(case: Case) -> Finding | None:
    shape, trainer = case.shape[0], case.run.trainer
    if shape is None:
        return None
    longest = max(trainer.seq_len, trainer.served_len)
    if shape.positions and longest > shape.positions:
        wanted = f"at most the model's {shape.positions}"
        return fail("sequence length", f"{longest} tokens", wanted, f"--seq-len {shape.positions}")
    return ok("sequence length", f"{trainer.seq_len} trained, {trainer.served_len} served")


def servers_gpus(case: Case) -> Finding | None:
    """Do the server's degrees divide the model and fit the machine?"""
    shape, server, name = case.shape[0], Server.of(case.run), "server's GPUs"
    visible = len(case.machine.gpus)
    if shape is None or case.run.options.cluster is not None:
        return None
    shares = case.run.trainer.shares_weights
    heads = shape.kv_heads if shares else shape.heads  # a server that shares nothing repeats key-value heads
    if server.workers > 1 and server.workers > visible and visible:
        got = f"{server.workers} wanted by {server.wanted_by}, {visible} visible"
        return fail(name, got, "as many as are there", f"lower {server.wanted_by}")
    if server.placed and visible and max(server.placed) >= visible:
        got = f"--server.gpus names GPU {max(server.placed)}, {visible} visible"
        return fail(name, got, f"numbers below {visible}", "correct --server.gpus")
    if heads % server.tensor_parallel:
        got = f"{heads} attention heads{' of keys and values' if shares else ''} on {server.tensor_parallel} GPUs"
        return fail(name, got, "a divisor of the heads", "choose another --server.tensor-parallel-size")
    if server.pipeline_parallel > shape.layers:
        got = f"{shape.layers} layers on {server.pipeline_parallel} GPUs"
        return fail(name, got, "a layer for each GPU, at least", "choose another --server.pipeline-parallel-size")
    if visible:
        return ok(name, str(server.workers))
    return skip(name, "on the CPU")


def memory(case: Case) -> Finding:
    shape, why = case.shape
    if shape is None:
        return skip("memory", why)
    if case.run.options.cluster is not None:
        return skip("memory", "this machine is one of a cluster; see grpo run --dry-run")
    finding, case.memory = check_memory(case.run, shape, case.machine)
    return finding


MACHINE_CHECKS: tuple[Check[MachineCase], ...] = (
    *(python, packages, versions_together, gpu, driver, expandable_segments, cuda_ipc, nccl, shared_memory),
)
RUN_CHECKS: tuple[Check[Case], ...] = (
    *(configuration, wandb, ports, run_folder, model, disk, learning_rate, distribution),
    *(tokenizer, decoder_only, shared_weights, lora_modules, sequence_length, servers_gpus, memory, environments),
)
"""In the order in which their findings are printed."""
