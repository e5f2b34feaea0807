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
from typing import TypeVar

from environments.running.settings_check import BUILT_IN, group_size
from grpo_common.errors import Problem
from grpo_common.http import address
from grpo_common.sharing import unreceivable, unshareable
from grpo_trainer.config.bridge import read_adapter
from grpo_trainer.config.loss import LOSSES
from grpo_trainer.config.options import LARGEST_PORT, key_of, shown
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.server import DEGREES, SHORT, arguments
from grpo_trainer.config.train import TrainConfig, usual_rates
from grpo_trainer.errors import ConfigError

SET_BY_THE_RUN = MappingProxyType(
    dict.fromkeys(("trainer_rank", "world_size", "init_method"), "--trainer-gpus")
    | dict.fromkeys(("atropos_url", "rollout_url"), "--api.port")
    | dict.fromkeys(("save_path", "log_dir", "vllm_config_path", "server.roster"), "--run-dir")
    | {"server.host": "--server.port", "server.also": "--server.replicas"}
)
"""Options of the trainer that a run derives, and what to use instead."""
TRACKER_EXTRAS = {"wandb": "wandb", "tensorboard": "trackers", "trackio": "trackers"}
"""The extra of this package that installs each tracker."""


@dataclass(frozen=True)
class Hardware:
    """What trainer and server compute on."""

    on_gpu: bool
    gpus: int | None = None
    """How many are visible; None: not known."""


@dataclass(frozen=True)
class Case:
    """What the rules judge."""

    trainer: TrainConfig
    run: RunConfig | None = None
    """The run around the trainer; None: the trainer is started by itself."""
    hardware: Hardware | None = None
    """None: not known yet."""

    @property
    def processes(self) -> int:
        """Trainer processes."""
        return self.run.options.trainer_gpus if self.run else self.trainer.processes

    @property
    def servers(self) -> int:
        """Servers of the policy."""
        return self.run.server.replicas if self.run else 1 + len(self.trainer.server.also)

    @property
    def on_cluster(self) -> bool:
        """Whether the processes run on the machines of a cluster."""
        return self.run is not None and self.run.options.cluster is not None

    @property
    def sharing(self) -> str:
        """The option by which the trainer uses the server's weights."""
        return "--share-base" if self.trainer.weight_bridge_mode == "lora_only" else "--weight-bridge-mode shared_vllm"

    def flag(self, of_run: str, alone: str) -> str:
        """The flag that says something in `grpo run`, or in `grpo train`."""
        return of_run if self.run else alone


Rule = Callable[[Case], Iterator[Problem]]
C = TypeVar("C", TrainConfig, RunConfig)
RULES: list[Rule] = []
TENSOR_PARALLEL = "--server.tensor-parallel-size"


def rule(judge: Rule) -> Rule:
    """Have `check` ask this rule."""
    RULES.append(judge)
    return judge


def check(config: TrainConfig | RunConfig, hardware: Hardware | None = None) -> list[Problem]:
    """Return all combinations of options that can't be; without the hardware, rules that depend on it are left out."""
    trainer, run = (config, None) if isinstance(config, TrainConfig) else (config.trainer, config)
    return [problem for rule in RULES for problem in rule(Case(trainer, run, hardware))]


def checked(config: C, hardware: Hardware | None = None) -> C:
    """Return the same configuration; raise a `ConfigError` with all options in it that do not go together."""
    if problems := check(config, hardware):
        raise ConfigError.of(problems)
    return config


