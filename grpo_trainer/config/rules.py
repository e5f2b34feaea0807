"""Which options do not go together: every refusal of a combination that is known before anything loads.

A rule is a function from a configuration to its problems, named after its subject. `grpo train`, `run` and `doctor` ask
all rules (`check`). To refuse one more combination, add it here, and a row to `tests/unit/test_rules.py`. The range of
one option stands with that option; what only the loaded model can say stands with the model. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from environments.running.settings_check import BUILT_IN, group_size
from grpo_common.errors import Problem
from grpo_common.http import address
from grpo_common.sharing import unreceivable, unshareable
from grpo_trainer.config.adapter_file import read_adapter
from grpo_trainer.config.bridge import Broadcast, LoraOnly, LoraOptions, SharedServer, SharedVllm
from grpo_trainer.config.distributed import why_whole
from grpo_trainer.config.loss import LOSSES
from grpo_trainer.config.options import key_of, leaves, shown
from grpo_trainer.config.server import DEGREES, SHORT, ServerProcess, VllmConfig, arguments
from grpo_trainer.config.train import TrainConfig, settings_of
from grpo_trainer.config.values import LARGEST_PORT
from grpo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from grpo_trainer.config.run import RunConfig

SET_BY_THE_RUN = MappingProxyType(
    dict.fromkeys(("trainer_rank", "world_size", "init_method"), "--trainer-gpus")
    | dict.fromkeys(("atropos_url", "rollout_url"), "--api.port")
    | dict.fromkeys(("vllm_host", "vllm_port"), "--server.port")
    | dict.fromkeys(("save_path", "log_dir"), "--run-dir")
    | {"vllm_also": "--server.replicas", "vllm_gpus": "--server.gpus", "vllm_config_path": "--run-dir"}
    | {"vllm_roster": "--run-dir"}
)
"""Options of the trainer that a run derives, and what to use instead."""

TRACKER_EXTRAS = {"wandb": "wandb", "tensorboard": "trackers", "trackio": "trackers"}
"""The extra of this package that installs each tracker."""


@dataclass(frozen=True)
class Hardware:
    """What trainer and server compute on.

    Attributes:
        on_gpu: whether that is a GPU.
        gpus: how many are visible; None: not known.
    """

    on_gpu: bool
    gpus: int | None = None


@dataclass(frozen=True)
class Case:
    """What the rules judge.

    Attributes:
        trainer: the trainer's options.
        run: those of the run around it; None: the trainer is started by itself.
        hardware: None: not known yet.
    """

    trainer: TrainConfig
    run: RunConfig | None = None
    hardware: Hardware | None = None

    @property
    def processes(self) -> int:
        """Trainer processes."""
        return self.run.options.trainer_gpus if self.run else self.trainer.distributed.processes

    @property
    def servers(self) -> int:
        """Servers of the policy."""
        return self.run.server.replicas if self.run else 1 + len(self.trainer.vllm.also)

    @property
    def on_cluster(self) -> bool:
        """Whether the processes run on the machines of a cluster."""
        return self.run is not None and self.run.options.cluster is not None

    @property
    def sharing(self) -> str:
        """The option by which the trainer uses the server's weights."""
        return "--share-base" if isinstance(self.trainer.bridge, LoraOnly) else "--weight-bridge-mode shared_vllm"

    def of_server(self, name: str) -> str:
        """The flag of a server's option: a run has it in another table than the trainer."""
        return (ServerProcess if self.run else VllmConfig).flags()[name]


Rule = Callable[[Case], Iterator[Problem]]
C = TypeVar("C", TrainConfig, "RunConfig")
RULES: list[Rule] = []


def rule(judge: Rule) -> Rule:
    """Have `check` ask this rule."""
    RULES.append(judge)
    return judge


def check(config: TrainConfig | RunConfig, hardware: Hardware | None = None) -> list[Problem]:
    """Return all combinations of options that can't be; none if the configuration is sound.

    Args:
        config: the options, each legal by itself.
        hardware: None leaves out the rules that depend on it.
    """
    trainer, run = (config, None) if isinstance(config, TrainConfig) else (config.trainer, config)
    case = Case(trainer, run, hardware)
    return [problem for rule in RULES for problem in rule(case)]


