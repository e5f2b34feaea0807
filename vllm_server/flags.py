"""The command line: vLLM's own, plus ours, with defaults that suit a trainer's server."""

import argparse
import contextlib
import logging
import multiprocessing.util
import os
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path

from grpo_common.http import SERVER_IDLE_S
from grpo_common.models import config_parts
from vllm_server import checks, seams
from vllm_server.errors import FatalError
from vllm_server.protocol import (
    BRIDGE_UPDATE_BEGIN_ROUTE,
    BRIDGE_UPDATE_END_ROUTE,
    CPU_CACHE_BYTES,
    DEFAULT_KEEP_VERSIONS,
    DEFAULT_LORA_NAME,
    DEFAULT_PORT,
    HEALTH_ROUTE,
    HIGHEST_VERSION,
    SPARE_ADAPTERS,
    WORKER_QUEUE_BYTES,
)
from vllm_server.worker import EXPERTS_VARIABLE, KERNELS_VARIABLE, is_batch_invariant

logger = logging.getLogger("vllm.grpo.flags")

PROGRAM = "grpo serve"
USAGE = f"{PROGRAM} --model MODEL [OPTIONS]"
DESCRIPTION = "vLLM's OpenAI-compatible server with more routes, which a GRPO trainer needs."
DEFAULT_HOST = "127.0.0.1"

HELP_ALL = "--help-all"

UNLOGGED = (HEALTH_ROUTE, BRIDGE_UPDATE_BEGIN_ROUTE, BRIDGE_UPDATE_END_ROUTE)
"""Routes without a line in the access log. Clients poll the first every second. Generation waits for the others; the
fence logs each update that ends, and the trainer each one that is refused."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
"""Batch sizes, in tokens, that get a CUDA graph; a batch is padded to the next one.

vLLM's default has 51 sizes up to 512. A start with adapters captured these twice in 18 s (135M parameters, one H200).
Batches above the largest size run without a graph, and Python then limits a small model's steps."""

CORES = 8
"""CPU cores for each GPU, of which a worker's own process may use one."""
_SHM, _QUOTA, _GPUS = Path("/dev/shm"), Path("/sys/fs/cgroup/cpu.max"), Path("/proc/driver/nvidia/gpus")

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its sockets; unset: the temporary folder."""
_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678") - 5  # vLLM's own, /<uuid>, are 5 longer
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_IDLE_S),
    # On a CPU several processes share few cores: do not bind threads to cores, and let idle OpenMP threads sleep
    # instead of spinning.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
}


def own_parser() -> argparse.ArgumentParser:
    """Return a parser of our flags and of vLLM's most used ones, which needs no import of vLLM.

    It prints `--help`, and reads what is checked before vLLM is imported; `parse` reads everything.
    """
    epilog = f"{HELP_ALL} lists every flag of vLLM's server as well."
    parser = argparse.ArgumentParser(
        PROGRAM, usage=USAGE, description=DESCRIPTION, epilog=epilog, add_help=False, allow_abbrev=False
    )
    _add_policy_options(parser.add_argument_group("options for GRPO training"))
    add = parser.add_argument_group("most used vLLM options").add_argument
    add("--model", metavar="MODEL", help="model folder or hub name")
    add("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, metavar="N", help="port to listen on (default: %(default)s)")
    add("--api-key", nargs="*", metavar="KEY", help="key that every client must send (default: $VLLM_API_KEY)")
    add("--max-lora-rank", metavar="N", help="serve adapters up to this rank (the trainer's --lora-r)")
    length_help = "maximum tokens of prompt plus completion; at least the trainer's --seq-len"
    add("--max-model-len", metavar="N", help=length_help)
    add("--dtype", help="dtype of weights and activations (the trainer's --dtype)")
    add("--gpu-memory-utilization", metavar="SHARE", help="fraction of the GPU's memory for this server")
    for flag in ("--uds", "--config"):
        add(flag, help=argparse.SUPPRESS)
    return parser


def early(argv: list[str]) -> Namespace:
    """Return what is checked before vLLM is imported. Exit with argparse's message if one of our flags is wrong."""
    words = []
    for word in argv:  # vLLM's parser takes --api_key, too
        name, *value = word.partition("=") if word.startswith("--") else ("", word)
        words.append("".join([name.replace("_", "-"), *value]))
    return own_parser().parse_known_args(words)[0]


def set_environment() -> None:
    """Set vLLM's environment variables, except those that the user set. Call this before vLLM is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _place_sockets()


def _place_sockets() -> None:
    """Put the sockets of vLLM and multiprocessing into the temporary folder, or into one with a shorter path.

    The kernel limits their paths to 107 bytes, and TMPDIR may be longer. Files stay in the temporary folder.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _LONGEST_FOLDER:
        return
    short = next((each for each in _SHORT_FOLDERS if os.access(each, os.W_OK | os.X_OK)), usual)
    os.environ.setdefault(SOCKETS_VARIABLE, short)
    tempfile.tempdir = short
    try:
        multiprocessing.util.get_temp_dir()  # creates multiprocessing's folder, which it keeps using
    finally:
        tempfile.tempdir = usual


