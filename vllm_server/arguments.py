"""The command line: vLLM's own, plus ours, with defaults that suit a trainer's server."""

import argparse
import logging
import os
from argparse import Namespace

from grpo_common.http import SERVER_IDLE_S
from grpo_common.models import config_parts
from vllm_server import compat, executor, model_check, sockets
from vllm_server.errors import FatalError
from vllm_server.lora_kernels import KERNELS_VARIABLE
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
)
from vllm_server.worker import EXPERTS_VARIABLE, is_batch_invariant

logger = logging.getLogger("vllm.grpo.arguments")

PROGRAM = "grpo serve"
USAGE = f"{PROGRAM} --model MODEL [OPTIONS]"
DEFAULT_HOST = "127.0.0.1"

HELP_ALL = "--help-all"

WORKER_EXTENSION = "vllm_server.worker.extension.PolicyWorker"
SHARING_WORKER_EXTENSION = "vllm_server.worker.sharing.SharingWorker"

UNLOGGED = (HEALTH_ROUTE, BRIDGE_UPDATE_BEGIN_ROUTE, BRIDGE_UPDATE_END_ROUTE)
"""Routes without a line in the access log. Clients poll the first every second. Generation waits for the others; the
fence logs each update that ends, and the trainer each one that is refused."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
"""Batch sizes, in tokens, that get a CUDA graph; a batch is padded to the next one.

vLLM's default has 51 sizes up to 512. A start with adapters captured these twice in 18 s (135M parameters, one H200).
Batches above the largest size run without a graph, and Python then limits a small model's steps."""

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_IDLE_S),
    # On a CPU several processes share few cores: do not bind threads to cores, and let idle OpenMP threads sleep
    # instead of spinning.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
}


def early_arguments(argv: list[str]) -> Namespace:
    """Return host, port, keys and model without importing vLLM; `parse` reads the rest."""
    parser = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--uds")
    parser.add_argument("--model")
    parser.add_argument("--config")
    parser.add_argument("--api-key", "--api_key", nargs="*")
    return parser.parse_known_args(argv)[0]


def own_help() -> str:
    """Return the help of the flags that a trainer's server needs, ours first, without importing vLLM."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        usage=USAGE,
        description="vLLM's OpenAI-compatible server with more routes, which a GRPO trainer needs.",
        epilog=f"{HELP_ALL} lists every flag of vLLM's server as well.",
        add_help=False,
    )
    _add_policy_options(parser.add_argument_group("options for GRPO training"))
    plain = parser.add_argument_group("most used vLLM options")
    plain.add_argument("--model", metavar="MODEL", help="model folder or hub name")
    plain.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST})")
    plain.add_argument("--port", metavar="N", help=f"port to listen on (default: {DEFAULT_PORT})")
    plain.add_argument("--api-key", metavar="KEY", help="key that every client must send (default: $VLLM_API_KEY)")
    plain.add_argument("--max-lora-rank", metavar="N", help="serve adapters up to this rank (the trainer's --lora-r)")
    plain.add_argument(
        "--max-model-len",
        metavar="N",
        help="maximum tokens of prompt plus completion; at least the trainer's --seq-len",
    )
    plain.add_argument("--dtype", help="dtype of weights and activations (the trainer's --dtype)")
    plain.add_argument("--gpu-memory-utilization", metavar="SHARE", help="fraction of the GPU's memory for this server")
    return parser.format_help()


def set_environment() -> None:
    """Set vLLM's environment variables, except those that the user set. Call this before vLLM is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sockets.prepare()


def parse(argv: list[str]) -> Namespace:
    """Return the parsed command line. Exit with argparse's message if it is wrong."""
    parser = compat.server_parser(
        PROGRAM, "vLLM's OpenAI-compatible server with more routes, which a GRPO trainer needs."
    )
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
        **(_cpu_defaults() if compat.device_type() == "cpu" else {}),
    )
    args = parser.parse_args(argv)
    args.model = args.model or args.model_tag
    if not args.model:
        parser.error("--model: wanted a model's folder or name, got none; say --model PATH")
    args.lora_root = getattr(args, "lora_root", ["."])
    _plan_lora(args, plain)
    if args.worker_extension_cls:
        raise FatalError(
            field="--worker-extension-cls",
            got=args.worker_extension_cls,
            wanted="none, since the server sets its own extension",
            fix="leave it out",
        )
    args.worker_extension_cls = (
        SHARING_WORKER_EXTENSION if args.shared_weights or args.receive_weights else WORKER_EXTENSION
    )
    if args.enable_lora and compat.device_type() == "cuda":
        os.environ[KERNELS_VARIABLE] = args.lora_kernels
    _plan_logits(args)
    if args.return_routed_experts:
        os.environ[EXPERTS_VARIABLE] = "1"
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # experts are recorded in the older one
    executor.choose(args)
    if compat.device_type() != "cpu":
        _plan_graphs(args)
    compat.validate_args(args)
    return args


