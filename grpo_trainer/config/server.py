"""Options of the inference server: as flags of `grpo train`, which may start it, and as `--server.…` of `grpo run`.

In a run both name the same server: what either says is the server's, whoever starts it and whoever asks it. Imports no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from grpo_trainer.config.options import Section, key_of, leaves, option, shown, split_arguments
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_PORT

ServedDtype = Literal["auto", "float32", "bfloat16", "float16"]
DEFAULT_GPU_SHARE = 0.45
KEY_VARIABLE = "VLLM_API_KEY"
"""By which vLLM itself is told its key: no list of processes shows it."""

SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
"""vLLM's other names of options that we have."""
DEGREES = tuple(SHORT.values())
TRAINERS = {
    "--api-key": "--vllm-api-key",
    "--model": "--model-name",
    "--served-model-name": "--model-name",
    "--logits-dtype": "--logits-dtype",
}
"""Arguments of a server that follow from the trainer's options."""
UNSHARED = ("--quantization", "-q", "--enable-sleep-mode")
"""Arguments of a server whose weights no trainer can use."""


class ServedOptions(Section):
    """What both ways of naming the server's options have in common."""

    prefix: ClassVar[str] = ""

    @field_validator("extra_args", mode="before", check_fields=False)
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_arguments(value) if isinstance(value, str) else value

    @field_validator("extra_args", check_fields=False)
    @classmethod
    def _have_no_option(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """So that there is one place where an option of the server stands, and everybody looks there."""
        for word in value:
            flag = word.partition("=")[0]
            if (own := cls.flag_of(flag)) is not None:
                raise ConfigError("environments and trainer must know it, too", got=flag, wanted=own, fix=f"use {own}")
        return value

    @classmethod
    def flag_of(cls, flag: str) -> str | None:
        """Our option for a flag of vLLM's, if there is one."""
        name = SHORT.get(flag) or key_of(flag)
        if flag in TRAINERS:
            return TRAINERS[flag]
        return cls.flags().get(name) if flag.startswith("-") else None

    @classmethod
    def flags(cls) -> dict[str, str]:
        """The first flag of each option, by its name."""
        return {leaf.path[-1]: f"--{cls.prefix}{leaf.flags[0].removeprefix('--')}" for leaf in leaves(cls)}


class VllmConfig(ServedOptions):
    """Inference server."""

    host: str = option("127.0.0.1", help="Host of the inference server.", flags=("--vllm-host",))
    port: int = option(DEFAULT_PORT, help="Port of the inference server.", flags=("--vllm-port",), ge=1, le=65535)
    also: tuple[str, ...] = option(
        (),
        help="More servers of the same policy, HOST:PORT with commas between: each is proved and published to. Where "
        "this command starts vLLM, it starts these, too.",
        flags=("--vllm-also",),
    )
    gpus: str | None = option(
        None,
        help="CUDA_VISIBLE_DEVICES of each server that this command starts, with ; between: 0;1 (default: as here).",
        flags=("--vllm-gpus",),
    )
    api_key: str | None = option(
        None,
        help="Bearer token of the inference server (default: VLLM_API_KEY, which no list of processes shows).",
        flags=("--vllm-api-key",),
    )
    startup_timeout: float = option(
        600.0, help="Seconds to wait for the inference server to be ready.", flags=("--vllm-timeout",), gt=0
    )
    max_model_len: int | None = option(
        None, help="Longest sequence served, where this command starts vLLM (default: --seq-len).", gt=0
    )
    gpu_memory_utilization: float = option(
        DEFAULT_GPU_SHARE, help="Share of the GPU's memory for vLLM, where this command starts it.", gt=0, le=1
    )
    dtype: ServedDtype = option(
        "auto",
        help="Weights and activations of vLLM, where this command starts it; auto: --dtype.",
        flags=("--vllm-dtype",),
    )
    enforce_eager: bool = option(
        False,
        help="No CUDA graphs, where this command starts vLLM: several times slower.",
        flags=("--vllm-enforce-eager",),
    )
    tensor_parallel_size: int = option(
        1, help="GPUs over which vLLM cuts each layer, where this command starts it.", ge=1
    )
    pipeline_parallel_size: int = option(
        1, help="GPUs over which vLLM deals the layers, where this command starts it.", ge=1
    )
    data_parallel_size: int = option(
        1, help="Replicas of the model that vLLM runs, where this command starts it.", ge=1
    )
    extra_args: tuple[str, ...] = option(
        (),
        help="More arguments for `grpo serve`, comma-separated, where this command starts it.",
        flags=("--vllm-extra-args",),
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _from_environment(cls, value: Any) -> Any:
        return value or os.environ.get(KEY_VARIABLE) or None

    @field_validator("also", mode="before")
    @classmethod
    def _split_also(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("also")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            host, _, port = address.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= 65535:
                raise ConfigError(got=address, wanted="HOST:PORT, for example 10.0.0.2:9001")
        return value

    @model_validator(mode="after")
    def _are_others(self) -> VllmConfig:
        addresses = [f"{self.host}:{self.port}", *self.also]
        if len(set(addresses)) < len(addresses):
            raise ConfigError(field="--vllm-also", got=f"{', '.join(addresses)}", wanted="each server once")
        if self.gpus is not None:
            check_gpus("--vllm-gpus", self.gpus, len(addresses))
        return self

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def each(self) -> tuple[VllmConfig, ...]:
        """One for each server: this one, then those of `also`."""
        if not self.also:
            return (self,)
        gpus = [None] * (1 + len(self.also)) if self.gpus is None else self.gpus.split(";")
        places = [(self.host, self.port), *(_place(address) for address in self.also)]
        return tuple(
            self.model_copy(update={"host": host, "port": port, "gpus": own, "also": ()})
            for (host, port), own in zip(places, gpus, strict=True)
        )


def server_names(servers: int) -> tuple[str, ...]:
    """Of the processes, logs and folders of several servers: server, server-2, …"""
    return ("server", *(f"server-{number}" for number in range(2, servers + 1)))


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def check_gpus(flag: str, gpus: str, servers: int) -> None:
    """Refuse GPUs that are not one set for each server.

    Raises:
        ConfigError: they are not.
    """
    sets = [part.strip() for part in gpus.split(";")]
    if len(sets) != servers or not all(sets):
        example = ";".join(map(str, range(servers)))
        raise ConfigError(
            f"{len(sets)} sets of GPUs for {servers} servers",
            field=flag,
            got=gpus,
            wanted=f"a set for each server, such as {example}",
        )


class ServerProcess(ServedOptions):
    """vLLM server."""

    prefix: ClassVar[str] = "server."

    port: int = option(DEFAULT_PORT, help="Port; 0 picks a free one.", ge=0, le=65535)
    replicas: int = option(
        1, help="Servers of the same policy, on this port and those after it: requests are spread over them.", ge=1
    )
    gpus: str | None = option(
        None, help="CUDA_VISIBLE_DEVICES of each of them, with ; between: 0;1 (required for several on GPUs)."
    )
    dtype: ServedDtype = option("auto", help="Weights and activations; auto: as the trainer's --dtype.")
    max_model_len: int | None = option(None, help="Longest sequence served (default: the trainer's --seq-len).", gt=0)
    gpu_memory_utilization: float = option(
        DEFAULT_GPU_SHARE, help="Share of the GPU's memory for vLLM, trainer on the same GPU.", gt=0, le=1
    )
    enforce_eager: bool = option(False, help="No CUDA graphs: several times slower.")
    tensor_parallel_size: int = option(1, help="GPUs over which each layer is cut.", ge=1)
    pipeline_parallel_size: int = option(1, help="GPUs over which the layers are dealt.", ge=1)
    data_parallel_size: int = option(1, help="Replicas of the model, each on GPUs of its own.", ge=1)
    extra_args: tuple[str, ...] = option((), help="More arguments for `grpo serve`, comma-separated.")

    @model_validator(mode="after")
    def _gpus_fit(self) -> ServerProcess:
        if self.gpus is not None:
            check_gpus("--server.gpus", self.gpus, self.replicas)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Of the processes."""
        return server_names(self.replicas)

    @property
    def wanted_ports(self) -> dict[str, int]:
        """The port of each; 0: any free one."""
        return {name: self.port and self.port + number for number, name in enumerate(self.names)}


SAID_TWICE = tuple(name for name in ServerProcess.model_fields if name not in ("port", "replicas", "gpus"))
"""Options that a run has as `--server.…` and under the trainer's name."""


def flags_of_one(name: str) -> tuple[str, str]:
    """Both flags of such an option: the run's, the trainer's."""
    return ServerProcess.flags()[name], VllmConfig.flags()[name]


SAID_OTHERWISE = tuple(key_of(flags_of_one(name)[1]) for name in SAID_TWICE)
"""Their keys as the trainer has them, which a run's help leaves out."""


def one_server(server: ServerProcess, vllm: VllmConfig) -> tuple[ServerProcess, VllmConfig]:
    """Both as one: what either was given, the other has, too.

    Raises:
        ConfigError: they were given different values for the same thing.
    """
    ours, its = {}, {}
    for name in SAID_TWICE:
        here, there = name in server.model_fields_set, name in vllm.model_fields_set
        one, other = getattr(server, name), getattr(vllm, name)
        if here and there and one != other:
            first, second = flags_of_one(name)
            raise ConfigError(
                "in `grpo run` two names of one option",
                field=first,
                got=f"{shown(one)} and {second} {shown(other)}",
                wanted="one value",
                fix=f"leave {second} out",
            )
        if here:
            its[name] = one
        elif there:
            ours[name] = other
    return server.model_copy(update=ours), vllm.model_copy(update=its)


def why_not_shared(server: ServerProcess) -> tuple[str, str] | None:
    """Return flag and value of the first option with which no trainer could use the server's weights."""
    for name in DEGREES:
        if getattr(server, name) > 1:
            return ServerProcess.flags()[name], str(getattr(server, name))
    return next((("--server.extra-args", flag) for flag, _ in arguments(server.extra_args) if flag in UNSHARED), None)


def arguments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags with the word that follows each, however they were joined."""
    for flag, value in pairwise([*(part for word in words for part in word.split("=", 1)), ""]):
        if flag.startswith("-"):
            yield flag, value
