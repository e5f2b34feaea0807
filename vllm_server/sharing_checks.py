"""Refuse settings that prevent a trainer from writing the weights, before anything is loaded; pure, without vLLM."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from grpo_common.errors import Problem
from grpo_common.models import config_parts
from grpo_common.sharing import indivisible, unreceivable, unshareable
from vllm_server.errors import FatalError

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_REPACKING_FORMATS = ("bitsandbytes", "gguf")


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
        FatalError: it names everything that cannot work; exit status 2.
    """
    refusals = _refusals(args, config, device, environment, kernel)
    if problems := [replace(refusal, field="--shared-weights") for refusal in refusals]:
        raise FatalError.of(problems)


def check_receivable(args: Namespace, config: Mapping[str, Any], device: str) -> None:
    """Raise for settings with which no trainer could send weights; see `check_shareable`."""
    found = [replace(each, got=f"{flag(each.field)} {each.got}".rstrip()) for each in unreceivable(vars(args))]
    refusals = [*found, *_plain_weights(args, config, device)]
    if problems := [replace(refusal, field="--receive-weights") for refusal in refusals]:
        raise FatalError.of(problems)


def _refusals(
    args: Namespace, config: Mapping[str, Any], device: str, environment: Mapping[str, str], kernel: str
) -> Iterator[Problem]:
    for refusal in unshareable(vars(args)):
        yield replace(refusal, got=f"{flag(refusal.field)} {refusal.got}")
    for text in config_parts(config):
        for refusal in indivisible(text, args.tensor_parallel_size):
            size = f"--tensor-parallel-size {args.tensor_parallel_size}"
            yield replace(refusal, got=f"{size}, and a {refusal.field} of {refusal.got}")
    if args.port == 0 and not args.uds:
        yield Problem(
            got="--port 0",
            wanted="a port's number, since the bridge file tells the trainer where the server is",
            fix="choose a port",
        )
    yield from _plain_weights(args, config, device)
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


def _plain_weights(args: Namespace, config: Mapping[str, Any], device: str) -> Iterator[Problem]:
    """Yield what keeps the engine from computing with the parameters as a checkpoint has them."""
    if args.load_format in _REPACKING_FORMATS:
        yield Problem(
            got=f"--load-format {args.load_format}",
            wanted="plain weights, since packed ones cannot be trained in place",
            fix="use safetensors",
        )
    for text in config_parts(config):
        yield from _model_refusals(text)
    if device == "cuda" and args.moe_backend not in ("auto", "triton"):
        yield Problem(
            got=f"--moe-backend {args.moe_backend}",
            wanted="triton, since the others reorder experts' weights",
            fix="leave it out",
        )


def _model_refusals(config: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            found = config[name]
            method = found.get("quant_method", "?") if isinstance(found, Mapping) else found
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
