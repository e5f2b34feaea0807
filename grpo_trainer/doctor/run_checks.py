"""Checks of a run: what it reads, where it writes, whom it listens to, and whether its parts and settings fit."""

from __future__ import annotations

import importlib.util
import logging
import netrc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from grpo_common.errors import UserError
from grpo_common.models import config_parts
from grpo_common.ports import port_holder
from grpo_trainer.config.bridge import LoraOptions
from grpo_trainer.config.learning_rate import unusual
from grpo_trainer.config.run import RunConfig
from grpo_trainer.config.server import arguments
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.disk import existing
from grpo_trainer.doctor.findings import Finding, fail, ok, skip, warn
from grpo_trainer.doctor.memory_advice import Planned, advice, largest_rows
from grpo_trainer.errors import GrpoError, ModelError
from grpo_trainer.files import refuse_to_mix_runs
from grpo_trainer.launch.ports import is_free
from grpo_trainer.launch.trial import Outcome
from grpo_trainer.machine import Machine
from grpo_trainer.memory import GB, NEARLY_FULL, Devices, MemoryPlan, Server, device_name
from grpo_trainer.model.shape import ModelFiles, ModelShape, shape_of
from grpo_trainer.saving.manifest import refuse_unreadable
from grpo_trainer.shared.names import ALIKE, EXPERTS, not_shareable

log = logging.getLogger(__name__)

# where it writes, whom it listens to ------------------------------------------------------------------------


def check_run_folder(config: RunConfig) -> Finding:
    """May it be written, and is it free?"""
    name, folder = "run folder", config.run_dir
    try:
        refuse_to_mix_runs(folder, config.trainer.checkpoints.resume, "--run-dir")
    except GrpoError:
        return fail(name, f"{folder} holds a run already", "a new folder", "--resume auto, or another --run-dir")
    try:
        if config.trainer.checkpoints.resume == "auto":
            refuse_unreadable(folder / "checkpoints")
    except UserError as error:
        return fail(name, error.got, error.wanted, error.fix)
    there = existing(folder)
    if not there.is_dir():
        return fail(name, f"{there} is a file", "a folder", "choose another --run-dir")
    if not _writable(there):
        return fail(name, f"{there} may not be written", "a folder of yours", "choose another --run-dir")
    return ok(name, str(folder))


def _writable(folder: Path) -> bool:
    probe = folder / ".grpo_doctor"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def check_ports(config: RunConfig) -> Finding:
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


def check_environment(outcome: Outcome) -> Finding:
    """Did the environment's trial go well?"""
    name = f"environment {outcome.environment}"
    if outcome.problems:
        problem, *others = outcome.problems
        more = "".join(f"; {other}" for other in others)
        got = f"{replace(problem, wanted='', fix='')}{more}"
        return fail(name, got, problem.wanted or "no error", problem.fix or "correct it")
    if not outcome.found:
        return warn(name, f"not tried to its end: {outcome.doing}", "an end within 20 s", "--no-try leaves it out")
    return ok(name, outcome.found)


# the model -------------------------------------------------------------------------------------------------


def check_tokenizer(files: ModelFiles) -> Finding:
    if files.has_tokenizer:
        return ok("tokenizer", str(files.folder))
    fix = f"AutoTokenizer.from_pretrained(BASE).save_pretrained('{files.folder}')"
    return fail("tokenizer", f"none in {files.folder}", "tokenizer.json or tokenizer.model in the model's folder", fix)


def check_kind(files: ModelFiles) -> Finding:
    """Is it a decoder-only model, which can be trained and served?"""
    from grpo_trainer.model.check import check_model  # imports transformers and torch
    from grpo_trainer.model.text_part import text_config_of

    try:
        config = check_model(str(files.folder))
    except ModelError as error:
        return fail("decoder-only", error.summary, error.wanted, "choose another --model-name")
    if text_config_of(config) is not None and importlib.util.find_spec("torchvision") is None:
        got, wanted = f"{config.model_type} without torchvision", "torchvision, without which vLLM does not serve it"
        return warn("decoder-only", got, wanted, "install torchvision's build for this torch (docs/models.md)")
    return ok("decoder-only", config.model_type)


