"""A measured bridge with its model and its server: what all bridges have in common."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from grpo_trainer.bench.devices import gpus_used_mb
from grpo_trainer.bench.random_model import ensure_model
from grpo_trainer.bench.shapes import CACHE_BYTES_TINY, SHAPES, ModelChoice
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.config.options import build
from grpo_trainer.config.rules import checked
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import CACHE_FLAG, ProcessSpec, server_process, weight_flags
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.metrics.types import reduce
from grpo_trainer.policy import Policy, build_policy
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from grpo_trainer.weights.bridge import WeightBridge
from vllm_server.protocol import BridgeInfo
from vllm_server.protocol.bridge_config import FILE_NAME

PROMPT = [2, 3, 5, 7]
MANY = 1_000_000_000
"""Steps of a training that does not end before the measurement: after the last one no server is started again."""

B = TypeVar("B", bound=WeightBridge)


@dataclass(frozen=True)
class Place:
    """The folders and settings of a measurement.

    Attributes:
        folder: folder for all written files, which is deleted after the measurement.
        logs: folder of the logs.
        model: folder of the model.
        dtype: dtype of trainer and server.
        server_args: additional arguments of the server.
    """

    folder: Path
    logs: Path
    model: Path
    on_gpu: bool
    dtype: str
    server_args: tuple[str, ...]


@contextmanager
def placed(choice: ModelChoice, logs: Path | None, server_args: tuple[str, ...]) -> Iterator[Place]:
    """Yield the place of a measurement, with its model: a temporary folder, except for files that the user keeps."""
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    cache = (CACHE_FLAG, str(CACHE_BYTES_TINY)) if choice.shape == "tiny" and not on_gpu else ()
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as name:
        model = (choice.model_dir or Path(name) / "model").absolute()
        ensure_model(SHAPES[choice.shape], model, getattr(torch, dtype))
        yield Place(Path(name), logs or Path(name), model, on_gpu, dtype, (*cache, *server_args))


def configured(options: SyncOptions, place: Place, **values: Any) -> TrainConfig:
    """Return the trainer's configuration, with further values for the bridge's own options."""
    server, step = options.server, options.step
    training = {
        "batch_size": 8,
        "gradient_accumulation_steps": step.step_seqs // 8,
        "max_tokens_per_microbatch": step.step_microbatch_tokens,
        "optimizer": step.step_optimizer,
        "gradient_checkpointing": True,
        "drift_limit": 0,
    }
    values = {
        **(training if step.step_seqs else {}),
        "model": str(place.model),
        "dtype": place.dtype,
        "compile": "off",
        "seq_len": server.max_model_len,
        "training_steps": MANY,
        "save_path": place.folder / "written",
        "keep_checkpoints": 1,
        "log_dir": place.logs,
        "weight_bridge_mode": options.choice.bridge,
        "proof": options.choice.proof,
        "vllm_port": claim_ports({"server": 0})["server"],
        "max_model_len": server.max_model_len,
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "vllm_enforce_eager": server.enforce_eager,
        "tensor_parallel_size": server.tensor_parallel_size,
        "vllm_gpus": server.server_gpus,
        "quantization": server.quantization,
        "kv_cache_dtype": server.kv_cache_dtype,
        **values,
    }
    config = checked(build(TrainConfig, {name: value for name, value in values.items() if value is not None}))
    vllm = config.vllm.model_copy(update={"extra_args": place.server_args})
    return config.model_copy(update={"vllm": vllm})


def server_spec(config: TrainConfig, place: Place) -> ProcessSpec:
    """Return the process of a server that outlives publishes, with vLLM's own routes for adapters for the baseline."""
    flags = weight_flags(config, place.folder)
    if config.shares_weights:
        flags = (*flags, "--shared-weights", "--bridge-config-path", str(place.folder / FILE_NAME))
    model = str(place.model)
    spec = server_process(config, python=sys.executable, on_gpu=place.on_gpu, model=model, flags=flags)
    return dataclasses.replace(spec, env={**spec.env, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})


@contextmanager
def serving(config: TrainConfig, place: Place, stop: StopSignal) -> Iterator[None]:
    """Run a server within the block, and wait until it answers.

    If the server has ended, its last lines are the error instead of that of the missing answer.

    Args:
        stop: checks from then on whether the server has ended.

    Raises:
        ProcessFailedError: the server did not start, or has ended; the message has its last lines.
    """
    spec = server_spec(config, place)
    with OwnedServer(lambda model, version: spec, place.logs / "server.log", place.folder / "served") as server:
        server.start(str(place.model), 0)
        server.wait_ready()
        stop.watch(server.check)
        try:
            yield
        except ServerError:
            server.check()
            raise


