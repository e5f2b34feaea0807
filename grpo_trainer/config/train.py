"""Every option of the trainer and of a run, once: see `options.py` for how flags and TOML come of it.

`TrainConfig` is what `grpo train` takes; options that the Atropos example trainer had keep its names. `RunConfig` (in
`config/run.py`) adds the processes around it. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from grpo_trainer.config.adapter_file import AdapterFile, read_adapter
from grpo_trainer.config.bridge import BridgeConfig, Broadcast, CheckpointRestart, LoraOnly, RestartOptions, SharedVllm
from grpo_trainer.config.checkpoints import CheckpointConfig
from grpo_trainer.config.compute import ComputeConfig
from grpo_trainer.config.distributed import DistributedConfig
from grpo_trainer.config.learning_rate import ADAPTER_LR, ALL_WEIGHTS_LR, usual_rates
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.server import VllmConfig
from grpo_trainer.config.values import COMMA_SEPARATED, at_home, format_ranges, from_variable
from grpo_trainer.errors import ConfigError
from vllm_server.protocol import DEFAULT_KEEP_VERSIONS

API_KEY_VARIABLE = "ROLLOUT_API_KEY"
"""The rollout API reads its key from this environment variable, too."""


class ModelConfig(Section):
    """Model."""

    name: str = option(help="Model folder or hub name.", flags=("--model-name", "--model"))
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

    @field_validator("name")
    @classmethod
    def _at_home_if_a_folder(cls, value: str) -> str:
        return str(at_home(Path(value))) if value.startswith("~") else value


class RolloutConfig(Section):
    """Rollouts."""

    url: str = option(
        "http://localhost:8000", help="Address of the rollout API.", flags=("--atropos-url", "--rollout-url")
    )
    api_key: Annotated[str | None, from_variable(API_KEY_VARIABLE)] = option(
        None,
        help="Bearer token of the rollout API (default: the variable ROLLOUT_API_KEY; a process list shows flags).",
        flags=("--rollout-api-key",),
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

    @field_validator("url")
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


class LogConfig(Section):
    """Logging."""

    log_dir: Path | None = option(None, help="Folder of metrics.jsonl (default: --save-path).")
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


class TrainConfig(Section):
    """Training."""

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
    model: ModelConfig
    rollouts: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    compute: ComputeConfig = ComputeConfig()
    bridge: BridgeConfig = CheckpointRestart()
    vllm: VllmConfig = VllmConfig()
    drift: DriftConfig = DriftConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    logging: LogConfig = LogConfig()
    distributed: DistributedConfig = DistributedConfig()

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
    def _suits_the_server(cls, data: Any) -> Any:
        """Correct for a server in 8 bits, unless the options say otherwise: its samples are off-policy from the start.

        The ratio is then taken against the trainer's own logprobs, so that rounding does not clip it, and each token
        is weighted by truncated importance sampling (`LossConfig.correction`, `--is-cap`).
        """
        if not isinstance(data, dict):
            return data
        vllm, loss = data.get("vllm", {}), data.get("loss", {})
        if isinstance(vllm, dict):
            coarse = vllm.get("quantization", "none") != "none" or vllm.get("kv_cache_dtype", "auto") != "auto"
        else:
            coarse = vllm.in_8_bits
        if not coarse:
            return data
        if isinstance(loss, dict):
            return {**data, "loss": {"ratio_against": "trainer", **loss}}
        return {**data, "loss": loss.for_8_bits()}

    @model_validator(mode="before")
    @classmethod
    def _suits_the_mode(cls, data: Any) -> Any:
        """Fill in the learning rate if it is not given."""
        if not isinstance(data, dict):
            return data
        bridge, optimizer = data.get("bridge", {}), data.get("optimizer", {})
        mode = bridge.get("mode", "none") if isinstance(bridge, dict) else bridge.mode
        if isinstance(optimizer, dict):
            return {**data, "optimizer": {"lr": usual_rates(mode).default, **optimizer}}
        if "lr" in optimizer.model_fields_set:
            return data
        return {**data, "optimizer": optimizer.model_copy(update={"lr": usual_rates(mode).default})}

    @property
    def versions_behind(self) -> int:
        """Versions that the newest samples may lag: a server that is restarted has new weights only then."""
        return self.bridge.vllm_restart_interval - 1 if isinstance(self.bridge, RestartOptions) else 0

    def trainer_dtype(self, *, on_gpu: bool) -> str:
        """What `--dtype auto` comes to, decided in one place so that trainer and server can't differ."""
        if self.model.dtype != "auto":
            return self.model.dtype
        return "bfloat16" if on_gpu and self.model.device != "cpu" else "float32"

    def served_dtype(self, *, on_gpu: bool) -> str:
        """What `--vllm-dtype auto` comes to."""
        return self.trainer_dtype(on_gpu=on_gpu) if self.vllm.dtype == "auto" else self.vllm.dtype

    @property
    def owns_server(self) -> bool:
        """Whether the trainer starts the inference server itself."""
        return isinstance(self.bridge, RestartOptions)

    @property
    def shares_weights(self) -> bool:
        """Whether the trainer's model lies in the server's memory."""
        return isinstance(self.bridge, SharedVllm) or (isinstance(self.bridge, LoraOnly) and self.bridge.share_base)

    @property
    def servers_may_change(self) -> bool:
        """Whether servers may leave and join during a run: each server is updated alone, and shares no memory."""
        return isinstance(self.bridge, LoraOnly | Broadcast) and not self.shares_weights

    @property
    def master_weights(self) -> bool:
        """Whether the optimizer keeps an fp32 copy of 16-bit weights."""
        return isinstance(self.bridge, SharedVllm) and self.bridge.master_weights

    @model_validator(mode="before")
    @classmethod
    def _take_from_adapter(cls, data: Any) -> Any:
        """What an adapter to start from says stands for the flags that were not given."""
        bridge = data.get("bridge") if isinstance(data, dict) else None
        if not isinstance(bridge, dict) or not bridge.get("adapter"):
            return data
        return {**data, "bridge": {**settings_of(read_adapter(at_home(Path(bridge["adapter"])))), **bridge}}

    @property
    def largest_pass(self) -> int:
        """Tokens of the largest forward pass that the options allow."""
        return self.compute.max_tokens_per_microbatch or self.batch_size * self.model.seq_len

    @property
    def served_len(self) -> int:
        """Tokens of the longest sequence that a server of this run's takes."""
        return self.vllm.max_model_len or self.model.seq_len

    @property
    def keep_versions(self) -> int:
        """Adapter versions that a server keeps: those that samples may come from, and the one before the oldest."""
        given = self.bridge.keep_versions if isinstance(self.bridge, LoraOnly) else None
        staleness = self.rollouts.max_staleness
        return given or (DEFAULT_KEEP_VERSIONS if staleness is None else staleness + 2)

    @property
    def sequences_per_step(self) -> int:
        """The rollout API's batch size."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def log_dir(self) -> Path:
        return self.logging.log_dir or self.checkpoints.save_path


def settings_of(adapter: AdapterFile) -> dict[str, Any]:
    """What an existing adapter says of the options of `LoraOptions`."""
    return {
        "r": adapter.r,
        "alpha": adapter.alpha,
        "rslora": adapter.rslora,
        "target_modules": list(adapter.target_modules),
        "layers": None if adapter.layers is None else format_ranges(adapter.layers),
    }