def check_shareable(config: TrainConfig, files: ModelFiles) -> Finding:
    """Can the trainer's parameters be views of the server's?"""
    name, fix = "shared weights", "--weight-bridge-mode lora_only (without --share-base) or broadcast"
    if not config.shares_weights:
        return skip(name, f"--weight-bridge-mode {config.bridge.mode} needs none")
    for part in config_parts(files.config):
        if part.get("quantization_config") or part.get("compression_config"):
            return fail(
                name, "quantised weights (quantization_config)", "plain ones, which can be trained in place", fix
            )
    if why := not_shareable(files.config):
        return fail(name, why, "a model whose weights both can share", fix)
    strange = [
        tensor
        for tensor, shape in sorted(files.shapes.items())
        if len(shape) > 1 and _module(tensor) not in ALIKE and tensor.rpartition(".")[2] not in EXPERTS
    ]
    if strange:
        got = f"{strange[0]} {list(files.shapes[strange[0]])} and {len(strange) - 1} more"
        return fail(name, got, "modules whose rows vLLM is known to lay out alike", fix)
    return ok(name, "every matrix has a known place")


def check_lora_modules(config: TrainConfig, files: ModelFiles) -> Finding:
    name = "LoRA modules"
    if not isinstance(config.bridge, LoraOptions) or not files.shapes:
        return skip(name, "no adapter" if files.shapes else "no safetensors to look into")
    names = [tensor for tensor, shape in files.shapes.items() if len(shape) > 1]
    if files.config.get("text_config"):
        names = [tensor for tensor in names if "language_model." in tensor]
    present = {_module(tensor) for tensor in names}
    missing = [module for module in config.bridge.target_modules if module not in present]
    if missing:
        wanted = f"some of {', '.join(sorted(present - {'embed_tokens', 'lm_head'}))}"
        fix = f"--lora-target-modules {','.join(m for m in config.bridge.target_modules if m in present) or '…'}"
        return fail(name, f"the model has no {', '.join(missing)}", wanted, fix)
    return ok(name, ", ".join(config.bridge.target_modules))


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0].rpartition(".")[2]


def check_length(config: RunConfig, shape: ModelShape) -> Finding:
    trained = config.trainer.model.seq_len
    served = config.trainer.served_len
    longest = max(trained, served)
    if shape.positions and longest > shape.positions:
        got = f"{longest} tokens"
        return fail("sequence length", got, f"at most the model's {shape.positions}", f"--seq-len {shape.positions}")
    return ok("sequence length", f"{trained} trained, {served} served")


# what it learns --------------------------------------------------------------------------------------------


def warn_of_lr(config: TrainConfig) -> None:
    """Warn before the start of a learning rate out of the usual range."""
    found = check_lr(config, shape_of(config.model.name))
    if found.status == "warn":
        log.warning("--lr: got %s, wanted %s; %s", found.got, found.wanted, found.fix)


def check_lr(config: TrainConfig, shape: ModelShape | None) -> Finding:
    """Is it in the usual range for what is trained, and for the model's size?"""
    problem = unusual(config, shape.parameters if shape else None)
    if problem is None:
        return ok("learning rate", f"{config.optimizer.lr:g}")
    return warn("learning rate", problem.got, problem.wanted, problem.fix)


BENDING = {
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--override-generation-config": "",
}
"""Arguments of a server that change what it samples from, or the logprobs of it; and their value that does not."""


def check_distribution(config: RunConfig, shape: ModelShape | None) -> Finding:
    """Warn of settings with which the server samples from another distribution than the trainer computes."""
    bent = list(_bent(config, shape))
    if not bent:
        return ok("distribution", "samples and trainer have the same")
    got, fixes = zip(*bent, strict=True)
    wanted = "the same distribution on both sides (docs/sampling.md)"
    return warn("distribution", "; ".join(got), wanted, "; ".join(fixes))


def _bent(config: RunConfig, shape: ModelShape | None) -> Iterator[tuple[str, str]]:
    """Yield what bends it, and the fix."""
    loss, vllm = config.trainer.loss, config.trainer.vllm
    if shape is not None and shape.experts and loss.routing_replay == "off":
        yield "experts that each side chooses for itself", "add --routing-replay server"
    coarse = "--load-in-4bit" if config.trainer.model.load_in_4bit else "a server in 8 bits" if vllm.in_8_bits else ""
    # For a server in 8 bits the trainer's own default is the correction.
    said = "ratio_against" in loss.model_fields_set or not vllm.in_8_bits
    if coarse and said and loss.correction == "none":
        yield f"{coarse} without a correction", "use --ratio-against trainer"
    for flag, value in arguments(vllm.extra_args):
        name = flag.replace("_", "-")
        if name in BENDING and value != BENDING[name]:
            yield f"{flag} {value}".rstrip(), f"leave {flag} out"


# what the run needs of this machine -------------------------------------------------------------------------