def checked(config: C, hardware: Hardware | None = None) -> C:
    """Return the same configuration.

    Raises:
        ConfigError: options in it do not go together; it names all of them.
    """
    if problems := check(config, hardware):
        raise ConfigError.of(problems)
    return config


@rule
def steps(case: Case) -> Iterator[Problem]:
    config = case.trainer
    warmup, all_steps = config.optimizer.warmup_steps, config.training_steps
    if warmup and warmup >= all_steps:
        why = "the peak learning rate would never be reached"
        yield Problem("--warmup-steps", str(warmup), f"fewer than --training-steps {all_steps}", summary=why)
    largest, longest = config.compute.max_tokens_per_microbatch, config.model.seq_len
    if largest is not None and largest < longest:
        why = "a pass must hold the longest sequence"
        yield Problem("--max-tokens-per-microbatch", str(largest), f"at least --seq-len {longest}", summary=why)
    if config.compute.share_prompts == "on" and config.compute.packing == "off":
        yield Problem("--share-prompts", "on and --packing off", "packed sequences", "leave one of them out")
    oldest, allowed = config.versions_behind, config.rollouts.max_staleness
    if allowed is not None and allowed < oldest:
        why = f"with --vllm-restart-interval {oldest + 1} the newest samples are up to {oldest} versions old"
        yield Problem("--max-staleness", str(allowed), f"{oldest} or more, or more restarts", summary=why)


LONE_ANSWERS = Problem(
    *("--env.group_size", "1", "2 or more", "for example --env.group_size 8"),
    "the answers of a group are compared with each other, so a group of one teaches nothing",
)


def learns_from_lone_answers(trainer: TrainConfig) -> bool:
    """Whether a sequence that is compared with no other has a gradient."""
    return trainer.loss.trains_without_advantage or trainer.loss.distill_coef > 0


@rule
def groups(case: Case) -> Iterator[Problem]:
    if case.run is None:
        return
    if not learns_from_lone_answers(case.trainer):
        for environment in case.run.environments:  # a user's own is judged when it is tried
            if environment.name in BUILT_IN and group_size(environment.name, environment.env) == 1:
                yield LONE_ANSWERS
    sequences = case.trainer.sequences_per_step
    sizes = [group_size(environment.name, environment.env) for environment in case.run.environments]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return
    if _sums_to(sequences, known):
        # The API fills a batch exactly, so a size that is in no sum would be generated and never trained on.
        for size in sorted({size for size in known if size > sequences or not _sums_to(sequences - size, known)}):
            names = ", ".join(each.name for each, own in zip(case.run.environments, sizes, strict=True) if own == size)
            others = " and ".join(str(other) for other in sorted(set(known) - {size}))
            wanted = f"a size that adds up to {sequences} sequences a step, with groups of {others}"
            yield Problem(f"--env {names}: env.group_size", str(size), wanted, fix=f"use {min(set(known) - {size})}")
        return
    parts = " and ".join(map(str, dict.fromkeys(known)))
    wanted = f"a multiple of {parts}" if len(known) == 1 else f"a sum of groups of {parts}"
    got, fix = f"{sequences} sequences a step", f"for example --batch-size {known[0]}"
    why = "no number of groups fills a batch"
    yield Problem("--batch-size x --gradient-accumulation-steps", got, f"{wanted} (--env.group_size)", fix, why)


def _sums_to(whole: int, parts: Sequence[int]) -> bool:
    """Whether some number of each part, none of some, adds up to the whole."""
    reached = [True] + [False] * whole
    for total in range(1, whole + 1):
        reached[total] = any(part <= total and reached[total - part] for part in parts)
    return reached[whole]