@rule
def steps(case: Case) -> Iterator[Problem]:
    config = case.trainer
    warmup, all_steps = config.warmup_steps, config.training_steps
    if warmup and warmup >= all_steps:
        why = "the peak learning rate would never be reached"
        yield Problem("--warmup-steps", str(warmup), f"fewer than --training-steps {all_steps}", summary=why)
    largest, longest = config.max_tokens_per_microbatch, config.seq_len
    if largest is not None and largest < longest:
        why = "a pass must hold the longest sequence"
        yield Problem("--max-tokens-per-microbatch", str(largest), f"at least --seq-len {longest}", summary=why)
    if config.share_prompts == "on" and config.packing == "off":
        yield Problem("--share-prompts", "on and --packing off", "packed sequences", "leave one of them out")
    oldest, allowed = config.versions_behind, config.max_staleness
    if allowed is not None and allowed < oldest:
        why = f"with --vllm-restart-interval {oldest + 1} the newest samples are up to {oldest} versions old"
        yield Problem("--max-staleness", str(allowed), f"{oldest} or more, or more restarts", summary=why)


LONE_ANSWERS = Problem(
    *("--env.group_size", "1", "2 or more", "for example --env.group_size 8"),
    "the answers of a group are compared with each other, so a group of one teaches nothing",
)


@rule
def groups(case: Case) -> Iterator[Problem]:
    environments = case.run.environments if case.run else ()
    sizes = [group_size(environment.name, environment.env) for environment in environments]
    if not case.trainer.learns_from_lone_answers:
        for environment, size in zip(environments, sizes, strict=True):  # a user's own is judged when it is tried
            if environment.name in BUILT_IN and size == 1:
                yield LONE_ANSWERS
    sequences, known = case.trainer.sequences_per_step, [size for size in sizes if size is not None]
    if not environments or len(known) < len(sizes):
        return
    if _sums_to(sequences, known):
        # The API fills a batch exactly, so a size that is in no sum would be generated and never trained on.
        for size in sorted({size for size in known if size > sequences or not _sums_to(sequences - size, known)}):
            names = ", ".join(each.name for each, own in zip(environments, sizes, strict=True) if own == size)
            others = sorted({*known} - {size})
            wanted = f"a size that adds up to {sequences} sequences a step, with groups of "
            wanted += " and ".join(map(str, others))
            yield Problem(f"--env {names}: env.group_size", str(size), wanted, fix=f"use {others[0]}")
        return
    parts = " and ".join(map(str, dict.fromkeys(known)))
    wanted = f"a {'multiple' if len(known) == 1 else 'sum of groups'} of {parts} (--env.group_size)"
    got, fix = f"{sequences} sequences a step", f"for example --batch-size {known[0]}"
    why = "no number of groups fills a batch"
    yield Problem("--batch-size x --gradient-accumulation-steps", got, wanted, fix, why)


def _sums_to(whole: int, parts: Sequence[int]) -> bool:
    """Whether some number of each part, none of some, adds up to the whole."""
    reached = [True] + [False] * whole
    for total in range(1, whole + 1):
        reached[total] = any(part <= total and reached[total - part] for part in parts)
    return reached[whole]


@rule
def loss(case: Case) -> Iterator[Problem]:
    config, mode = case.trainer, case.trainer.weight_bridge_mode
    if config.dual_clip is not None and config.loss in LOSSES and LOSSES[config.loss].surrogate != "clipped":
        why = f"with --loss {config.loss} nothing is clipped"
        yield Problem("--dual-clip", str(config.dual_clip), "a clipped loss", "leave it out", why)
    if config.is_correction in ("truncate", "mask") and config.ratio_against == "rollout":
        why = "the ratio contains that correction already"
        yield Problem("--is-correction", config.is_correction, "none, or --ratio-against trainer", summary=why)
    if config.ref_offload and not config.needs_reference:
        yield Problem("--ref-offload", "True", "a reference to move", "leave it out, or add --kl-beta or --log-kl")
    if config.ref_offload and config.trains_adapter:
        why, wanted = "with LoRA the reference uses the base model in memory, no copy", "a mode that trains all weights"
        yield Problem("--ref-offload", f"--weight-bridge-mode {mode}", wanted, "leave it out", why)
    if config.kl_reference == "base" and not config.needs_reference:
        yield Problem("--kl-reference", "base", "a reference", "leave it out, or add --kl-beta or --log-kl")
    elif config.kl_reference == "base" and not (config.trains_adapter and config.lora_adapter):
        why = "without --lora-adapter, training starts from the base model, so both references are the same"
        yield Problem("--kl-reference", "base", "a run with --lora-adapter", "leave it out", why)
    if config.updates_per_batch > 1 and mode == "shared_vllm":
        why = f"with {case.sharing} the server generates with every update, but a policy version belongs to one batch"
        yield Problem("--updates-per-batch", str(config.updates_per_batch), "1", summary=why)


