"""Shared by the subjects of all bridges."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from grpo_trainer.alignment.proof import Proved
from grpo_trainer.bench.sync.memory import gpu_used_mb, gpus_in_use
from grpo_trainer.bench.sync.options import ModelChoice, SyncOptions
from grpo_trainer.bench.sync.random_model import ensure_model
from grpo_trainer.bench.sync.shapes import SHAPES
from grpo_trainer.bench.sync.step import Training
from grpo_trainer.bench.sync.subject import Place, WeightFigures
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.server_client import ServerClient

PROMPT = [2, 3, 5, 7]

M = TypeVar("M", bound=nn.Module)


def train_values(options: SyncOptions, place: Place, mode: str) -> dict[str, Any]:
    """The trainer's options in every mode."""
    server, step = options.server, options.step
    training = {
        "batch_size": 8,
        "gradient_accumulation_steps": step.step_seqs // 8,
        "max_tokens_per_microbatch": step.step_microbatch_tokens,
        "optimizer": step.step_optimizer,
        "gradient_checkpointing": True,
        "drift_limit": 0,
    }
    return {
        **(training if step.step_seqs else {}),
        "model": str(place.model),
        "dtype": place.dtype,
        "seq_len": server.max_model_len,
        "weight_bridge_mode": mode,
        "proof": options.choice.proof,
        "vllm_port": claim_ports({"server": 0})["server"],
        "max_model_len": server.max_model_len,
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "vllm_enforce_eager": server.enforce_eager,
    }


@contextmanager
def placed(choice: ModelChoice, logs: Path | None, server_args: tuple[str, ...]) -> Iterator[Place]:
    """Yield the place of a measurement, with its model: a temporary folder, except for files that the user keeps."""
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as name:
        model = (choice.model_dir or Path(name) / "model").absolute()
        ensure_model(SHAPES[choice.shape], model, getattr(torch, dtype))
        yield Place(Path(name), logs or Path(name), model, on_gpu, dtype, server_args)


def taken_since(before: float | None, options: SyncOptions) -> float | None:
    """Return the increase of the GPUs' used memory since `before`, in units of 1e9 bytes."""
    now = gpu_used_gb(options)
    return None if now is None or before is None else now - before


def gpu_used_gb(options: SyncOptions) -> float | None:
    """Return the used memory on the GPUs of trainer and server."""
    used = gpu_used_mb(gpus_in_use(options.server.server_gpus))
    return None if used is None else used / 1e3


@contextmanager
def explained_by(server: OwnedServer) -> Iterator[None]:
    """If the server has ended, raise the error with its last lines instead of that of the missing answer."""
    try:
        yield
    except ServerError:
        server.check()
        raise


class OwnServer:
    """Shared by subjects that start one server."""

    def __init__(self, server: OwnedServer, training: Training) -> None:
        self._server = server
        self._training = training

    def training(self) -> Training:
        return self._training

    @property
    def server_pid(self) -> int:
        pid = self._server.pid
        assert pid is not None
        return pid

    def check(self) -> None:
        self._server.check()


def rounded(proved: Proved | None) -> dict[str, float] | None:
    """Return a proof's figures."""
    return None if proved is None else {name: float(f"{value:.3g}") for name, value in asdict(proved).items()}


def check_answers(client: ServerClient, version: int, name: str | None = None) -> None:
    """Check that this version (and this name) answers a request.

    Raises:
        BridgeError: another version or name answers.
    """
    answer = client.generate(PROMPT, max_tokens=1, temperature=1.0, ignore_eos=True)
    if (answer.policy_version, name or answer.model) != (version, answer.model):
        raise BridgeError(
            "another version answers than was published",
            field="inference server",
            got=f"{answer.model}, version {answer.policy_version}",
            wanted=f"{name or answer.model}, version {version}",
        )


def weighed(build: Callable[[], M], place: Place, *, attached: bool) -> tuple[M, WeightFigures]:
    """A trainer's model, the time to load it, and its GPU memory in addition to the server's own weights."""
    before = _allocated()
    started = time.perf_counter()
    model = build()
    seconds = time.perf_counter() - started
    base = [parameter for name, parameter in model.named_parameters() if ".lora_" not in name]
    served = sum(parameter.numel() for parameter in base) * getattr(torch, place.dtype).itemsize
    after = _allocated()
    figures = WeightFigures(
        attach_ms=round(seconds * 1e3, 1) if attached else None,
        model_gb=round(served / 1e9, 4),
        trainer_extra_gb=None if before is None or after is None else round((after - before) / 1e9, 4),
    )
    return model, figures


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None
