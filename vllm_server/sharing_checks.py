"""Refuse settings that do not work with shared weights, before anything is loaded. Pure: no vLLM, no torch."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_common.errors import Problem
from vllm_server.errors import FatalError

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_REPACKING_FORMATS = ("bitsandbytes", "gguf")

# Flags by argparse's name: the only value that works (or the value that means off), the reason, and the fix.
_ONLY: tuple[tuple[str, Any, str, str], ...] = (
    ("tensor_parallel_size", 1, "each GPU would hold a part of each weight", "serve on one GPU"),
    ("pipeline_parallel_size", 1, "each GPU would hold some layers", "serve on one GPU"),
    ("data_parallel_size", 1, "each replica would hold its own weights", "serve on one GPU"),
    ("enable_sleep_mode", False, "sleep would free memory that the trainer uses", "leave it out"),
    ("cpu_offload_gb", 0, "the weights would be in two places", "leave it out"),
    ("kv_transfer_config", None, "caches outside the engine outlive an update of the weights", "leave it out"),
)


def check_shareable(
    args: Namespace, config: Mapping[str, Any], device: str, environment: Mapping[str, str], kernel: str
) -> None:
    """Raise for the first setting that does not work with shared weights.

    Args:
        args: the parsed command line.
        config: the model's config.json.
        device: "cpu" or "cuda".
        kernel: the kernel's release, `os.uname().release`.

    Raises:
        FatalError: field, got, wanted, fix; exit status 2.
    """
    for refusal in _refusals(args, config, device, environment, kernel):
        raise FatalError(field="--shared-weights", got=refusal.got, wanted=refusal.wanted, fix=refusal.fix)


def _refusals(
    args: Namespace, config: Mapping[str, Any], device: str, environment: Mapping[str, str], kernel: str
) -> Iterator[Problem]:
    for name, only, why, fix in _ONLY:
        value = getattr(args, name, only)
        if value != only:
            wanted = f"{'none' if only is None else only}, since {why}"
            yield Problem(got=f"{flag(name)} {value}", wanted=wanted, fix=fix)
    if args.port == 0 and not args.uds:
        yield Problem(
            got="--port 0",
            wanted="a port's number, since the bridge file tells the trainer where the server is",
            fix="choose a port",
        )
    if args.load_format in _REPACKING_FORMATS:
        yield Problem(
            got=f"--load-format {args.load_format}",
            wanted="plain weights, since packed ones cannot be trained in place",
            fix="use safetensors",
        )
    for text in (config, config.get("text_config") or {}):
        yield from _model_refusals(text)
    if args.quantization:
        yield Problem(
            got=f"--quantization {args.quantization}",
            wanted="none, since quantised weights cannot be trained in place",
            fix="leave it out",
        )
    if device != "cuda":
        return
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            yield Problem(
                got=f"{name}={environment[name]}",
                wanted="no expandable_segments, since their memory cannot be shared",
                fix=f"unset {name}",
            )
    if "microsoft" in kernel.lower():
        yield Problem(
            got=f"WSL ({kernel})",
            wanted="Linux itself, since WSL has no CUDA IPC",
            fix="use lora_only or a Linux machine",
        )
    if args.moe_backend not in ("auto", "triton"):
        yield Problem(
            got=f"--moe-backend {args.moe_backend}",
            wanted="triton, since the others reorder experts' weights",
            fix="leave it out",
        )


def _model_refusals(config: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            method = config[name].get("quant_method", "?")
            yield Problem(
                got=f"a model with {name} ({method}) in its config.json",
                wanted="plain weights, since quantised ones cannot be trained in place",
                fix="use lora_only, or the model before it was quantised",
            )
    if config.get("kv_lora_rank"):
        yield Problem(
            got=f"a model with multi-head latent attention (kv_lora_rank {config['kv_lora_rank']})",
            wanted="a model without it, since vLLM precomputes products of its weights that an update does not change",
            fix="use lora_only",
        )


def flag(name: str) -> str:
    """Return the flag of a parsed argument's name."""
    return "--" + name.replace("_", "-")
