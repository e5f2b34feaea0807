"""Every option of the trainer: one flat model, put together from its parts. Imports no torch.

`TrainConfig` is what `grpo train` takes; options that the Atropos example trainer had keep its names. `RunConfig` (in
`config/processes.py`) adds the processes around it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_trainer.config.adapter_file import AdapterFile, read_adapter
from grpo_trainer.config.bridge import ADAPTER_MODES, MODE_OF, BridgeConfig
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.server import Server
from grpo_trainer.config.values import COMMA_SEPARATED, at_home, format_ranges, from_variable
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
    """Return the learning rates for a `--weight-bridge-mode`.

    Args:
        parameters: the model's; None: unknown, and then it counts as a large one.
    """
    size = len(SIZES) if parameters is None else sum(parameters >= limit for limit in SIZES)
    return (ADAPTER if mode in ADAPTER_MODES else ALL_WEIGHTS)[size]


class ModelConfig(Section):
    """Model."""

    model_name: str = option(help="Model folder or hub name.", flags=("--model-name", "--model"))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="Dtype of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    logits_dtype: Literal["auto", "float32", "model"] = option(
        "auto",
        help="Dtype of logits, in the trainer and in a server that it starts (grpo serve has the same flag). float32: "
        "fp32; model: that of --dtype; auto: float32 on a GPU, model on a CPU.",
    )
    device: str = option("auto", help="cuda, cuda:1, cpu; auto: the first visible GPU, else the CPU.")
    load_in_4bit: bool = option(
        False,
        help="QLoRA: hold the frozen base model in 4 bits (bitsandbytes nf4); the server's copy has 16 or 32 bits.",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", help="Attention implementation.")
    seq_len: int = option(
        2048, help="Maximum tokens of prompt plus completion; for longer sequences see --overlong.", gt=1
    )
    gradient_checkpointing: bool | None = option(
        None,
        help="Recompute activations in the backward pass to save memory (default: auto, in as few layers as the GPU's "
        "free memory allows; off on a CPU).",
    )
    seed: int = option(0, help="Seed of the adapter's initial weights and of the servers' sampling.")

    @field_validator("model_name")
    @classmethod
    def _at_home_if_a_folder(cls, value: str) -> str:
        return str(at_home(Path(value))) if value.startswith("~") else value


class RolloutConfig(Section):
    """Rollouts."""

    atropos_url: str = option(
        "http://localhost:8000", help="Address of the rollout API.", flags=("--atropos-url", "--rollout-url")
    )
    rollout_api_key: Annotated[str | None, from_variable(API_KEY_VARIABLE)] = option(
        None,
        help="Bearer token of the rollout API (default: the variable ROLLOUT_API_KEY; a process list shows flags).",
    )
    lease_seconds: float = option(
        600.0,
        help="Seconds after which the rollout API hands a batch out again, unless this trainer renews its lease.",
        gt=0,
    )
    rollout_timeout: float = option(1800.0, help="Exit when no batch has come for this many seconds; 0: never.", ge=0)
    max_staleness: int | None = option(
        None,
        help="Drop groups that were sampled more than this many policy versions ago (default: keep all).",
        ge=0,
    )
    on_stale: Literal["drop", "downweight"] = option(
        "drop",
        help="Groups that are older than --max-staleness by N versions: drop them, or multiply their loss by "
        "1 / (1 + N).",
    )
    eval_every: int = option(
        0,
        help="Evaluate on held-out prompts every N steps; 0: never. --env.steps_per_eval overrides this.",
        flags=("--eval-every", "--eval-steps"),
        ge=0,
    )
    prefetch: bool = option(
        True, help="Fetch and prepare the next batch during the present step; has no effect with --max-staleness 0."
    )

    @field_validator("atropos_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ConfigError(wanted="an address such as http://localhost:8000")
        return value.rstrip("/")


class OptimizerConfig(Section):
    """Optimizer."""

    optimizer: Literal["adamw", "adamw_8bit"] = option("adamw", help="adamw: states in fp32; adamw_8bit: in 8 bits.")
    lr: float = option(
        ADAPTER_LR,
        help=f"Peak learning rate (default: {ADAPTER_LR:g} for an adapter, {ALL_WEIGHTS_LR:g} where all weights are "
        "trained; higher in `grpo run` for models below 0.3B).",
        flags=("--lr", "--learning-rate"),
        gt=0,
    )
    warmup_steps: int = option(0, help="Steps over which the learning rate rises linearly from 0.", ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", help="After the warm-up: constant, or falling to 0 at the last step."
    )
    weight_decay: float = option(0.0, help="Decoupled weight decay.", ge=0)
    adam_beta1: float = option(0.9, help="AdamW beta1.", ge=0, lt=1)
    adam_beta2: float = option(0.999, help="AdamW beta2.", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, help="AdamW epsilon.", gt=0)
    max_grad_norm: float = option(1.0, help="Clip the gradient's norm; 0: off.", ge=0)
    max_bad_steps: int = option(
        5,
        help="Exit after this many bad steps in a row. A bad step has a loss or gradient that is not finite, or "
        "a spike (--grad-spike-factor), and is skipped.",
        ge=1,
    )
    grad_spike_factor: float = option(
        0.0, help="Skip a step whose gradient norm exceeds this factor times the median of the last 64; 0: off.", ge=0
    )

    @field_validator("optimizer", mode="before")
    @classmethod
    def _known_optimizer(cls, value: Any) -> Any:
        if value in ("adamw_cpu", "adafactor"):
            fix = "use adamw_8bit, whose states are small; a run that used another optimizer can't be resumed with it"
            raise ConfigError("not in this version", wanted="adamw or adamw_8bit", fix=fix)
        return value


class ComputeConfig(Section):
    """Speed and memory."""

    max_tokens_per_microbatch: int | None = option(
        None,
        help="Token limit of a forward pass, padding included. If set, it decides how the sequences of a step "
        "are split into microbatches (default: --batch-size sequences each).",
        gt=1,
    )
    overlong: Literal["truncate", "drop"] = option(
        "truncate", help="Sequences longer than --seq-len: train on the part that fits, or drop them; both are counted."
    )
    packing: Choice = option(
        "auto", help="Concatenate sequences without padding; auto: on a GPU, if the model's attention allows it."
    )
    share_prompts: Choice = option(
        "auto",
        help="Compute a prompt once for all sequences of a microbatch that begin with it; auto: if sequences "
        "are packed.",
    )
    compile: Choice = option(
        "auto",
        help="torch.compile for decoder layers and head; auto: on a GPU, for models of at least 0.3B "
        "parameters and runs of at least 20 steps (compiling takes about a minute), but not for a "
        "tensor-parallel server's weights.",
    )
    trainer_memory_gb: float | None = option(
        None,
        help="GPU memory in GB for the plan of what to recompute, if --gradient-checkpointing is not set (default: the "
        "free memory).",
        gt=0,
    )
    grad_dtype: Literal["weights", "float32"] = option(
        "weights",
        help="Dtype in which gradients accumulate over microbatches. weights: that of the weights, whose sum over 64 "
        "microbatches has a random error of 1 % in bfloat16.",
    )


class DriftConfig(Section):
    """Drift alarm."""

    drift_limit: float | None = option(
        None,
        help="Largest mean difference between the trainer's and the server's logprobs for samples of the current "
        "version, in nats a token; 0: no limit (default: derived from the difference that the proof measures).",
        ge=0,
    )
    on_drift: Literal["warn", "stop"] = option(
        "warn", help="What to do beyond the limit: log a warning, or save and exit."
    )


class CheckpointConfig(Section):
    """Checkpoints."""

    save_path: Path = option(SAVE_PATH, help="Folder of the checkpoints.")
    checkpoint_interval: str | int = option(
        "10m",
        help="Interval between checkpoints: a time (10m, 90s, 2h) or a number of steps (20); 0: only at the end; "
        "never: none, also not at the end or after Ctrl-C.",
    )
    keep_checkpoints: int = option(2, help="Keep the newest N checkpoints and the final one; 0: keep all.", ge=0)
    resume: str = option(
        "never",
        help="never: start new; auto: continue from the newest checkpoint; PATH: continue from that checkpoint, or "
        "(`grpo run`) the run in that folder with its options.",
    )
    background_writes: bool = option(
        True, help="Copy a checkpoint into main memory, if it fits, and write it to disk during training."
    )

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

    log_dir: Path = option(None, help="Folder of metrics.jsonl (default: --save-path).")
    log_to: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], COMMA_SEPARATED] = option(
        (), help="Also log to these trackers, comma-separated: wandb, tensorboard, trackio."
    )
    use_wandb: bool = option(False, help="The same as --log-to wandb.")
    wandb_project: str | None = option(None, help="Project in W&B or trackio.")
    wandb_group: str | None = option(None, help="Group in W&B or trackio.")
    log_samples: int = option(
        4, help="Write N sequences of each step to samples.jsonl, which `grpo report` shows; 0: none.", ge=0
    )
    benchmark: bool = option(False, help="Print a table at the end: seconds of each phase of the run.")

    @property
    def trackers(self) -> tuple[str, ...]:
        """What both options name, once each."""
        return tuple(dict.fromkeys((*self.log_to, *(("wandb",) if self.use_wandb else ()))))


class DistributedConfig(Section):
    """Several trainer processes."""

    trainer_rank: int | None = option(
        None, help="Rank of this process, from 0 (default: RANK, as torchrun sets it).", ge=0
    )
    world_size: int | None = option(
        None,
        help="Number of trainer processes, one for each GPU; each takes a share of every batch (default: "
        "WORLD_SIZE, or 1).",
        ge=1,
    )
    sharding: Literal["auto", "none", "full"] = option(
        "auto",
        help="none: each process holds all weights, gradients and optimizer states. full: each holds a shard (FSDP2). "
        "auto: full in the modes none and broadcast, except with a reference model. In shared_vllm only "
        "the optimizer states are sharded.",
    )
    init_method: str | None = option(
        None, help="Rendezvous address, e.g. tcp://127.0.0.1:29500 (default: MASTER_ADDR and MASTER_PORT)."
    )

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

    training_steps: int = option(
        10,
        help="Optimisation steps, those before a resume included (default: 10; in `grpo run` 100).",
        ge=1,
    )
    batch_size: int = option(
        2,
        help="Sequences in a microbatch, one forward and backward pass (default: 2; in `grpo run` see "
        "--prompts-per-step).",
        ge=1,
    )
    gradient_accumulation_steps: int = option(
        32,
        help="Microbatches in a step. The product with --batch-size must be a multiple of --env.group_size (default: "
        "32; in `grpo run` see --prompts-per-step).",
        ge=1,
    )
    step_timeout: float = option(
        3600.0,
        help="Seconds after which a step counts as hung: the trainer logs the stacks, saves if possible and "
        "exits. 0: no limit.",
        ge=0,
    )
    server: Server = Field(default_factory=Server)

    @classmethod
    def normalised(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """`--single-copy` names a mode, `--no-single-copy` none."""
        values = {key.replace("-", "_"): value for key, value in given.items()}
        if values.get("single_copy") in (False, "false"):
            return {key: value for key, value in given.items() if key.replace("-", "_") != "single_copy"}
        alone = values.get("single_copy") and "weight_bridge_mode" not in values
        return {**given, "weight_bridge_mode": "shared_vllm"} if alone else dict(given)

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
        if _is_in_8_bits(data.get("server", {})):
            found["ratio_against"] = "trainer"
        if isinstance(data.get("lora_adapter"), str | Path) and data["lora_adapter"]:
            found |= settings_of(read_adapter(at_home(Path(data["lora_adapter"]))))
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


def _is_in_8_bits(server: Any) -> bool:
    values = server.model_dump() if isinstance(server, Server) else server
    return isinstance(values, dict) and (
        values.get("quantization", "none") != "none" or values.get("kv_cache_dtype", "auto") != "auto"
    )


def settings_of(adapter: AdapterFile) -> dict[str, Any]:
    """What an existing adapter says of the options of `LoraOptions`."""
    return {
        "lora_r": adapter.r,
        "lora_alpha": adapter.alpha,
        "lora_rslora": adapter.rslora,
        "lora_target_modules": list(adapter.target_modules),
        "lora_layer_indices": None if adapter.layers is None else format_ranges(adapter.layers),
    }