def server_spread(config: RunConfig) -> Server:
    """The server that the run's options ask for."""
    vllm = config.trainer.vllm
    return Server(
        gpu_share=vllm.gpu_memory_utilization,
        max_model_len=config.trainer.served_len,
        tensor_parallel=vllm.tensor_parallel_size,
        pipeline_parallel=vllm.pipeline_parallel_size,
        replicas=vllm.data_parallel_size * config.server.replicas,
        placed=_placed(config.server.gpus),
    )


def _placed(gpus: str | None) -> tuple[int, ...] | None:
    """The numbers of the GPUs that `--server.gpus` names; None: none, or by other names than numbers."""
    words = gpus.replace(";", ",").split(",") if gpus else []
    return tuple(dict.fromkeys(map(int, words))) if words and all(word.strip().isdigit() for word in words) else None


def check_spread(server: Server, shape: ModelShape, machine: Machine, *, shares: bool = False) -> Finding:
    """Do its degrees divide the model and fit the machine?

    Args:
        shares: each worker shares its part of the weights with a trainer process.
    """
    name, workers = "server's GPUs", server.workers
    if workers > 1 and workers > len(machine.gpus) and machine.on_gpu:
        got = f"{workers} wanted by {server.wanted_by}, {len(machine.gpus)} visible"
        return fail(name, got, "as many as are there", f"lower {server.wanted_by}")
    if server.placed and machine.on_gpu and max(server.placed) >= len(machine.gpus):
        got = f"--server.gpus names GPU {max(server.placed)}, {len(machine.gpus)} visible"
        return fail(name, got, f"numbers below {len(machine.gpus)}", "correct --server.gpus")
    heads = shape.kv_heads if shares else shape.heads  # a server that shares nothing repeats heads of keys and values
    if heads % server.tensor_parallel:
        got = f"{heads} attention heads{' of keys and values' if shares else ''} on {server.tensor_parallel} GPUs"
        return fail(name, got, "a divisor of the heads", "choose another --server.tensor-parallel-size")
    if server.pipeline_parallel > shape.layers:
        got = f"{shape.layers} layers on {server.pipeline_parallel} GPUs"
        return fail(name, got, "a layer for each GPU, at least", "choose another --server.pipeline-parallel-size")
    return ok(name, str(workers)) if machine.on_gpu else skip(name, "on the CPU")


def check_memory(config: RunConfig, shape: ModelShape, machine: Machine) -> tuple[Finding, MemoryPlan]:
    """Would it fit? The plan comes along, for those who want to see it."""
    planned = planned_memory(config, shape, machine)
    devices, plan = planned.devices, planned.plan()
    device = plan.tightest if plan.is_tight and not plan.problems else plan.fullest
    got = f"{plan.used(device) / GB:.1f} of {devices.total / GB:.1f} GB on {device_name(devices, device)}"
    most = ", ".join(f"{row.owner} {row.what} {row.nbytes / GB:.1f} GB" for row in largest_rows(plan, device))
    if plan.problems:
        found = f"{'; '.join(map(str, plan.problems))}; most of it: {most}"
        return fail("memory", found, "a plan that fits", advice(planned)), plan
    if plan.is_tight:
        wanted = f"{NEARLY_FULL:.0%} or less: activations are an estimate"
        return warn("memory", f"{got}; most of it: {most}", wanted, advice(planned)), plan
    return ok("memory", got), plan


def planned_memory(config: RunConfig, shape: ModelShape, machine: Machine) -> Planned:
    """What the run's memory plan is made of."""
    return Planned(config.trainer, shape, server_spread(config), devices_of(machine), config.options.trainer_gpus)


def devices_of(machine: Machine) -> Devices:
    """The smallest visible GPU's memory for each of them, or main memory."""
    if machine.on_gpu:
        return Devices("cuda", min(gpu.total for gpu in machine.gpus), len(machine.gpus))
    return Devices("cpu", machine.memory)


def check_wandb(config: TrainConfig, environment: Mapping[str, str], home: Path) -> Finding:
    """W&B without a key asks for one on a terminal that a run does not have."""
    name = "wandb"
    if "wandb" not in config.logging.trackers:
        return skip(name, "not asked for")
    mode = environment.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return ok(name, mode)
    if environment.get("WANDB_API_KEY") or _has_login(Path(environment.get("NETRC") or home / ".netrc"), environment):
        return ok(name, "has a key")
    return fail(name, "no API key", "one", "`wandb login`, or WANDB_API_KEY=…, or WANDB_MODE=offline")


def _has_login(path: Path, environment: Mapping[str, str]) -> bool:
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