@rule
def routing(case: Case) -> Iterator[Problem]:
    """What goes with `--routing-replay`; whether the model has experts is only known once it is loaded."""
    if case.trainer.routing_replay == "off":
        return
    if case.trainer.compile == "on":
        why = "a compiled layer can't exchange its experts"
        yield Problem("--compile", "on, and --routing-replay server", "auto or off with it", summary=why)
    for name in ("pipeline-parallel-size", "data-parallel-size"):
        if (degree := getattr(case.trainer.server, key_of(name))) > 1:
            got, fix = f"{degree}, and --routing-replay server", f"use {TENSOR_PARALLEL}, or more servers"
            yield Problem(f"--server.{name}", got, "1", fix, "experts are recorded by one worker for all")


@rule
def adapter(case: Case) -> Iterator[Problem]:
    """Options given with an adapter to start from must be as in that adapter."""
    config = case.trainer
    if not config.trains_adapter or config.lora_adapter is None:
        return
    for name, its in read_adapter(config.lora_adapter).options.items():
        given = getattr(config, name)
        if (sorted(given) if isinstance(given, tuple) else given) != its:
            flag, wanted = f"--{name.replace('_', '-')}", "all" if its is None else shown(its)
            why = f"not as in the adapter at --lora-adapter {config.lora_adapter}"
            yield Problem(flag, shown(given), wanted, f"leave {flag} out", why)


@rule
def four_bits(case: Case) -> Iterator[Problem]:
    if not case.trainer.load_in_4bit:
        return
    wanted, fix = "--weight-bridge-mode lora_only", "leave it out, or choose --weight-bridge-mode lora_only"
    if case.trainer.shares_weights:
        why = "the weights are the server's, in 16 or 32 bits"
        yield Problem("--load-in-4bit", f"{case.sharing} with it", "one of them", f"{fix} without --share-base", why)
    elif case.trainer.weight_bridge_mode != "lora_only":
        got = f"--weight-bridge-mode {case.trainer.weight_bridge_mode}"
        yield Problem("--load-in-4bit", got, wanted, fix, "this mode writes whole models")
    if case.trainer.dtype == "float16":
        yield Problem("--dtype", "float16 and --load-in-4bit", "bfloat16, float32 or auto with that")


@rule
def shared_weights(case: Case) -> Iterator[Problem]:
    """Weights that trainer and server share lie once, in one dtype, on one device."""
    config = case.trainer
    if not config.shares_weights:
        if config.weight_bridge_mode == "lora_only" and config.vllm_config_path is not None:
            fix = "leave it out, or add --share-base"
            yield Problem("--vllm-config-path", str(config.vllm_config_path), "--share-base with it", fix)
        return
    own, served = config.dtype, config.server.dtype
    if served not in ("auto", own) and (own != "auto" or case.run):
        why = f"with {case.sharing} there is one copy of the weights"
        wanted = "auto" if own == "auto" else f"--dtype {own}"
        fix = f"use --dtype {served} instead" if own == "auto" else "leave it out and use --dtype"
        yield Problem("--server.dtype", served, wanted, fix, why)
    if config.weight_bridge_mode == "shared_vllm" and not config.master_weights and "float16" in (own, served):
        wanted = "bfloat16 or float32, or --master-weights"
        yield Problem("--dtype", "float16", wanted, summary="small updates would be lost in it")
    device, hardware = config.device, case.hardware
    if hardware and device != "auto" and device.startswith("cuda") != hardware.on_gpu:
        wanted = f"the device where they are: {'a GPU' if hardware.on_gpu else 'main memory'}"
        why = "the trainer is to use the server's weights"
        yield Problem("--device", device, wanted, "use --device auto", why)


