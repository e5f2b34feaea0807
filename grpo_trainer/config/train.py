"""Every option of the trainer: one flat model, put together from its parts. Imports no torch.

`TrainConfig` is what `grpo train` takes; options that the Atropos example trainer had keep its names. `RunConfig` (in
`config/processes.py`) adds the processes around it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_trainer.config.bridge import ADAPTER_MODES, MODE_OF, BridgeConfig, read_adapter
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.options import COMMA_SEPARATED, Section, at_home, from_variable, option
from grpo_trainer.config.server import Server
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_KEEP_VERSIONS

API_KEY_VARIABLE = "ROLLOUT_API_KEY"
"""The rollout API reads its key from this environment variable, too."""
SAVE_PATH = Path("trained_model_checkpoints")
Choice = Literal["auto", "on", "off"]
SPARE = 0.04
"""Of a GPU's free memory, what is left to the allocator's gaps and libraries' workspaces."""
BUCKET_BYTES = 256 << 20
"""Size of the buffers in which gradients of several processes are summed."""
TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
NEVER = "never"
"""The interval of a run without checkpoints, for trials and benchmarks."""
SIZES = (50_000_000, 300_000_000)
"""Parameters below which a model counts as small, and as medium."""


@dataclass(frozen=True)
class Rates:
    """The default and the usual range of `--lr`."""

    default: float
    lowest: float
    highest: float


ADAPTER = (Rates(5e-4, 1e-5, 2e-3), Rates(3e-4, 1e-5, 5e-4), Rates(1e-5, 1e-7, 5e-4))
ALL_WEIGHTS = (Rates(1e-4, 1e-6, 2e-4), Rates(3e-5, 1e-6, 5e-5), Rates(1e-6, 1e-8, 2e-5))
"""Of a small, a medium and a large model.

Large models: 1e-6 for all weights, as in DeepSeekMath, which introduced GRPO (arXiv 2402.03300, section 4.2), and ten
times as much for an adapter, by which the best learning rates of the two differ (Schulman et al., "LoRA Without
Regret", 2025). Smaller models: the runs of docs/benchmarks.md. Above the highest rate of a range policies collapse
there, or come close to it; below the lowest one nothing changes within hundreds of steps.
"""
ADAPTER_LR, ALL_WEIGHTS_LR = ADAPTER[-1].default, ALL_WEIGHTS[-1].default


def usual_rates(mode: str, parameters: int | None = None) -> Rates:
    """Return the learning rates for a `--weight-bridge-mode`; a model of unknown size counts as a large one."""
    size = len(SIZES) if parameters is None else sum(parameters >= limit for limit in SIZES)
    return (ADAPTER if mode in ADAPTER_MODES else ALL_WEIGHTS)[size]


class ModelConfig(Section):
    """Model."""

    model_name: str = option(..., "--model")
    """Model folder or hub name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto")
    """Dtype of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU."""
    logits_dtype: Literal["auto", "float32", "model"] = option("auto")
    """Dtype of logits, in the trainer and in a server that it starts (grpo serve has the same flag). float32: fp32;
    model: that of --dtype; auto: float32 on a GPU, model on a CPU."""
    device: str = option("auto")
    """cuda, cuda:1, cpu; auto: the first visible GPU, else the CPU."""
    load_in_4bit: bool = option(False)
    """QLoRA: hold the frozen base model in 4 bits (bitsandbytes nf4); the server's copy has 16 or 32 bits."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa")
    """Attention implementation."""
    seq_len: int = option(2048, gt=1)
    """Maximum tokens of prompt plus completion; for longer sequences see --overlong."""
    gradient_checkpointing: bool | None = option(None)
    """Recompute activations in the backward pass to save memory (default: auto, in as few layers as the GPU's free
    memory allows; off on a CPU)."""
    seed: int = option(0)
    """Seed of the adapter's initial weights and of the servers' sampling."""

    @field_validator("model_name")
    @classmethod
    def _at_home_if_a_folder(cls, value: str) -> str:
        return str(at_home(Path(value))) if value.startswith("~") else value


