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
        "32b": {"max_tokens_per_microbatch": 8192},
    }
)
"""Defaults of `Work` that a shape changes."""


class BridgeChoice(Section):
    """Weight bridge."""

    bridge: Literal["shared_vllm", "lora_only", "broadcast", "lora_restart", "none"] = option(
        "shared_vllm", help="The weight bridge, as --weight-bridge-mode of a run."
    )
    share_base: bool = option(False, help="lora_only: the trainer's base model is the server's, as --share-base.")
    transport: Literal["auto", Transport] = option(
        "auto", help="lora_only: how adapters go to the server, as --lora-transport."
    )

    quantization: Quantization = option("none", help="The server's weights, as --server.quantization; needs a GPU.")
    kv_cache_dtype: KvCacheDtype = option("auto", help="The server's KV cache, as --server.kv-cache-dtype.")

    @model_validator(mode="after")
    def _adapters_have_both(self) -> BridgeChoice:
        for flag, given in (("--share-base", self.share_base), ("--transport", self.transport != "auto")):
            if given and self.bridge != "lora_only":
                raise ConfigError(
                    field=flag, got=f"--bridge {self.bridge}", wanted="--bridge lora_only", fix="leave it out"
                )
        return self


class Work(Section):
    """Work."""

    sequences: int = option(256, help="Completions of a step, a multiple of 8 (tiny: 32).", ge=GROUP, multiple_of=GROUP)
    prompt_len: int = option(256, help="Tokens of a prompt (tiny: 16).", ge=1)
    completion_mean: float = option(
        350.0,
        help="Mean length of completions in tokens, before --completion-len truncates them: each token ends its "
        "completion with the probability 1 / this (tiny: 12).",
        ge=1,
    )
    completion_len: int = option(1024, help="Tokens of the longest completion (tiny: 48).", ge=1)
    max_tokens_per_microbatch: int = option(
        16_384, help="Most tokens of a pass (7b: 12288; 32b: 8192; tiny: 1024).", gt=1
    )

    @property
    def seq_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_len + self.completion_len


class LoopOptions(Section):
    """What is measured."""

    steps: int = option(20, help="Optimisation steps of the run; with fewer, layers are not compiled.", ge=2)
    warmup_steps: int = option(3, help="Steps at the run's start that the figures leave out.", ge=1)
    dummy_weights: bool = option(
        False,
        help="Write a model without weights; the server makes them up (--load-format dummy), the trainer shares them. "
        "For models that take minutes to write; needs --bridge shared_vllm, or lora_only with --share-base.",
    )
    run_dir: Path | None = option(
        None, help="Keep the run's folder there: logs, metrics, checkpoints (default: a temporary one)."
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