@rule
def pairs(case: Case) -> Iterator[Problem]:
    """A trainer process that shares weights has one server, on its own GPU."""
    config = case.trainer
    if not config.shares_weights or config.server.tensor_parallel_size > 1:
        return
    unpaired = config.weight_bridge_mode == "shared_vllm" and case.servers > case.processes
    if case.processes > case.servers or unpaired:
        got = f"{case.servers} servers" + (f": {', '.join(config.server.also)}" if config.server.also else "")
        wanted = f"{case.processes}: a server for each trainer process ({case.flag('--trainer-gpus', '--world-size')})"
        why = f"with {case.sharing} each trainer process maps the weights of one server, which no other process maps"
        yield Problem(case.flag("--server.replicas", "--server.also"), got, wanted, summary=why)
    if case.processes == 1:
        return
    if case.on_cluster:
        why = f"with {case.sharing} several pairs of trainer and server run on one machine"
        yield Problem("--cluster", f"--trainer-gpus {case.processes}", "--trainer-gpus 1", "leave --cluster out", why)
    if config.vllm_config_path is not None:
        why = "each server has its own file, and reports where it is"
        yield Problem("--vllm-config-path", str(config.vllm_config_path), fix="leave it out", summary=why)


@rule
def shards(case: Case) -> Iterator[Problem]:
    """A server over several GPUs shares its weights with a trainer process for each of its workers."""
    config, size = case.trainer, case.trainer.server.tensor_parallel_size
    if not config.shares_weights or size == 1:
        return
    if config.weight_bridge_mode == "lora_only":
        fix, why = "leave --share-base out", "an adapter is trained over whole weights"
        yield Problem(TENSOR_PARALLEL, f"{size}, and --share-base", "1", fix, why)
        return
    why = "each worker of the server shares its part of the weights with one trainer process"
    if case.processes != size:
        flag, wanted = case.flag("--trainer-gpus", "--world-size"), f"{size}, as {TENSOR_PARALLEL}"
        yield Problem(flag, str(case.processes), wanted, summary=why)
    if case.servers > 1:
        yield Problem(case.flag("--server.replicas", "--server.also"), f"{case.servers} servers", "1", summary=why)
    if case.on_cluster:
        why, fix = "the trainer's processes and the server's workers run on one machine", "leave --cluster out"
        yield Problem("--cluster", f"{TENSOR_PARALLEL} {size}", f"{TENSOR_PARALLEL} 1", fix, why)
    why = f"with {TENSOR_PARALLEL} {size} each process has a part of each weight"
    if config.needs_reference:
        yield Problem("--kl-beta, --log-kl", "a reference", "none", "leave them out", f"{why}, and a reference has all")
    if config.distill_coef:
        why_not = f"{why}, and teachers' tokens need whole logits"
        yield Problem("--distill-coef", str(config.distill_coef), "0", "leave it out", why_not)
    if config.compile == "on":
        yield Problem("--compile", "on", "auto or off", summary=f"{why}, and layers wait for other processes")


@rule
def written_server(case: Case) -> Iterator[Problem]:
    """The server refuses the same (`grpo_common/sharing.py`), but only once it is started."""
    sends = case.trainer.weight_bridge_mode == "broadcast"
    if case.run is None or not (case.trainer.shares_weights or sends):
        return
    server = case.run.server
    values: dict[str, object] = {name: getattr(server, name) for name in DEGREES}
    if server.quantization != "none":
        values["quantization"] = server.quantization
    said = {name: (f"--server.{name.replace('_', '-')}", str(value)) for name, value in values.items()}
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
    kind, starts = case.trainer.server.quantization, case.run is not None or case.trainer.owns_server
    if starts and kind != "none" and case.hardware and not case.hardware.on_gpu:
        why = "vLLM quantises on GPUs only"
        yield Problem("--server.quantization", f"{kind} without a GPU", "a GPU", "leave it out", why)


