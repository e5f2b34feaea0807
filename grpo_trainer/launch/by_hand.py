"""`grpo train` alone needs a rollout API, an inference server and an environment: the commands that start them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from urllib.parse import urlsplit

from grpo_common.redaction import redacted_arguments
from grpo_trainer.config.server import KEY_VARIABLE
from grpo_trainer.config.train import API_KEY_VARIABLE, TrainConfig
from grpo_trainer.launch.plan import server_process, weight_flags
from grpo_trainer.server_client import answers


def commands_to_start(
    config: TrainConfig, *, on_gpu: bool, there: Callable[[str], bool] = answers
) -> dict[str, tuple[str, ...]]:
    """Return what is not there yet and its address, with the commands that start it, as one types them.

    An environment is named with the API: without that there is none.
    """
    found: dict[str, tuple[str, ...]] = {}
    if not there(config.atropos_url):
        found[f"rollout API at {config.atropos_url}"] = (_api(config), _environment(config))
    for each in () if config.owns_server else config.server.each:
        if not there(f"{each.url}/health"):
            one = config.model_copy(update={"server": each})
            found[f"inference server at {each.url}"] = (_server(one, on_gpu=on_gpu),)
    return found


def _api(config: TrainConfig) -> str:
    address = urlsplit(config.atropos_url)
    words = ["grpo", "api", "--port", str(address.port or 80)]
    if address.hostname not in (None, "localhost", "127.0.0.1"):
        words += ["--host", str(address.hostname)]
    return _typed(words, API_KEY_VARIABLE if config.rollout_api_key else None)


def _environment(config: TrainConfig) -> str:
    name = config.model_name
    urls = ",".join(f"{each.url}/v1" for each in config.server.each)
    words = ["grpo", "env", "arithmetic", "serve", "--env.tokenizer_name", name]
    words += ["--env.rollout_server_url", config.atropos_url, "--env.max_token_length", str(config.seq_len)]
    words += ["--openai.base_url", urls, "--openai.model_name", name]
    keys = {"--env.rollout_api_key": config.rollout_api_key, "--openai.api_key": config.server.api_key}
    return " ".join([_typed(words), *(f"{flag} …" for flag, key in keys.items() if key)])


def _server(config: TrainConfig, *, on_gpu: bool) -> str:
    bridge, flags = config, weight_flags(config, config.log_dir)
    if config.shares_weights:
        path = bridge.vllm_config_path if bridge.weight_bridge_mode in ("lora_only", "shared_vllm") else None
        flags = (*flags, "--shared-weights", *(("--bridge-config-path", str(path)) if path else ()))
    spec = server_process(config, python="python", on_gpu=on_gpu, model=config.model_name, flags=flags)
    command = _typed(["grpo", "serve", *spec.argv[3:]], KEY_VARIABLE if config.server.api_key else None)
    gpus = spec.env.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={gpus} {command}" if gpus else command


def _typed(words: list[str], key: str | None = None) -> str:
    """A command line; its key is named, not shown."""
    command = shlex.join(redacted_arguments(words))
    return f"{key}=… {command}" if key else command
