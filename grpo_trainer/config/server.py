"""Options of the inference server: `--server.…` and the table `[server]`, in `grpo run` and in `grpo train`.

`grpo serve` has the same names, without `server.`. The predecessor's names, such as `--vllm-port`, are accepted, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import field_validator

from grpo_common.http import address
from grpo_trainer.config.options import COMMA_SEPARATED, LARGEST_PORT, Arguments, Section, from_variable, key_of, option
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_PORT

ServedDtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]
DEFAULT_GPU_SHARE = 0.45
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM itself reads its key from this environment variable, which no list of processes shows."""

DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SHORT: Mapping[str, str] = dict(zip(("-tp", "-pp", "-dp", "-q"), (*DEGREES, "quantization"), strict=True))
"""vLLM's short names of options that we judge."""
TRAINERS = {"--model": "--model-name", "--served-model-name": "--model-name", "--logits-dtype": "--logits-dtype"}
"""Arguments of a server that follow from the trainer's options."""


class Server(Section):
    """Inference server."""

    host: str = option("127.0.0.1", former=("--vllm-host",))
    """Host of the server."""
    port: int = option(DEFAULT_PORT, former=("--vllm-port",), ge=0, le=LARGEST_PORT)
    """Port; in `grpo run` 0 picks a free one."""
    replicas: int = option(1, ge=1)
    """Servers of the same policy, on consecutive ports, in `grpo run`; environments spread requests over them."""
    also: Annotated[tuple[str, ...], COMMA_SEPARATED] = option((), former=("--vllm-also",))
    """Further servers of the same policy: HOST:PORT, comma-separated. The trainer proves and updates each of them. If
    `grpo train` starts vLLM, it starts them, too."""
    roster: Path | None = option(None, former=("--vllm-roster",))
    """Folder in which grpo run keeps the list of a run's servers. The trainer follows its changes."""
    gpus: str | None = option(None, former=("--vllm-gpus",))
    """CUDA_VISIBLE_DEVICES of each server, separated by ;, such as 0;1 (required for several servers on GPUs; refused
    with --cluster)."""
    api_key: Annotated[str | None, from_variable(KEY_VARIABLE)] = option(None, former=("--vllm-api-key",))
    """Bearer token of the server (default: the variable VLLM_API_KEY; a process list shows flags)."""
    startup_timeout: float = option(600.0, former=("--vllm-timeout",), gt=0)
    """Seconds to wait for the server to be ready."""
    dtype: ServedDtype = option("auto", former=("--vllm-dtype",))
    """Dtype of weights and activations; auto: the trainer's --dtype."""
    max_model_len: int | None = option(None, former=("--max-model-len",), gt=0)
    """Longest sequence served (default: the trainer's --seq-len)."""
    gpu_memory_utilization: float = option(
        DEFAULT_GPU_SHARE, former=("--gpu-memory-utilization", "--vllm-gpu-memory-utilization"), gt=0, le=1
    )
    """Share of each GPU's memory for vLLM (default: 0.45, or less if the trainer needs room)."""
    enforce_eager: bool = option(False, former=("--vllm-enforce-eager",))
    """Disable CUDA graphs; generation is several times slower."""
    tensor_parallel_size: int = option(1, former=("--tensor-parallel-size", "--vllm-tensor-parallel-size"), ge=1)
    """Tensor parallel size: GPUs that share each layer. For `grpo train` with shared_vllm, that of the running
    server."""
    pipeline_parallel_size: int = option(1, former=("--pipeline-parallel-size",), ge=1)
    """Pipeline parallel size: GPUs that each hold some layers."""
    data_parallel_size: int = option(1, former=("--data-parallel-size",), ge=1)
    """Data parallel size: replicas of the model, each on other GPUs."""
    quantization: Quantization = option("none", former=("--vllm-quantization", "--quantization"))
    """fp8: quantise the base model to 8 bits as it is loaded; adapters stay in 16 bits. Needs a GPU; not with
    shared_vllm, --share-base or broadcast."""
    kv_cache_dtype: KvCacheDtype = option("auto", former=("--vllm-kv-cache-dtype", "--kv-cache-dtype"))
    """fp8: KV cache in 8 bits, for twice the tokens."""
    extra_args: Arguments = option((), former=("--vllm-extra-args",))
    """More arguments for `grpo serve`, comma-separated."""

    @field_validator("also")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            host, _, port = each.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= LARGEST_PORT:
                raise ConfigError(got=each, wanted="HOST:PORT, for example 10.0.0.2:9001")
        return value

    @field_validator("extra_args")
    @classmethod
    def _have_no_option(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """So that there is one place where an option of the server stands, and everybody looks there."""
        for word in value:
            flag = word.partition("=")[0]
            name = SHORT.get(flag) or key_of(flag)
            is_option = flag.startswith("-") and name in cls.model_fields and name != "host"  # that it listens on
            own = TRAINERS.get(flag) or (f"--server.{name.replace('_', '-')}" if is_option else None)
            if own is not None:
                raise ConfigError("environments and trainer must know it, too", got=flag, wanted=own, fix=f"use {own}")
        return value

    @property
    def url(self) -> str:
        return f"http://{address(self.host, self.port)}"

    @property
    def in_8_bits(self) -> bool:
        """Whether weights or KV cache of the server are coarser than the trainer's."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"

    @property
    def each(self) -> tuple[Server, ...]:
        """One for each server: this one, then those of `also`."""
        if not self.also:
            return (self,)
        gpus = [None] * (1 + len(self.also)) if self.gpus is None else self.gpus.split(";")
        others = (each.rpartition(":") for each in self.also)
        places = [(self.host, self.port), *((host.strip("[]"), int(port)) for host, _, port in others)]
        return tuple(
            self.model_copy(update={"host": host, "port": port, "gpus": own, "also": ()})
            for (host, port), own in zip(places, gpus, strict=True)
        )

    @property
    def degree(self) -> int:
        """GPUs of one server."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def names(self) -> tuple[str, ...]:
        """Of the processes of a run."""
        return server_names(self.replicas)

    @property
    def wanted_ports(self) -> dict[str, int]:
        """The port of each; 0: any free one."""
        return {name: self.port and self.port + number for number, name in enumerate(self.names)}


def server_names(servers: int) -> tuple[str, ...]:
    """Of the processes, logs and folders of several servers: server, server-2, …"""
    return ("server", *(f"server-{number}" for number in range(2, servers + 1)))


def arguments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags with the word that follows each, however they were joined."""
    for flag, value in pairwise([*(part for word in words for part in word.split("=", 1)), ""]):
        if flag.startswith("-"):
            yield flag, value