@rule
def loss(case: Case) -> Iterator[Problem]:
    asked, bridge = case.trainer.loss, case.trainer.bridge
    if asked.dual_clip is not None and asked.loss in LOSSES and LOSSES[asked.loss].surrogate != "clipped":
        why = f"with --loss {asked.loss} nothing is clipped"
        yield Problem("--dual-clip", str(asked.dual_clip), "a clipped loss", "leave it out", why)
    if asked.is_correction in ("truncate", "mask") and asked.ratio_against == "rollout":
        why = "the ratio contains that correction already"
        yield Problem("--is-correction", asked.is_correction, "none, or --ratio-against trainer", summary=why)
    if asked.ref_offload and not asked.needs_reference:
        yield Problem("--ref-offload", "True", "a reference to move", "leave it out, or add --kl-beta or --log-kl")
    if asked.ref_offload and isinstance(bridge, LoraOptions):
        why = "with LoRA the reference uses the base model in memory, no copy"
        got, wanted = f"--weight-bridge-mode {bridge.mode}", "a mode that trains all weights"
        yield Problem("--ref-offload", got, wanted, "leave it out", why)
    if asked.kl_reference == "base" and not asked.needs_reference:
        yield Problem("--kl-reference", "base", "a reference", "leave it out, or add --kl-beta or --log-kl")
    elif asked.kl_reference == "base" and not (isinstance(bridge, LoraOptions) and bridge.adapter):
        why = "without --lora-adapter, training starts from the base model, so both references are the same"
        yield Problem("--kl-reference", "base", "a run with --lora-adapter", "leave it out", why)
    if asked.updates_per_batch > 1 and isinstance(bridge, SharedVllm):
        why = f"with {case.sharing} the server generates with every update, but a policy version belongs to one batch"
        yield Problem("--updates-per-batch", str(asked.updates_per_batch), "1", summary=why)


@rule
def routing(case: Case) -> Iterator[Problem]:
    """What goes with `--routing-replay`; whether the model has experts is only known once it is loaded."""
    if case.trainer.loss.routing_replay == "off":
        return
    if case.trainer.compute.compile == "on":
        why = "a compiled layer can't exchange its experts"
        yield Problem("--compile", "on, and --routing-replay server", "auto or off with it", summary=why)
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if (degree := getattr(case.trainer.vllm, name)) > 1:
            fix, why = "use --tensor-parallel-size, or more servers", "experts are recorded by one worker for all"
            yield Problem(case.of_server(name), f"{degree}, and --routing-replay server", "1", fix, why)


@rule
def adapter(case: Case) -> Iterator[Problem]:
    """Options given with an adapter to start from must be as in that adapter."""
    bridge = case.trainer.bridge
    if not isinstance(bridge, LoraOptions) or bridge.adapter is None:
        return
    flags = {leaf.name: leaf.flags[0] for leaf in leaves(LoraOptions)}
    for name, its in settings_of(read_adapter(bridge.adapter)).items():
        given = getattr(bridge, name)
        if (sorted(given) if isinstance(given, tuple) else given) != its:
            why = f"not as in the adapter at --lora-adapter {bridge.adapter}"
            wanted = "all" if its is None else shown(its)
            yield Problem(flags[name], shown(given), wanted, f"leave {flags[name]} out", why)


@rule
def four_bits(case: Case) -> Iterator[Problem]:
    if not case.trainer.model.load_in_4bit:
        return
    mode, wanted = case.trainer.bridge.mode, "--weight-bridge-mode lora_only"
    if case.trainer.shares_weights:
        why = "the weights are the server's, in 16 or 32 bits"
        fix = f"leave it out, or choose {wanted} without --share-base"
        yield Problem("--load-in-4bit", f"{case.sharing} with it", "one of them", fix, why)
    elif mode != "lora_only":
        fix, why = f"leave it out, or choose {wanted}", "this mode writes whole models"
        yield Problem("--load-in-4bit", f"--weight-bridge-mode {mode}", wanted, fix, why)
    if case.trainer.model.dtype == "float16":
        yield Problem("--dtype", "float16 and --load-in-4bit", "bfloat16, float32 or auto with that")


