"""The measured server: it starts on a free port, and ends with the measurement."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from grpo_trainer.bench.sync.options import ServerChoice
from grpo_trainer.bench.sync.subject import Place
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import ProcessSpec, server_process

CPU_CACHE_BYTES_TINY = 64 << 20


def server_spec(
    config: TrainConfig, choice: ServerChoice, place: Place, flags: Sequence[str], tiny: bool
) -> ProcessSpec:
    """Return the server's process, with vLLM's own routes for adapters enabled for the baseline."""
    more = [*flags]
    if choice.tensor_parallel_size > 1:
        more += ["--tensor-parallel-size", str(choice.tensor_parallel_size)]
    if tiny and not place.on_gpu:
        more += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES_TINY)]
    spec = server_process(
        config, python=sys.executable, on_gpu=place.on_gpu, model=str(place.model), flags=(*more, *place.server_args)
    )
    env = {**spec.env, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if choice.server_gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = choice.server_gpus
    return dataclasses.replace(spec, env=env)


@contextmanager
def serving(spec: ProcessSpec, place: Place) -> Iterator[OwnedServer]:
    """Run a server within the block, and wait until it answers.

    Raises:
        ProcessFailedError: the server did not start; the message has its last lines.
    """
    with OwnedServer(lambda model, version: spec, place.logs / "server.log", place.folder / "served") as server:
        server.start(str(place.model), 0)
        server.wait_ready()
        yield server
