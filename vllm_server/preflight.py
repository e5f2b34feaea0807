"""Check whether the installed vLLM serves a model. `python -m vllm_server.preflight MODEL` prints one JSON line.

Launchers use it to refuse a model before they start anything. It loads no weights. If vLLM's tables list the
architecture, they decide; otherwise vLLM's full check does, which takes longer.
"""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from vllm_server import compat, seams
from vllm_server.arguments import set_environment
from vllm_server.errors import FatalError, gist
from vllm_server.protocol import PreflightReport
from vllm_server.start_checks import check_model_path


def inspect_model(model: str, *, trust_remote_code: bool = False) -> PreflightReport:
    """Return the report for a model by path or by name on the hub."""
    try:
        check_model_path(model)
    except FatalError as error:
        return _report(model, [], str(error))
    try:
        config = read_config(model)
    except (OSError, ValueError) as error:
        return _report(model, [], f"got no readable config.json ({error}), wanted a saved model; check the path")
    architectures = [str(name) for name in config.get("architectures") or []]
    if not architectures:
        reason = "got a config.json without `architectures`, wanted a causal language model; save it again"
        return _report(model, [], reason)
    by_tables = bool(set(architectures) & _text_generators()) and not config.get("is_encoder_decoder")
    reason = "" if by_tables else _full_check(model, architectures, trust_remote_code)
    return _report(model, architectures, reason or _cpu_head_check(config), by_tables=by_tables)


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


def _text_generators() -> frozenset[str]:
    """Return architectures that vLLM implements for text generation."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    return frozenset(getattr(registry, "_TEXT_GENERATION_MODELS", ()))  # empty: the full check decides


def _full_check(model: str, architectures: list[str], trust_remote_code: bool) -> str:
    """Return why vLLM would refuse the model; empty if it would not."""
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    names = ", ".join(architectures)
    wanted = "wanted a decoder-only causal language model that vLLM serves; choose another model"
    try:
        config = engine_args(model=model, trust_remote_code=trust_remote_code).create_model_config()
    except Exception as error:  # vLLM refuses by many types; each is a reason
        return f"got {names}, which vLLM {seams.vllm_version()} does not serve ({gist(error)}); {wanted}"
    if config.runner_type != "generate":
        return f"got {names}, which vLLM serves for {config.runner_type} only; {wanted}"
    if config.is_encoder_decoder:
        return f"got {names}, an encoder-decoder; {wanted}"
    return ""


def _cpu_head_check(config: dict[str, Any]) -> str:
    """Return why attention on the CPU would refuse the model; empty if it would not.

    vLLM itself fails only with the first request, and the engine dies.
    """
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (heads and config.get("hidden_size", 0) // heads)
    if compat.device_type() != "cpu" or not size:
        return ""
    sizes = compat.cpu_head_sizes()
    if not sizes or size in sizes:
        return ""
    return (
        f"got attention heads of size {size}, wanted one that the CPU kernels have "
        f"({', '.join(map(str, sizes))}); choose another model or serve it on a GPU"
    )


def _report(model: str, architectures: list[str], reason: str, *, by_tables: bool = False) -> PreflightReport:
    return PreflightReport(
        model=model,
        supported=not reason,
        reason=reason,
        by_tables=by_tables,
        architectures=architectures,
        vllm_version=seams.vllm_version(),
        torch_version=str(importlib.import_module("torch").__version__),
        device=compat.device_type(),
    )


def main(argv: list[str]) -> int:
    """Print the report. Return 0 if vLLM serves the model, 1 if not, 2 for a wrong command."""
    if len(argv) != 1:
        print("usage: python -m vllm_server.preflight MODEL", file=sys.stderr)
        return 2
    set_environment()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is only for the JSON line
        report = inspect_model(argv[0])
    print(msgspec.json.encode(report).decode())
    return 0 if report.supported else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
