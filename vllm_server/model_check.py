"""Check that the installed vLLM generates text with a model, before the engine starts.

If vLLM's tables list the architecture, they decide; otherwise vLLM's own check does, which takes longer.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from vllm_server import compat, seams
from vllm_server.errors import FatalError, gist
from vllm_server.start_checks import check_model_path

_WANTED = "a decoder-only causal language model that vLLM serves"


def check_model(model: str, *, trust_remote_code: bool = False) -> None:
    """Raise a FatalError if vLLM can't generate text with a model, given by its path or by its name on the hub."""
    check_model_path(model)
    try:
        config = read_config(model)
    except (OSError, ValueError) as error:
        raise _refused(model, f"no readable config.json ({error})", "a saved model", "check the path") from error
    architectures = [str(name) for name in config.get("architectures") or []]
    if not architectures:
        raise _refused(model, "a config.json without `architectures`", "a causal language model", "save it again")
    if not set(architectures) & _text_generators() or config.get("is_encoder_decoder"):
        _check_by_vllm(model, ", ".join(architectures), trust_remote_code)
    _check_head_size(model, config)


def read_config(model: str) -> dict[str, Any]:
    """Return the model's config.json, from its folder, or else through transformers' cache and the hub.

    Raises:
        OSError, ValueError: the file is missing, or is not a JSON object.
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


def _text_generators() -> frozenset[str]:
    """Return architectures that vLLM implements for text generation."""
    return frozenset(seams.found("vllm.model_executor.models.registry", "_TEXT_GENERATION_MODELS"))


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
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (heads and config.get("hidden_size", 0) // heads)
    if compat.device_type() != "cpu" or not size:
        return
    sizes = compat.cpu_head_sizes()
    if size not in sizes:
        wanted = f"one that the CPU kernels have ({', '.join(map(str, sizes))})"
        fix = "choose another model or serve it on a GPU"
        raise _refused(model, f"attention heads of size {size}", wanted, fix)


def _refused(model: str, got: str, wanted: str, fix: str) -> FatalError:
    return FatalError(field=f"--model {model}", got=got, wanted=wanted, fix=fix)