@rule
def shared_weights(case: Case) -> Iterator[Problem]:
    """Weights that trainer and server share lie once, in one dtype, on one device."""
    config, bridge = case.trainer, case.trainer.bridge
    if not config.shares_weights:
        if isinstance(bridge, LoraOnly) and bridge.config_path is not None:
            fix = "leave it out, or add --share-base"
            yield Problem("--vllm-config-path", str(bridge.config_path), "--share-base with it", fix)
        return
    own, served = config.model.dtype, config.vllm.dtype
    if served not in ("auto", own) and (own != "auto" or case.run):
        why = f"with {case.sharing} there is one copy of the weights"
        wanted = "auto" if own == "auto" else f"--dtype {own}"
        fix = f"use --dtype {served} instead" if own == "auto" else "leave it out and use --dtype"
        yield Problem(case.of_server("dtype"), served, wanted, fix, why)
    if isinstance(bridge, SharedVllm) and not bridge.master_weights and "float16" in (own, served):
        wanted = "bfloat16 or float32, or --master-weights"
        yield Problem("--dtype", "float16", wanted, summary="small updates would be lost in it")
    device, hardware = config.model.device, case.hardware
    if hardware and device != "auto" and device.startswith("cuda") != hardware.on_gpu:
        wanted = f"the device where they are: {'a GPU' if hardware.on_gpu else 'main memory'}"
        why = "the trainer is to use the server's weights"
        yield Problem("--device", device, wanted, "use --device auto", why)


@rule
def pairs(case: Case) -> Iterator[Problem]:
    """A trainer process that shares weights has one server, on its own GPU."""
    config, bridge = case.trainer, case.trainer.bridge
    if not config.shares_weights or config.vllm.tensor_parallel_size > 1:
        return
    unpaired = isinstance(bridge, SharedVllm) and case.servers > case.processes
    if case.processes > case.servers or unpaired:
        flag, also = ("--server.replicas", "") if case.run else ("--vllm-also", f": {', '.join(config.vllm.also)}")
        processes = "--trainer-gpus" if case.run else "--world-size"
        wanted = f"{case.processes}: a server for each trainer process ({processes})"
        why = f"with {case.sharing} each trainer process maps the weights of one server, which no other process maps"
        yield Problem(flag, f"{case.servers} servers{also if config.vllm.also else ''}", wanted, summary=why)
    if case.processes == 1:
        return
    if case.on_cluster:
        why = f"with {case.sharing} several pairs of trainer and server run on one machine"
        yield Problem("--cluster", f"--trainer-gpus {case.processes}", "--trainer-gpus 1", "leave --cluster out", why)
    if isinstance(bridge, SharedServer) and bridge.config_path is not None:
        why = "each server has its own file, and reports where it is"
        yield Problem("--vllm-config-path", str(bridge.config_path), fix="leave it out", summary=why)


@rule
def shards(case: Case) -> Iterator[Problem]:
    """A server over several GPUs shares its weights with a trainer process for each of its workers."""
    config, size = case.trainer, case.trainer.vllm.tensor_parallel_size
    if not config.shares_weights or size == 1:
        return
    flag = case.of_server("tensor_parallel_size")
    if isinstance(config.bridge, LoraOnly):
        fix, why = "leave --share-base out", "an adapter is trained over whole weights"
        yield Problem(flag, f"{size}, and --share-base", "1", fix, why)
        return
    why = "each worker of the server shares its part of the weights with one trainer process"
    if case.processes != size:
        wanted = f"{size}, as {flag}"
        yield Problem("--trainer-gpus" if case.run else "--world-size", str(case.processes), wanted, summary=why)
    if case.servers > 1:
        yield Problem("--server.replicas" if case.run else "--vllm-also", f"{case.servers} servers", "1", summary=why)
    if case.on_cluster:
        why = "the trainer's processes and the server's workers run on one machine"
        yield Problem("--cluster", f"{flag} {size}", f"{flag} 1", "leave --cluster out", why)
    why = f"with {flag} {size} each process has a part of each weight"
    if config.loss.needs_reference:
        yield Problem("--kl-beta, --log-kl", "a reference", "none", "leave them out", f"{why}, and a reference has all")
    if config.loss.distill_coef:
        got, fix = str(config.loss.distill_coef), "leave it out"
        yield Problem("--distill-coef", got, "0", fix, f"{why}, and teachers' tokens need whole logits")
    if config.compute.compile == "on":
        yield Problem("--compile", "on", "auto or off", summary=f"{why}, and layers wait for other processes")