def _add_policy_options(group: argparse._ArgumentGroup) -> None:
    """Add this server's options."""
    group.add_argument(
        "--lora-name",
        default=DEFAULT_LORA_NAME,
        help="prefix of the names under which adapter versions are served: NAME-vN (default: %(default)s)",
    )
    group.add_argument(
        "--lora-root",
        action="append",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="adapters are loaded only from this folder and its subfolders (repeatable; default: the current folder)",
    )
    group.add_argument(
        "--lora-keep-versions",
        type=_positive,
        default=DEFAULT_KEEP_VERSIONS,
        metavar="N",
        help="number of newest versions that stay loaded (default: %(default)s)",
    )
    group.add_argument(
        "--lora-kernels",
        choices=("grpo", "vllm"),
        default="grpo",
        help="LoRA kernels on an NVIDIA GPU: grpo (faster when a batch has tokens of several versions) or vllm "
        "(default: grpo)",
    )
    group.add_argument(
        "--logits-dtype",
        choices=("auto", "float32", "model"),
        default="auto",
        help="dtype of the logits. float32: not rounded to 16 bits, so logprobs are as exact as the trainer's; model: "
        "the model's dtype, as in vLLM; auto (the default): float32 on a GPU, model on a CPU",
    )
    group.add_argument(
        "--return-routed-experts",
        action="store_true",
        help="return the experts that a mixture-of-experts model chose for each token; a trainer with "
        "--routing-replay=server needs them",
    )
    group.add_argument(
        "--policy-version",
        type=_version,
        default=0,
        metavar="N",
        help="version number of the starting weights (default: %(default)s)",
    )
    group.add_argument(
        "--shared-weights",
        action="store_true",
        default=os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "").lower() in ("1", "true", "yes"),
        help="share the weights in memory with a trainer on this machine, for --weight-bridge-mode shared_vllm and "
        "--share-base (or set VLLM_ENABLE_SHARED_WEIGHTS=1)",
    )
    group.add_argument(
        "--receive-weights",
        action="store_true",
        help="receive all weights from a trainer while the server runs (--weight-bridge-mode broadcast)",
    )
    group.add_argument(
        "--bridge-config-path",
        metavar="FILE",
        help="file in which the server tells trainers where the shared weights are (default: $VLLM_BRIDGE_CONFIG_PATH, "
        "else a file in $LOGDIR, else one in the folder atropos_bridge of the system's temporary folder)",
    )


def _plan_lora(args: Namespace, plain: dict[str, object]) -> None:
    """Enable LoRA if its rank is given; derive the number of slots from the number of versions to keep."""
    if args.max_lora_rank is not None:
        args.enable_lora = True
    if args.enable_lora:
        # A version exists only in its slot, so there must be as many slots as versions at one time.
        args.max_loras = args.max_loras or args.lora_keep_versions + SPARE_ADAPTERS
        if args.max_loras <= args.lora_keep_versions:
            raise FatalError(
                field="--max-loras",
                got=args.max_loras,
                wanted=f"{args.lora_keep_versions + 1} or more: --lora-keep-versions, and one that is being loaded",
                fix="raise it, or lower --lora-keep-versions",
            )
        if args.max_cpu_loras not in (None, args.max_loras):
            raise FatalError(
                field="--max-cpu-loras",
                got=args.max_cpu_loras,
                wanted=f"{args.max_loras} as --max-loras, or none: adapters are kept in their slots only",
                fix="leave it out",
            )
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
    sequences = args.max_num_seqs or compat.default_max_num_seqs(world_size)
    # A batch has a token of each running sequence, and prompts: twice as many, as in vLLM.
    sizes = *GRAPH_SIZES, min(sequences, GRAPH_SIZES[-1])
    args.cudagraph_capture_sizes = sorted({min(size, 2 * sequences) for size in sizes})


def _cpu_defaults() -> dict[str, object]:
    """Return defaults for a CPU: float32 (16 bits are no faster), no compilation, and a small KV cache."""
    return {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}


def _plan_logits(args: Namespace) -> None:
    """Have vLLM return the fp32 sums of the head's product, unless the user has set the head's dtype.

    The trainer's logits are fp32, too (`grpo_trainer.engine.head`). Rounded to bfloat16, a logit of 10 is off by up to
    0.03: half of the total error of a bfloat16 model, measured on the demo model. "auto" avoids float32 on a CPU, where
    each step would convert the head's weights. vLLM's batch-invariant product has only the model's dtype.

    vLLM builds the text part of a conditional model from `text_config` alone, so the head's dtype is set there, too.
    """
    exact = args.logits_dtype == "float32" or (args.logits_dtype == "auto" and compat.device_type() == "cuda")
    if exact and is_batch_invariant():
        logger.warning("VLLM_BATCH_INVARIANT: logits have the model's dtype, the only one of its product")
    elif exact:
        overrides = {"head_dtype": "float32", **args.hf_overrides}
        if len(config_parts(model_check.config_or_nothing(args.model))) > 1:
            head = {"head_dtype": overrides["head_dtype"]}
            overrides["text_config"] = head | overrides.get("text_config", {})
        args.hf_overrides = overrides


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 1 or more")
    return value


def _version(text: str) -> int:
    value = int(text)
    if not 0 <= value <= HIGHEST_VERSION:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 0 to {HIGHEST_VERSION}")
    return value
