"""Options of `grpo bench loop`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import model_validator

from grpo_trainer.bench.shapes import SHAPES, ModelChoice
from grpo_trainer.config.options import Section, option
from grpo_trainer.config.server import KvCacheDtype, Quantization
from grpo_trainer.errors import ConfigError
from vllm_server.protocol.lora import Transport

GROUP = 8
"""Completions of a prompt."""
LAST_STEPS = 5
"""Steps at the end of a run that are not measured. Their groups are generated before, so that training, alone on the
machine, is faster."""

OF_SHAPE: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "tiny": {  # for two CPU cores
            "sequences": 32,
            "prompt_len": 16,
            "completion_mean": 12.0,
            "completion_len": 48,
            "max_tokens_per_microbatch": 1024,
        },
        "7b": {"max_tokens_per_microbatch": 12_288},
        "14b": {"max_tokens_per_microbatch": 8192},
        "32b": {"max_tokens_per_microbatch": 8192},
    }
)
"""Defaults of `Work` that a shape changes."""


class BridgeChoice(Section):
    """Weight bridge."""

    bridge: Literal["shared_vllm", "lora_only", "broadcast", "lora_restart", "none"] = option(
        "shared_vllm", help="Weight bridge, the same as --weight-bridge-mode of `grpo run`."
    )
    share_base: bool = option(False, help="With lora_only: the trainer uses the server's base model.")
    transport: Literal["auto", Transport] = option(
        "auto", help="With lora_only: transport of adapters, the same as --lora-transport of `grpo run`."
    )

    quantization: Quantization = option("none", help="Quantisation of the server's weights; needs a GPU.")
    kv_cache_dtype: KvCacheDtype = option("auto", help="Dtype of the server's KV cache.")

    @model_validator(mode="after")
    def _adapters_have_both(self) -> BridgeChoice:
        for flag, given in (("--share-base", self.share_base), ("--transport", self.transport != "auto")):
            if given and self.bridge != "lora_only":
                raise ConfigError(
                    field=flag, got=f"--bridge {self.bridge}", wanted="--bridge lora_only", fix="leave it out"
                )
        return self


class Work(Section):
    """Sizes."""

    sequences: int = option(
        256,
        help="Completions in a step, a multiple of 8 (default: 256; with --shape tiny 32).",
        ge=GROUP,
        multiple_of=GROUP,
    )
    prompt_len: int = option(256, help="Tokens of a prompt (default: 256; with --shape tiny 16).", ge=1)
    completion_mean: float = option(
        350.0,
        help="Mean completion length in tokens, before truncation to --completion-len. Each token is the last with "
        "probability 1 / VALUE (default: 350; with --shape tiny 12).",
        ge=1,
    )
    completion_len: int = option(
        1024, help="Maximum tokens of a completion (default: 1024; with --shape tiny 48).", ge=1
    )
    max_tokens_per_microbatch: int = option(
        16_384, help="Maximum tokens of a microbatch (default: 16384; 7b: 12288; 14b, 32b: 8192; tiny: 1024).", gt=1
    )

    @property
    def seq_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_len + self.completion_len


class LoopOptions(Section):
    """Run."""

    steps: int = option(
        20,
        help=f"Optimisation steps, warm-up included; {LAST_STEPS} more follow, which are not measured. With fewer than "
        "15 the layers are not compiled, and the figures are lower.",
        ge=2,
    )
    warmup_steps: int = option(
        5,
        help="First steps that are not measured. The first batches are generated together; then the trainer waits for "
        "the next.",
        ge=1,
    )
    dummy_weights: bool = option(
        False,
        help="Write only the model's configuration. The server fills in dummy weights (--load-format dummy), and the "
        "trainer shares them. For models that take minutes to write; needs --bridge shared_vllm, or lora_only with "
        "--share-base.",
    )
    run_dir: Path | None = option(
        None, help="Folder in which the run is kept: logs, metrics, checkpoints (default: a temporary folder)."
    )
    choice: BridgeChoice = BridgeChoice()
    model: ModelChoice = ModelChoice()
    work: Work = Work()

    @classmethod
    def normalised(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the defaults of the shape."""
        return {**OF_SHAPE.get(given.get("shape", ""), {}), **given}

    @model_validator(mode="after")
    def _can_be_measured(self) -> LoopOptions:
        work, vocabulary = self.work, SHAPES[self.model.shape].vocab
        if self.dummy_weights and not (self.choice.bridge == "shared_vllm" or self.choice.share_base):
            raise ConfigError(
                "the trainer has no weights to load",
                field="--dummy-weights",
                got=f"--bridge {self.choice.bridge}",
                wanted="a trainer that shares the server's weights",
                fix="use --bridge shared_vllm, or lora_only with --share-base",
            )
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                "no step is left to measure",
                field="--warmup-steps",
                got=self.warmup_steps,
                wanted=f"fewer than --steps {self.steps}",
            )
        if work.completion_mean > vocabulary:
            raise ConfigError(
                "completions end at one token id of the vocabulary or more",
                field="--completion-mean",
                got=work.completion_mean,
                wanted=f"at most {vocabulary}, the vocabulary of --shape {self.model.shape}",
            )
        if work.max_tokens_per_microbatch < work.seq_len:
            raise ConfigError(
                "a pass must hold the longest sequence",
                field="--max-tokens-per-microbatch",
                got=work.max_tokens_per_microbatch,
                wanted=f"at least {work.seq_len}, --prompt-len and --completion-len together",
            )
        return self