@rule
def written_server(case: Case) -> Iterator[Problem]:
    """The server refuses the same (`grpo_common/sharing.py`), but only once it is started."""
    sends = isinstance(case.trainer.bridge, Broadcast)
    if case.run is None or not (case.trainer.shares_weights or sends):
        return
    server = case.run.server
    values: dict[str, object] = {name: getattr(server, name) for name in DEGREES}
    if server.quantization != "none":
        values["quantization"] = server.quantization
    said = {name: (case.of_server(name), str(value)) for name, value in values.items()}
    for flag, word in arguments(server.extra_args):
        name, value = SHORT.get(flag) or key_of(flag), "" if word.startswith("-") else word
        values[name], said[name] = value or True, ("--server.extra-args", f"{flag} {value}".rstrip())
    why = "the trainer is to send the server weights" if sends else "the trainer is to use the server's weights"
    for each in (unreceivable if sends else unshareable)(values):
        field, got = said[each.field]
        fix = f"{each.fix}, or use --weight-bridge-mode none or lora_only"
        yield replace(each, field=field, got=got, fix=fix, summary=why)


@rule
def quantised_server(case: Case) -> Iterator[Problem]:
    """A server that quantises its weights; whether the trainer may write them is judged by `written_server`."""
    vllm, starts = case.trainer.vllm, case.run is not None or case.trainer.owns_server
    if starts and vllm.quantization != "none" and case.hardware and not case.hardware.on_gpu:
        why = "vLLM quantises on GPUs only"
        yield Problem(
            case.of_server("quantization"), f"{vllm.quantization} without a GPU", "a GPU", "leave it out", why
        )


@rule
def servers(case: Case) -> Iterator[Problem]:
    vllm, number = case.trainer.vllm, case.servers
    if case.run is not None and case.run.server.port + number - 1 > LARGEST_PORT:
        wanted = f"at most {LARGEST_PORT + 1 - number}, for {number} servers on consecutive ports"
        yield Problem("--server.port", str(case.run.server.port), wanted, "choose a lower one (0 picks free ones)")
    addresses = [address(vllm.host, vllm.port), *vllm.also]
    if len(set(addresses)) < len(addresses):
        yield Problem("--vllm-also", ", ".join(addresses), "each server once")
    gpus, example = (case.run.server if case.run else vllm).gpus, ";".join(map(str, range(number)))
    sets = [part.strip() for part in gpus.split(";")] if gpus is not None else None
    if sets is not None and (len(sets) != number or not all(sets)):
        why = f"{len(sets)} sets of GPUs for {number} servers"
        yield Problem(case.of_server("gpus"), str(gpus), f"a set for each server, such as {example}", summary=why)
    here = case.run is not None and not case.on_cluster
    if sets is None and number > 1 and here and case.hardware and case.hardware.on_gpu:
        fix = f"name the GPUs of each server: --server.gpus '{example}' (the trainer is on the first that it sees)"
        why = "all would start on the same GPU"
        yield Problem("--server.replicas", str(number), "--server.gpus with it", fix, why)


@rule
def cluster(case: Case) -> Iterator[Problem]:
    """On a cluster the run chooses machines and GPUs, and starts all processes."""
    if case.run is None:
        return
    options, mode = case.run.options, case.trainer.bridge.mode
    if options.cluster is None:
        if options.cluster_nodes > 1:
            yield Problem("--cluster-nodes", str(options.cluster_nodes), "--cluster with it", "add --cluster auto")
        return
    if case.trainer.owns_server:
        wanted, why = (
            "lora_only, broadcast or shared_vllm",
            "in this mode the trainer starts the server, on its own machine",
        )
        yield Problem("--cluster", f"--weight-bridge-mode {mode}", wanted, "leave --cluster out", why)
    if case.run.server.gpus is not None:
        why = "the cluster assigns GPUs"
        yield Problem("--server.gpus", case.run.server.gpus, "no GPUs by number", "leave it out", why)
    if ":" in case.trainer.model.device:
        why = "the cluster assigns GPUs"
        yield Problem("--device", case.trainer.model.device, "auto, cuda or cpu", "leave it out", why)