def parse(argv: list[str]) -> Namespace:
    """Return the parsed command line. Exit with argparse's message if it is wrong."""
    parser_class = seams.require("vllm.utils.argparse_utils", "FlexibleArgumentParser")
    parser = seams.require(seams.CLI, "make_arg_parser")(parser_class(prog=PROGRAM, description=DESCRIPTION))
    parser.usage = USAGE  # vLLM's has 300 lines, which argparse prints before the message about a wrong flag
    _add_policy_options(parser.add_argument_group("policy"))
    unset = {"model": None, "max_lora_rank": None, "max_loras": None, "max_cpu_loras": None}
    plain = {name: parser.get_default(name) for name in unset}
    parser.set_defaults(
        host=DEFAULT_HOST,
        port=DEFAULT_PORT,
        logprobs_mode="processed_logprobs",  # logprobs of the distribution that tokens are sampled from
        generation_config="vllm",  # no hidden top_p or top_k from the model's generation_config.json
        language_model_only=True,  # no towers for images and sounds: the trainer trains the text part
        disable_access_log_for_endpoints=",".join(UNLOGGED),
        **unset,
    )
    if seams.device_type() == "cpu":  # 16 bits are no faster, and vLLM's KV cache would be a share of all memory
        parser.set_defaults(dtype="float32", enforce_eager=True, kv_cache_memory_bytes=CPU_CACHE_BYTES)
    args = parser.parse_args(argv)
    args.model = args.model or args.model_tag
    if not args.model:
        parser.error("--model: wanted a model's folder or name, got none; say --model PATH")
    args.lora_root = getattr(args, "lora_root", ["."])
    _plan_lora(args, plain)
    if args.worker_extension_cls:
        got, wanted = args.worker_extension_cls, "none, since the server sets its own extension"
        raise FatalError(field="--worker-extension-cls", got=got, wanted=wanted, fix="leave it out")
    writable = args.shared_weights or args.receive_weights
    args.worker_extension_cls = f"vllm_server.patches.{'SharingWorker' if writable else 'PolicyWorker'}"
    if args.enable_lora and seams.device_type() == "cuda":
        os.environ[KERNELS_VARIABLE] = args.lora_kernels
    _plan_logits(args)
    if args.return_routed_experts:
        os.environ[EXPERTS_VARIABLE] = "1"
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # experts are recorded in the older one
    _place_worker(args)
    if seams.device_type() != "cpu":
        _plan_graphs(args)
    seams.require(seams.CLI, "validate_parsed_serve_args")(args)
    return args


def _add_policy_options(group: argparse._ArgumentGroup) -> None:
    """Add this server's options."""
    add = group.add_argument
    add(
        "--lora-name", default=DEFAULT_LORA_NAME,
        help="prefix of the names under which adapter versions are served: NAME-vN (default: %(default)s)",
    )  # fmt: skip
    add(
        "--lora-root", action="append", default=argparse.SUPPRESS, metavar="DIR",
        help="adapters are loaded only from this folder and its subfolders (repeatable; default: the current folder)",
    )  # fmt: skip
    add(
        "--lora-keep-versions", type=_positive, default=DEFAULT_KEEP_VERSIONS, metavar="N",
        help="number of newest versions that stay loaded (default: %(default)s)",
    )  # fmt: skip
    add(
        "--lora-kernels", choices=("grpo", "vllm"), default="grpo",
        help="LoRA kernels on an NVIDIA GPU: grpo (faster when a batch has tokens of several versions) or vllm "
        "(default: grpo)",
    )  # fmt: skip
    add(
        "--logits-dtype", choices=("auto", "float32", "model"), default="auto",
        help="dtype of the logits. float32: not rounded to 16 bits, so logprobs are as exact as the trainer's; model: "
        "the model's dtype, as in vLLM; auto (the default): float32 on a GPU, model on a CPU",
    )  # fmt: skip
    add(
        "--return-routed-experts", action="store_true",
        help="return the experts that a mixture-of-experts model chose for each token; a trainer with "
        "--routing-replay=server needs them",
    )  # fmt: skip
    add(
        "--policy-version", type=_version, default=0, metavar="N",
        help="version number of the starting weights (default: %(default)s)",
    )  # fmt: skip
    add(
        "--shared-weights", action="store_true",
        default=os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "").lower() in ("1", "true", "yes"),
        help="share the weights in memory with a trainer on this machine, for --weight-bridge-mode shared_vllm and "
        "--share-base (or set VLLM_ENABLE_SHARED_WEIGHTS=1)",
    )  # fmt: skip
    add(
        "--receive-weights", action="store_true",
        help="receive all weights from a trainer while the server runs (--weight-bridge-mode broadcast)",
    )  # fmt: skip
    add(
        "--bridge-config-path", metavar="FILE",
        help="file in which the server tells trainers where the shared weights are (default: $VLLM_BRIDGE_CONFIG_PATH, "
        "else a file in $LOGDIR, else one in the folder atropos_bridge of the system's temporary folder)",
    )  # fmt: skip