@rule
def servers(case: Case) -> Iterator[Problem]:
    vllm, number = case.trainer.server, case.servers
    if case.run is None and vllm.port == 0:
        why = "the trainer must know where its server listens; `grpo run` picks a free port"
        yield Problem("--server.port", "0", f"1 to {LARGEST_PORT}", "name a port that is free", why)
    if case.run is None and vllm.replicas > 1:
        why = "`grpo run` starts replicas; a trainer that is started by itself has to know their addresses"
        yield Problem("--server.replicas", str(vllm.replicas), "1", "name the other servers by --server.also", why)
    if case.run is not None and vllm.port + number - 1 > LARGEST_PORT:
        wanted = f"at most {LARGEST_PORT + 1 - number}, for {number} servers on consecutive ports"
        yield Problem("--server.port", str(vllm.port), wanted, "choose a lower one (0 picks free ones)")
    addresses = [address(vllm.host, vllm.port), *vllm.also]
    if len({*addresses}) < len(addresses):
        yield Problem("--server.also", ", ".join(addresses), "each server once")
    example = ";".join(map(str, range(number)))
    sets = [part.strip() for part in vllm.gpus.split(";")] if vllm.gpus is not None else None
    if sets is not None and (len(sets) != number or not all(sets)):
        why = f"{len(sets)} sets of GPUs for {number} servers"
        yield Problem("--server.gpus", str(vllm.gpus), f"a set for each server, such as {example}", summary=why)
    on_gpu = case.hardware is not None and case.hardware.on_gpu
    few = on_gpu and sets is not None and any(len({*part.split(",")}) < vllm.degree for part in sets)
    if few:
        why = "vLLM sees too few GPUs"
        yield Problem("--server.gpus", str(vllm.gpus), f"{vllm.degree} GPUs for each server", summary=why)
    here = case.run is not None and not case.on_cluster
    if sets is None and number > 1 and here and on_gpu:
        fix = f"name the GPUs of each server: --server.gpus '{example}' (the trainer is on the first that it sees)"
        why = "all would start on the same GPU"
        yield Problem("--server.replicas", str(number), "--server.gpus with it", fix, why)


@rule
def cluster(case: Case) -> Iterator[Problem]:
    """On a cluster the run chooses machines and GPUs, and starts all processes."""
    if case.run is None:
        return
    nodes, trainer = case.run.options.cluster_nodes, case.trainer
    if not case.on_cluster:
        if nodes > 1:
            yield Problem("--cluster-nodes", str(nodes), "--cluster with it", "add --cluster auto")
        return
    if trainer.owns_server:
        got, wanted = f"--weight-bridge-mode {trainer.weight_bridge_mode}", "lora_only, broadcast or shared_vllm"
        why = "in this mode the trainer starts the server, on its own machine"
        yield Problem("--cluster", got, wanted, "leave --cluster out", why)
    why = "the cluster assigns GPUs"
    if trainer.server.gpus is not None:
        yield Problem("--server.gpus", trainer.server.gpus, "no GPUs by number", "leave it out", why)
    if ":" in trainer.device:
        yield Problem("--device", trainer.device, "auto, cuda or cpu", "leave it out", why)


@rule
def processes(case: Case) -> Iterator[Problem]:
    config, size, alone = case.trainer, case.processes, case.run is None
    if alone and not 0 <= config.rank < size:
        yield Problem("--trainer-rank", str(config.rank), f"0 to {size - 1}, as --world-size {size} says")
    by_torchrun = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if alone and size > 1 and not config.init_method and not by_torchrun:
        wanted = "where the trainer's processes meet, e.g. tcp://127.0.0.1:29500"
        fix = "name it, or set MASTER_ADDR and MASTER_PORT, as torchrun and `grpo run --trainer-gpus` do"
        yield Problem("--init-method", "nothing", wanted, fix)
    if size > 1 and ":" in config.device:
        why = f"each of the {size} trainer processes has another GPU"
        yield Problem("--device", config.device, fix="leave it out", summary=why)
    if config.sharding == "full" and size == 1:
        why = "there is one trainer process, nothing to cut over"
        yield Problem("--sharding", "full", fix="leave it out", summary=why)
    if config.sharding == "full" and (why := config.why_whole):
        yield Problem("--sharding", "full", fix="use --sharding none", summary=why)