@rule
def processes(case: Case) -> Iterator[Problem]:
    asked, size, device = case.trainer.distributed, case.processes, case.trainer.model.device
    if case.run is None and not 0 <= asked.rank < size:
        yield Problem("--trainer-rank", str(asked.rank), f"0 to {size - 1}, as --world-size {size} says")
    by_torchrun = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if case.run is None and size > 1 and not asked.init_method and not by_torchrun:
        wanted = "where the trainer's processes meet, e.g. tcp://127.0.0.1:29500"
        fix = "name it, or set MASTER_ADDR and MASTER_PORT, as torchrun and `grpo run --trainer-gpus` do"
        yield Problem("--init-method", "nothing", wanted, fix)
    if size > 1 and ":" in device:
        why = f"each of the {size} trainer processes has another GPU"
        yield Problem("--device", device, fix="leave it out", summary=why)
    if asked.sharding == "full" and size == 1:
        why = "there is one trainer process, nothing to cut over"
        yield Problem("--sharding", "full", fix="leave it out", summary=why)
    if asked.sharding == "full" and (why := why_whole(case.trainer)):
        yield Problem("--sharding", "full", fix="use --sharding none", summary=why)


@rule
def machine(case: Case) -> Iterator[Problem]:
    """What is asked for is on this machine."""
    if case.hardware is None:
        return
    config, device = case.trainer, case.trainer.model.device
    gpus = None if case.on_cluster else case.hardware.gpus  # a cluster's are counted when processes get their places
    kind, _, number = device.partition(":")
    if gpus is not None and kind == "cuda" and (not (number or "0").isdecimal() or int(number or 0) >= gpus):
        fix = "use --device auto, or see CUDA_VISIBLE_DEVICES"
        yield Problem("--device", f"{device}, with {gpus} visible GPUs", "one that is there", fix)
    if gpus and case.run and case.processes > gpus:  # on a CPU they share its cores
        got, fix = f"{case.processes}, with {gpus} visible GPUs", f"use --trainer-gpus {gpus}"
        yield Problem("--trainer-gpus", got, "as many as are there, at most", fix)
    if isinstance(config.bridge, LoraOnly | Broadcast) and not case.hardware.on_gpu:
        sends = isinstance(config.bridge, Broadcast)
        flag, others = ("--broadcast-transport", "gloo") if sends else ("--lora-transport", "memory")
        if config.bridge.transport in ("cuda_ipc", "nccl"):
            got = f"{config.bridge.transport} without a GPU"
            yield Problem(flag, got, f"auto, disk or {others}", f"use {flag} auto")
    if (degree := config.vllm.pipeline_parallel_size) > 1 and not case.hardware.on_gpu:
        wanted, fix = "1: vLLM's CPU build fails at the first request", f"use {case.of_server('tensor_parallel_size')}"
        yield Problem(case.of_server("pipeline_parallel_size"), f"{degree} without a GPU", wanted, fix)


@rule
def packages(case: Case) -> Iterator[Problem]:
    """What is asked for is installed on this machine."""
    if case.hardware is None:
        return
    model = case.trainer.model
    needed = {
        tracker: ("--log-to", tracker, f"pip install 'grpo-trainer[{TRACKER_EXTRAS[tracker]}]'")
        for tracker in case.trainer.logging.trackers
    }
    if model.attention == "flash_attention_2":
        needed["flash_attn"] = ("--attention", model.attention, "install flash-attn, or use --attention sdpa")
    if model.load_in_4bit:
        needed["bitsandbytes"] = ("--load-in-4bit", "on", "pip install 'grpo-trainer[qlora]', or leave it out")
    for package, (flag, value, fix) in needed.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # W&B leaves a folder of its name where it ran: no package
            yield Problem(flag, f"{value} without {package}", "the package", fix)