def _plan_lora(args: Namespace, plain: dict[str, object]) -> None:
    """Enable LoRA if its rank is given; derive the number of slots from the number of versions to keep."""
    if args.max_lora_rank is not None:
        args.enable_lora = True
    if args.enable_lora:
        # A version exists only in its slot, so there must be as many slots as versions at one time.
        args.max_loras = args.max_loras or args.lora_keep_versions + SPARE_ADAPTERS
        if args.max_loras <= args.lora_keep_versions:
            wanted = f"{args.lora_keep_versions + 1} or more: --lora-keep-versions, and one that is being loaded"
            fix = "raise it, or lower --lora-keep-versions"
            raise FatalError(field="--max-loras", got=args.max_loras, wanted=wanted, fix=fix)
        if args.max_cpu_loras not in (None, args.max_loras):
            wanted = f"{args.max_loras} as --max-loras, or none: adapters are kept in their slots only"
            raise FatalError(field="--max-cpu-loras", got=args.max_cpu_loras, wanted=wanted, fix="leave it out")
        args.max_cpu_loras = args.max_loras
    for name, value in plain.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _plan_graphs(args: Namespace) -> None:
    """Set the batch sizes that get a CUDA graph, unless the user set them or there are no graphs."""
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    given = [getattr(place, name, None) for place in (args, args.compilation_config) for name in names]
    # vLLM chooses other sizes for its performance modes, and for speculative decoding multiples of its tokens a step.
    own = args.performance_mode != "balanced" or args.speculative_config is not None
    if args.enforce_eager or own or any(each is not None for each in given):
        return
    world_size = args.pipeline_parallel_size * args.tensor_parallel_size
    sequences = args.max_num_seqs or _default_max_num_seqs(world_size)
    # A batch has a token of each running sequence, and prompts: twice as many, as in vLLM.
    sizes = *GRAPH_SIZES, min(sequences, GRAPH_SIZES[-1])
    args.cudagraph_capture_sizes = sorted({min(size, 2 * sequences) for size in sizes})


def _default_max_num_seqs(world_size: int) -> int:
    """Return how many sequences this vLLM's server computes at one time by default, on this GPU."""
    usage = seams.require("vllm.usage.usage_lib", "UsageContext").OPENAI_API_SERVER
    _, sequences = seams.require("vllm.engine.arg_utils", "EngineArgs.get_batch_defaults")(world_size)
    return sequences[usage]


def _place_worker(args: Namespace) -> None:
    """Set `distributed_executor_backend` for a server's only worker: its own process, or the engine's.

    A worker in its own process prepares a step while the engine's process schedules the next one. On an H100, a server
    of a 1.5B model generated 34 % more tokens/s in this way, and a run on one GPU 13 % more (docs/benchmarks.md). Both
    processes busy-wait for each other while they generate: on two cores, a small model then generates half as many
    tokens/s.
    """
    degrees = ("tensor", "pipeline", "data", "prefill_context")
    if any(getattr(args, f"{degree}_parallel_size") > 1 for degree in degrees):
        return  # vLLM has a process for each worker
    on_cpu = seams.device_type() == "cpu"
    if args.distributed_executor_backend is None and on_cpu:
        args.distributed_executor_backend = "uni"
    elif args.distributed_executor_backend is None:
        gpus = len(list(_GPUS.glob("*"))) or 1
        cores: float = len(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # a container's quota (cgroup v2)
            quota, period = _QUOTA.read_text().split()
            cores = cores if quota == "max" else min(cores, int(quota) / int(period))
        has_room = cores >= CORES * gpus and _SHM.is_dir() and shutil.disk_usage(_SHM).free >= WORKER_QUEUE_BYTES
        args.distributed_executor_backend = "mp" if has_room else "uni"
    if on_cpu and args.distributed_executor_backend == "uni":
        # vLLM turns "uni" into "mp" on the CPU unless this says 0; the engine has its own process either way.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _plan_logits(args: Namespace) -> None:
    """Have vLLM return the fp32 sums of the head's product, unless the user has set the head's dtype.

    The trainer's logits are fp32, too (`grpo_trainer.engine.head`). Rounded to bfloat16, a logit of 10 is off by up to
    0.03: half of the total error of a bfloat16 model, measured on the demo model. "auto" avoids float32 on a CPU, where
    each step would convert the head's weights. vLLM's batch-invariant product has only the model's dtype.

    vLLM builds the text part of a conditional model from `text_config` alone, so the head's dtype is set there, too.
    """
    exact = args.logits_dtype == "float32" or (args.logits_dtype == "auto" and seams.device_type() == "cuda")
    if exact and is_batch_invariant():
        logger.warning("VLLM_BATCH_INVARIANT: logits have the model's dtype, the only one of its product")
    elif exact:
        overrides = {"head_dtype": "float32", **args.hf_overrides}
        if len(config_parts(checks.config_or_nothing(args.model))) > 1:
            head = {"head_dtype": overrides["head_dtype"]}
            overrides["text_config"] = head | overrides.get("text_config", {})
        args.hf_overrides = overrides


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 1 or more")
    return int(text)


def _version(text: str) -> int:
    if not 0 <= int(text) <= HIGHEST_VERSION:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 0 to {HIGHEST_VERSION}")
    return int(text)