@rule
def machine(case: Case) -> Iterator[Problem]:
    """What is asked for is on this machine."""
    if case.hardware is None:
        return
    config, on_gpu = case.trainer, case.hardware.on_gpu
    gpus = None if case.on_cluster else case.hardware.gpus  # a cluster's are counted when processes get their places
    kind, _, number = config.device.partition(":")
    if gpus is not None and kind == "cuda" and (not (number or "0").isdecimal() or int(number or 0) >= gpus):
        fix = "use --device auto, or see CUDA_VISIBLE_DEVICES"
        yield Problem("--device", f"{config.device}, with {gpus} visible GPUs", "one that is there", fix)
    if gpus and case.run and case.processes > gpus:  # on a CPU they share its cores
        got, fix = f"{case.processes}, with {gpus} visible GPUs", f"use --trainer-gpus {gpus}"
        yield Problem("--trainer-gpus", got, "as many as are there, at most", fix)
    for mode, name, other in (("lora_only", "lora", "memory"), ("broadcast", "broadcast", "gloo")):
        transport = getattr(config, f"{name}_transport")
        if config.weight_bridge_mode == mode and not on_gpu and transport in ("cuda_ipc", "nccl"):
            flag, wanted = f"--{name}-transport", f"auto, disk or {other}"
            yield Problem(flag, f"{transport} without a GPU", wanted, f"use {flag} auto")
    if (degree := config.server.pipeline_parallel_size) > 1 and not on_gpu:
        wanted = "1: vLLM's CPU build fails at the first request"
        yield Problem("--server.pipeline-parallel-size", f"{degree} without a GPU", wanted, f"use {TENSOR_PARALLEL}")


@rule
def packages(case: Case) -> Iterator[Problem]:
    """What is asked for is installed on this machine."""
    if case.hardware is None:
        return
    needed = {
        tracker: ("--log-to", tracker, f"pip install 'grpo-trainer[{TRACKER_EXTRAS[tracker]}]'")
        for tracker in case.trainer.trackers
    }
    if case.trainer.attention == "flash_attention_2":
        needed["flash_attn"] = ("--attention", "flash_attention_2", "install flash-attn, or use --attention sdpa")
    if case.trainer.load_in_4bit:
        needed["bitsandbytes"] = ("--load-in-4bit", "on", "pip install 'grpo-trainer[qlora]', or leave it out")
    for package, (flag, value, fix) in needed.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # W&B leaves a folder of its name where it ran: no package
            yield Problem(flag, f"{value} without {package}", "the package", fix)


def unusual_lr(config: TrainConfig, parameters: int | None) -> Problem | None:
    """Return what is wrong with a learning rate out of the range of `usual_rates`; None: it is within."""
    rate, mode, is_adapter = config.lr, config.weight_bridge_mode, config.trains_adapter
    usual = usual_rates(mode, parameters)
    if usual.lowest <= rate <= usual.highest:
        return None
    suits_adapter = not is_adapter and usual.highest < rate <= usual_rates("lora_only", parameters).highest
    why = "above it policies collapse" if rate > usual.highest else "below it hardly anything is learnt"
    return Problem(
        field="--lr",
        got=f"{rate:g} with --weight-bridge-mode {mode}, which trains {'an adapter' if is_adapter else 'all weights'}",
        wanted=f"{usual.lowest:g} to {usual.highest:g}; {why}",
        fix=f"--lr {usual.default:g}" + (", or --weight-bridge-mode lora_only" if suits_adapter else ""),
    )