@dataclass(frozen=True)
class Loaded:
    """A trainer's policy, and what it takes to load it.

    Attributes:
        figures: in units of 1e9 bytes unless a line says otherwise.
            attach_ms: time to attach it to the server's memory; None: it is not attached.
            model_gb: its weights in the server's dtype, without an adapter.
            trainer_extra_gb: GPU memory for loading or attaching it (and for an adapter); None: there is no GPU.
    """

    policy: Policy
    figures: Mapping[str, float | None]

    @classmethod
    def of(cls, config: TrainConfig, place: Place) -> Loaded:
        """Load the policy, or attach it to the server's weights if the mode shares them."""
        before = torch.cuda.memory_allocated() if place.on_gpu else 0
        started = time.perf_counter()
        policy = build_policy(config)
        seconds = time.perf_counter() - started
        base = [parameter for name, parameter in policy.model.named_parameters() if ".lora_" not in name]
        served = sum(parameter.numel() for parameter in base) * getattr(torch, place.dtype).itemsize
        figures = {
            "attach_ms": round(seconds * 1e3, 1) if config.shares_weights else None,
            "model_gb": round(served / 1e9, 4),
            "trainer_extra_gb": round((torch.cuda.memory_allocated() - before) / 1e9, 4) if place.on_gpu else None,
        }
        return cls(policy, figures)


def gpu_used_mb(options: SyncOptions) -> float | None:
    """Return what all processes use on the GPUs of trainer and server, in units of 1e6 bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for part in (own, options.server.server_gpus) if part for name in part.split(",")]
    used = gpus_used_mb(",".join(dict.fromkeys(names)) if own else None)
    if used is None:  # then of the trainer's own GPU
        free, total = torch.cuda.mem_get_info()
        return round((total - free) / 1e6, 1)
    return used


def mb_since(before: float | None, options: SyncOptions) -> float | None:
    """Return how much `gpu_used_mb` has grown since it was `before`."""
    now = gpu_used_mb(options)
    return None if now is None or before is None else now - before


@dataclass(frozen=True)
class Publish:
    """One publish, in seconds: the total, the preparation of the weights, the engine's part, and the engine's pause."""

    seconds: float
    pack_seconds: float
    engine_seconds: float
    stall_seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def request_seconds(self) -> float:
        """On the way and in the server's front end."""
        return self.seconds - self.pack_seconds - self.engine_seconds


@dataclass
class Subject(Generic[B]):
    """A connected bridge, and a trainer that does nothing but publish. Each bridge has its own subclass.

    Attributes:
        check: raises an error if the server has ended by itself.
        server_mb: GPU memory of the server after its start, in units of 1e6 bytes; None: there is no GPU.
        info: the server.
        version: the version that was published last.
        proof: what the bridge's proof measured, in nats a token; None: it was skipped.
    """

    serves_on: ClassVar[bool] = True
    """The server answers requests during a publish."""
    base_routing: ClassVar[Mapping[str, Any]] = {}
    """Fields by which a request selects the base model."""
    first_version: ClassVar[int] = 0
    parts: ClassVar[tuple[tuple[str, ...], ...]]
    """Metrics of a publish that add up to its preparation, the engine's part, and the engine's pause."""

    bridge: B
    loaded: Loaded
    config: TrainConfig
    check: Callable[[], None]
    server_mb: float | None
    version: int
    client: ServerClient = field(init=False)
    info: BridgeInfo = field(init=False)
    proof: Mapping[str, float] | None = field(init=False)

    def __post_init__(self) -> None:
        self.client = ServerClient(self.config.vllm)
        self.info = self.client.wait_until_ready()
        self.proof = self.prove()

    @property
    def written(self) -> Path:
        """Folder that the bridge writes to."""
        return self.config.checkpoints.save_path

    def prove(self) -> Mapping[str, float] | None:
        """Prove the bridge, and return what the proof measured."""
        noise = self.bridge.prove()
        return None if noise is None else {"noise": noise}

    @property
    def url(self) -> str:
        return self.config.vllm.url

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        return self.loaded.policy.model

    def warm_up(self) -> None:
        """Run the first publishes, which do additional work."""

    def change(self) -> None:
        """Change the weights."""

    def publish(self) -> Publish:
        """Change the weights, publish them as the next version, and check that it answers a request.

        Raises:
            BridgeError: another version answers.
        """
        written = self.write(self.change)
        answer = self.client.generate(PROMPT, max_tokens=1, temperature=1.0, ignore_eos=True)
        if answer.policy_version != self.version:
            raise BridgeError(
                "another version answers than was published",
                field="inference server",
                got=f"{answer.model}, version {answer.policy_version}",
                wanted=f"version {self.version}",
            )
        return written

    def write(self, change: Callable[[], object]) -> Publish:
        """Change the weights and publish them; unlike `publish`, without a check of the answering version."""
        self.version += 1
        with torch.no_grad(), self.bridge.updating():
            change()
        metrics = reduce(self.bridge.publish(self.version).metrics)
        pack, engine, stall = (sum(metrics[name] for name in names) for names in self.parts)
        return Publish(metrics["train/sync_time"], pack, engine, stall, metrics)

    def trained(self) -> None:
        """Complete a training step, which has changed the weights within the bridge's context."""

    def facts(self, publishes: Sequence[Publish]) -> dict[str, Any]:
        """Return the bridge's own figures."""
        proof = self.proof and {name: float(f"{value:.3g}") for name, value in self.proof.items()}
        return {"transport": None, "adapter_mb": None, "proof": proof, **self.loaded.figures}

    def baseline(self, repeat: int) -> dict[str, Any] | None:
        """Publish by vLLM's own means, if it has any. Call this last: nothing can be published afterwards."""
        return None
