"""Options of `grpo bench sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from grpo_trainer.bench.shapes import ModelChoice
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.server import KvCacheDtype, Quantization
from grpo_trainer.errors import ConfigError
from vllm_server.protocol.lora import Transport
from vllm_server.protocol.weights import Staging, WeightTransport


class BridgeChoice(Section):
    """Bridge."""

    bridge: Literal["lora_only", "shared_vllm", "broadcast", "none"] = option(
        "lora_only", help="The weight bridge; none restarts the server at each publish, and --repeat 3 is enough."
    )
    share_base: bool = option(
        False, help="lora_only: use the server's base weights, as the trainer's --share-base does."
    )
    transport: Literal["auto", Transport, WeightTransport] = option(
        "auto", help="How weights go to the server, as --lora-transport or --broadcast-transport."
    )
    staging: Staging = option(
        "auto",
        help="broadcast: whether the server receives weights into a buffer while it generates, as --broadcast-staging.",
    )
    lora_r: int = option(16, help="Rank of the adapter, on all linear modules.")
    lora_root: Path | None = option(
        None, help="Folder of --transport disk and of the baseline, e.g. /dev/shm (default: a temporary one)."
    )
    keep_versions: int = option(4, help="Versions that stay loaded in the server.", ge=2)
    proof: bool = option(True, help="Prove the server's weights before the measurement.")

    @model_validator(mode="after")
    def _base_is_shared_by_adapters(self) -> BridgeChoice:
        if self.share_base and self.bridge != "lora_only":
            raise ConfigError(
                field="--share-base", got=f"--bridge {self.bridge}", wanted="--bridge lora_only", fix="leave it out"
            )
        return self


class ServerChoice(Section):
    """Server."""

    max_model_len: int = option(2048, help="Longest sequence served.", gt=1)
    gpu_memory_utilization: float = option(0.5, help="Share of the GPU's memory for vLLM.", gt=0, le=1)
    tensor_parallel_size: int = option(1, help="Tensor parallel size of the server.", ge=1)
    server_gpus: str | None = option(None, help="CUDA_VISIBLE_DEVICES of the server (default: as the trainer's).")
    enforce_eager: bool = option(False, help="Disable CUDA graphs; generation is several times slower.")
    quantization: Quantization = option("none", help="Quantisation of the server's weights; needs a GPU.")
    kv_cache_dtype: KvCacheDtype = option("auto", help="Dtype of the server's KV cache.")


class LoadChoice(Section):
    """Load."""

    skip_load: bool = option(False, help="Do not measure under load.")
    concurrency: int | None = option(
        None, help="Sequences in flight, a multiple of 8 (default: 256 on a GPU, 16 on a CPU or for tiny).", ge=8
    )
    prompt_len: int = option(64, help="Tokens of a prompt.", ge=1)
    completion_len: int = option(256, help="Tokens of a completion.", ge=1)
    load_seconds: float = option(
        20.0, help="Seconds of each measurement: base model, adapter, adapter with publishes.", gt=0
    )
    publish_interval: float = option(1.0, help="Seconds between publishes under load.", gt=0)


class StepChoice(Section):
    """Training step."""

    step_seqs: int = option(
        0,
        help="After the publishes, train a step on this many synthetic sequences, with all layers recomputed, and "
        "report the memory of trainer and server; 0: no step.",
        ge=0,
        multiple_of=8,
    )
    step_prompt_len: int = option(512, help="Tokens of a prompt in that step.", ge=1)
    step_completion_len: int = option(1024, help="Tokens of a completion in that step.", ge=1)
    step_optimizer: Literal["adamw", "adamw_8bit"] = option("adamw", help="Optimizer of that step.")
    step_microbatch_tokens: int = option(4608, help="Tokens of a microbatch in that step.", ge=1)


class SyncOptions(Section):
    """What is measured."""

    repeat: int = option(20, help="Measured publishes; use 1000 with --skip-load to look for leaks.", ge=1)
    baseline_repeat: int = option(
        10,
        help="Measured loads by vLLM's /v1/load_lora_adapter; fewer than the adapters that the server "
        "can hold (--keep-versions + 4); 0: none.",
        ge=0,
    )
    log_dir: Path | None = option(None, help="Folder of the server's log (default: a temporary one).")
    choice: BridgeChoice = BridgeChoice()
    model: ModelChoice = ModelChoice()
    server: ServerChoice = ServerChoice()
    load: LoadChoice = LoadChoice()
    step: StepChoice = StepChoice()

    @model_validator(mode="after")
    def _step_fits_the_model(self) -> SyncOptions:
        longest = self.step.step_prompt_len + self.step.step_completion_len
        if self.step.step_seqs and longest > self.server.max_model_len:
            raise ConfigError(
                field="--step-prompt-len and --step-completion-len",
                got=f"{longest} tokens together",
                wanted=f"at most --max-model-len {self.server.max_model_len}",
                fix="raise that or shorten these",
            )
        return self

    def concurrency(self, *, on_gpu: bool) -> int:
        """Sequences kept in flight."""
        return self.load.concurrency or (256 if on_gpu and self.model.shape != "tiny" else 16)