class RolloutConfig(Section):
    """Rollouts."""

    atropos_url: str = option("http://localhost:8000", "--rollout-url")
    """Address of the rollout API."""
    rollout_api_key: Annotated[str | None, from_variable(API_KEY_VARIABLE)] = option(None)
    """Bearer token of the rollout API (default: the variable ROLLOUT_API_KEY; a process list shows flags)."""
    lease_seconds: float = option(600.0, gt=0)
    """Seconds after which the rollout API hands a batch out again, unless this trainer renews its lease."""
    rollout_timeout: float = option(1800.0, ge=0)
    """Exit when no batch that can be trained on has come for this many seconds; 0: never."""
    max_staleness: int | None = option(None, ge=0)
    """Drop groups that were sampled more than this many policy versions ago (default: keep all)."""
    on_stale: Literal["drop", "downweight"] = option("drop")
    """Groups that are older than --max-staleness by N versions: drop them, or multiply their loss by 1 / (1 + N)."""
    eval_every: int = option(0, "--eval-steps", ge=0)
    """Evaluate on held-out prompts every N steps; 0: never. --env.steps_per_eval overrides this."""
    prefetch: bool = option(True)
    """Fetch and prepare the next batch during the present step; has no effect with --max-staleness 0."""

    @field_validator("atropos_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ConfigError(wanted="an address such as http://localhost:8000")
        return value.rstrip("/")


class OptimizerConfig(Section):
    """Optimizer."""

    optimizer: Literal["adamw", "adamw_8bit"] = option("adamw")
    """adamw: states in fp32; adamw_8bit: in 8 bits."""
    lr: float = option(ADAPTER_LR, "--learning-rate", gt=0)
    """Peak learning rate (default: 1e-05 for an adapter, 1e-06 where all weights are trained; higher in `grpo run` for
    models below 0.3B)."""
    warmup_steps: int = option(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = option("constant")
    """After the warm-up: constant, or falling to 0 at the last step."""
    weight_decay: float = option(0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = option(0.9, ge=0, lt=1)
    """AdamW beta1."""
    adam_beta2: float = option(0.999, ge=0, lt=1)
    """AdamW beta2."""
    adam_epsilon: float = option(1e-08, gt=0)
    """AdamW epsilon."""
    max_grad_norm: float = option(1.0, ge=0)
    """Clip the gradient's norm; 0: off."""
    max_bad_steps: int = option(5, ge=1)
    """Exit after this many bad steps in a row. A bad step has a loss or gradient that is not finite, or a spike
    (--grad-spike-factor), and is skipped."""
    grad_spike_factor: float = option(0.0, ge=0)
    """Skip a step whose gradient norm exceeds this factor times the median of the last 64; 0: off."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _known_optimizer(cls, value: Any) -> Any:
        if value in ("adamw_cpu", "adafactor"):
            fix = "use adamw_8bit, whose states are small; a run that used another optimizer can't be resumed with it"
            raise ConfigError("not in this version", wanted="adamw or adamw_8bit", fix=fix)
        return value


class ComputeConfig(Section):
    """Speed and memory."""

    max_tokens_per_microbatch: int | None = option(None, gt=1)
    """Token limit of a forward pass, padding included. If set, it decides how the sequences of a step are split into
    microbatches (default: --batch-size sequences each)."""
    overlong: Literal["truncate", "drop"] = option("truncate")
    """Sequences longer than --seq-len: train on the part that fits, or drop them; both are counted."""
    packing: Choice = option("auto")
    """Concatenate sequences without padding; auto: on a GPU, if the model's attention allows it."""
    share_prompts: Choice = option("auto")
    """Compute a prompt once for all sequences of a microbatch that begin with it; auto: if sequences are packed."""
    compile: Choice = option("auto")
    """torch.compile for decoder layers and head; auto: on a GPU, for models of at least 0.3B parameters and runs of at
    least 20 steps (compiling takes about a minute), but not for a tensor-parallel server's weights or models with
    gated delta nets."""
    trainer_memory_gb: float | None = option(None, gt=0)
    """GPU memory in GB for the plan of what to recompute, if --gradient-checkpointing is not set (default: the free
    memory)."""
    grad_dtype: Literal["weights", "float32"] = option("weights")
    """Dtype in which gradients accumulate over microbatches. weights: the weights', for float16 float32; in bfloat16 a
    sum of 64 has an error of 1 %."""


class DriftConfig(Section):
    """Drift alarm."""

    drift_limit: float | None = option(None, ge=0)
    """Largest mean difference between the trainer's and the server's logprobs for samples of the current version, in
    nats a token; 0: no limit (default: derived from the difference that the proof measures)."""
    on_drift: Literal["warn", "stop"] = option("warn")
    """What to do beyond the limit: log a warning, or save and exit."""


class CheckpointConfig(Section):
    """Checkpoints."""

    save_path: Path = option(SAVE_PATH)
    """Folder of the checkpoints."""
    checkpoint_interval: str | int = option("10m")
    """Interval between checkpoints: a time (10m, 90s, 2h) or a number of steps (20); 0: only at the end; never: none,
    also not at the end or after Ctrl-C."""
    keep_checkpoints: int = option(2, ge=0)
    """Keep the newest N checkpoints and the final one; 0: keep all."""
    resume: str = option("never")
    """never: start new; auto: continue from the newest checkpoint; PATH: continue from that checkpoint, or (`grpo run`)
    the run in that folder with its options."""
    background_writes: bool = option(True)
    """Copy a checkpoint into main memory, if it fits, and write it to disk during training."""

    @field_validator("checkpoint_interval", mode="before")
    @classmethod
    def _is_interval(cls, value: Any) -> Any:
        text = str(value)
        if text == NEVER:
            return text
        if text.isdecimal():
            return int(text)
        if (found := TIME.fullmatch(text)) is None:
            raise ConfigError(
                wanted="a time such as 10m, 90s or 2h, or a number of steps; 0: only at the end; never: none"
            )
        return text if float(found[1]) else 0

    @field_validator("resume")
    @classmethod
    def _is_at_home(cls, value: str) -> str:
        return str(at_home(Path(value))) if value.startswith("~") else value

    @property
    def saves(self) -> bool:
        """Whether the run writes any checkpoint."""
        return self.checkpoint_interval != NEVER

    @property
    def interval_steps(self) -> int:
        """Steps from one checkpoint to the next; 0: by time, only at the end, or never."""
        return self.checkpoint_interval if isinstance(self.checkpoint_interval, int) else 0

    @property
    def interval_seconds(self) -> float:
        """Seconds from one checkpoint to the next; 0: by steps, only at the end, or never."""
        found = TIME.fullmatch(str(self.checkpoint_interval))
        return float(found[1]) * SECONDS[found[2]] if found else 0.0

    @property
    def environment_interval(self) -> int:
        """Steps after which environments save their own state; by time, a checkpoint may be of any step."""
        return self.interval_steps or int(self.interval_seconds > 0)


class LogConfig(Section):
    """Logging."""

    log_dir: Path = option(None)
    """Folder of metrics.jsonl (default: --save-path)."""
    log_to: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], COMMA_SEPARATED] = option(())
    """Also log to these trackers, comma-separated: wandb, tensorboard, trackio."""
    use_wandb: bool = option(False)
    """The same as --log-to wandb."""
    wandb_project: str | None = option(None)
    """Project in W&B or trackio."""
    wandb_group: str | None = option(None)
    """Group in W&B or trackio."""
    log_samples: int = option(4, ge=0)
    """Write N sequences of each step to samples.jsonl, which `grpo report` shows; 0: none."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """What both options name, once each."""
        return tuple(dict.fromkeys((*self.log_to, *(("wandb",) if self.use_wandb else ()))))


class DistributedConfig(Section):
    """Several trainer processes."""

    trainer_rank: int | None = option(None, ge=0)
    """Rank of this process, from 0 (default: RANK, as torchrun sets it)."""
    world_size: int | None = option(None, ge=1)
    """Number of trainer processes, one for each GPU; each takes a share of every batch (default: WORLD_SIZE, or 1)."""
    sharding: Literal["auto", "none", "full"] = option("auto")
    """none: each process holds all weights, gradients and optimizer states. full: each holds a shard (FSDP2). auto:
    full in the modes none and broadcast, except with a reference model. In shared_vllm only the optimizer states are
    sharded."""
    init_method: str | None = option(None)
    """Rendezvous address, e.g. tcp://127.0.0.1:29500 (default: MASTER_ADDR and MASTER_PORT)."""

    @property
    def rank(self) -> int:
        """This process's number: by the options, else by torchrun's environment variables."""
        return int(os.environ.get("RANK", 0)) if self.trainer_rank is None else self.trainer_rank

    @property
    def processes(self) -> int:
        """Trainer processes, likewise."""
        return int(os.environ.get("WORLD_SIZE", 1)) if self.world_size is None else self.world_size


class TrainConfig(
    ModelConfig,
    RolloutConfig,
    OptimizerConfig,
    LossConfig,
    ComputeConfig,
    BridgeConfig,
    DriftConfig,
    CheckpointConfig,
    LogConfig,
    DistributedConfig,
):
    """Training."""

    mode_field = "weight_bridge_mode"
    mode_of = MODE_OF
    stands_for = MappingProxyType({"single_copy": ("weight_bridge_mode", "shared_vllm")})

    training_steps: int = option(10, ge=1)
    """Optimisation steps, those before a resume included (default: 10; in `grpo run` 100)."""
    batch_size: int = option(2, ge=1)
    """Sequences in a microbatch, one forward and backward pass (default: 2; in `grpo run` see --prompts-per-step)."""
    gradient_accumulation_steps: int = option(32, ge=1)
    """Microbatches in a step. The product with --batch-size must be a multiple of --env.group_size (default: 32; in
    `grpo run` see --prompts-per-step)."""
    step_timeout: float = option(3600.0, ge=0)
    """Seconds after which a step counts as hung: the trainer logs the stacks, saves if possible and exits. 0: no
    limit."""
    server: Server = Field(default_factory=Server)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Fill in what follows from other options, unless it is given.

        The learning rate follows from what is trained, the folder of the logs from that of the checkpoints, and an
        adapter to start from says its shape. A server in 8 bits has the ratio taken against the trainer's own logprobs,
        so that rounding does not clip it, and each token is weighted by truncated importance sampling (`correction`,
        `--is-cap`): its samples are off-policy from the start.
        """
        if not isinstance(data, dict):
            return data
        found: dict[str, Any] = {"lr": usual_rates(data.get("weight_bridge_mode", "none")).default}
        found["log_dir"] = folder if isinstance(folder := data.get("save_path"), str | Path) else SAVE_PATH
        server = data.get("server", {})
        server = server.model_dump() if isinstance(server, Server) else server
        if isinstance(server, dict) and any(
            server.get(name, plain) != plain for name, plain in (("quantization", "none"), ("kv_cache_dtype", "auto"))
        ):
            found["ratio_against"] = "trainer"
        if isinstance(data.get("lora_adapter"), str | Path) and data["lora_adapter"]:
            found |= read_adapter(at_home(Path(data["lora_adapter"]))).options
        return {**found, **data}

    def trainer_dtype(self, *, on_gpu: bool) -> str:
        """What `--dtype auto` comes to, decided in one place so that trainer and server can't differ."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if on_gpu and self.device != "cpu" else "float32"

    def served_dtype(self, *, on_gpu: bool) -> str:
        """What `--server.dtype auto` comes to."""
        return self.trainer_dtype(on_gpu=on_gpu) if self.server.dtype == "auto" else self.server.dtype

    @property
    def largest_pass(self) -> int:
        """Tokens of the largest forward pass that the options allow."""
        return self.max_tokens_per_microbatch or self.batch_size * self.seq_len

    @property
    def served_len(self) -> int:
        """Tokens of the longest sequence that a server of this run's takes."""
        return self.server.max_model_len or self.seq_len

    @property
    def keep_versions(self) -> int:
        """Adapter versions that a server keeps: those that samples may come from, and the one before the oldest."""
        default = DEFAULT_KEEP_VERSIONS if self.max_staleness is None else self.max_staleness + 2
        return self.lora_keep_versions or default

    @property
    def sequences_per_step(self) -> int:
        """The rollout API's batch size."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def learns_from_lone_answers(self) -> bool:
        """Whether a sequence that is compared with no other has a gradient."""
        return self.trains_without_advantage or self.distill_coef > 0

    @property
    def wants_parts(self) -> bool:
        """Whether each of several processes is to hold a part of the weights, if that can be (`why_whole`)."""
        is_usual = self.weight_bridge_mode in ("none", "broadcast")
        return self.sharding == "full" or (self.sharding == "auto" and is_usual)

    @property
    def shards_update(self) -> bool:
        """Whether each of several processes holds all weights, in its server's memory, and a part of the states."""
        return self.weight_bridge_mode == "shared_vllm" and not self.shards_weights

    @property
    def shards_weights(self) -> bool:
        """Whether each of several processes holds a shard of each weight, in the memory of its worker of one server."""
        return self.weight_bridge_mode == "shared_vllm" and self.server.tensor_parallel_size > 1

    @property
    def why_whole(self) -> str | None:
        """What speaks against cutting the weights over the processes, if anything does."""
        if self.weight_bridge_mode not in ("none", "broadcast"):
            return f"belongs to --weight-bridge-mode none and broadcast, but the mode is {self.weight_bridge_mode}"
        return "can't hold a reference (--kl-beta, --log-kl)" if self.needs_reference else None
