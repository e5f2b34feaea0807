"""Options of `grpo bench loop`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import model_validator

from grpo_trainer.bench.sync.options import ModelChoice
from grpo_trainer.bench.sync.shapes import SHAPES
from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError
from vllm_server.protocol.lora import Transport

GROUP = 8
"""Completions of a prompt."""


@dataclass(frozen=True)
class Work:
    """The work of each step; lengths in tokens.

    Attributes:
        sequences: completions of a step, a multiple of `GROUP`.
        completion_mean: mean length of completions before truncation to `completion_len`.
        max_tokens_per_microbatch: most tokens of a forward pass.
    """

    sequences: int
    prompt_len: int
    completion_mean: float
    completion_len: int
    max_tokens_per_microbatch: int

    @property
    def seq_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_len + self.completion_len


USUAL = Work(256, 256, 350.0, 1024, 16_384)
OF_SHAPE: Mapping[str, Work] = MappingProxyType(
    {
        "tiny": Work(32, 16, 12.0, 48, 1024),  # for two CPU cores
        "7b": Work(256, 256, 350.0, 1024, 12_288),
    }
)


class BridgeChoice(Section):
    """Weight bridge."""

    bridge: Literal["shared_vllm", "lora_only", "lora_restart", "none"] = option(
        "shared_vllm", help="The weight bridge, as --weight-bridge-mode of a run."
    )
    share_base: bool = option(False, help="lora_only: the trainer's base model is the server's, as --share-base.")
    transport: Literal["auto", Transport] = option(
        "auto", help="lora_only: how adapters go to the server, as --lora-transport."
    )

    @model_validator(mode="after")
    def _adapters_have_both(self) -> BridgeChoice:
        for flag, given in (("--share-base", self.share_base), ("--transport", self.transport != "auto")):
            if given and self.bridge != "lora_only":
                raise ConfigError(
                    field=flag, got=f"--bridge {self.bridge}", wanted="--bridge lora_only", fix="leave it out"
                )
        return self


class WorkChoice(Section):
    """Work."""

    sequences: int | None = option(
        None, help="Completions of a step, a multiple of 8 (default: 256; tiny: 32).", ge=GROUP, multiple_of=GROUP
    )
    prompt_len: int | None = option(None, help="Tokens of a prompt (default: 256; tiny: 16).", ge=1)
    completion_mean: float | None = option(
        None,
        help="Mean length of completions in tokens, before --completion-len truncates them: each token ends its "
        "completion with the probability 1 / this (default: 350; tiny: 12).",
        ge=1,
    )
    completion_len: int | None = option(None, help="Tokens of the longest completion (default: 1024; tiny: 48).", ge=1)
    max_tokens_per_microbatch: int | None = option(
        None, help="Most tokens of a forward pass (default: 16384; 7b: 12288; tiny: 1024).", gt=1
    )


class LoopOptions(Section):
    """What is measured."""

    steps: int = option(20, help="Optimisation steps of the run; with fewer, layers are not compiled.", ge=2)
    warmup_steps: int = option(3, help="Steps at the run's start that the figures leave out.", ge=1)
    run_dir: Path | None = option(
        None, help="Keep the run's folder there: logs, metrics, checkpoints (default: a temporary one)."
    )
    choice: BridgeChoice = BridgeChoice()
    model: ModelChoice = ModelChoice()
    lengths: WorkChoice = WorkChoice()

    @property
    def work(self) -> Work:
        """What was asked, and for the rest what the shape's default is."""
        asked, usual = self.lengths, OF_SHAPE.get(self.model.shape, USUAL)
        return Work(
            sequences=asked.sequences or usual.sequences,
            prompt_len=asked.prompt_len or usual.prompt_len,
            completion_mean=asked.completion_mean or usual.completion_mean,
            completion_len=asked.completion_len or usual.completion_len,
            max_tokens_per_microbatch=asked.max_tokens_per_microbatch or usual.max_tokens_per_microbatch,
        )

    @model_validator(mode="after")
    def _leaves_steps_to_measure(self) -> LoopOptions:
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                "no step is left to measure",
                field="--warmup-steps",
                got=self.warmup_steps,
                wanted=f"fewer than --steps {self.steps}",
            )
        return self

    @model_validator(mode="after")
    def _vocabulary_allows_the_mean(self) -> LoopOptions:
        vocabulary = SHAPES[self.model.shape].vocab
        if self.work.completion_mean > vocabulary:
            raise ConfigError(
                "completions end at one token id of the vocabulary or more",
                field="--completion-mean",
                got=self.work.completion_mean,
                wanted=f"at most {vocabulary}, the vocabulary of --shape {self.model.shape}",
            )
        return self

    @model_validator(mode="after")
    def _pass_holds_the_longest(self) -> LoopOptions:
        if self.work.max_tokens_per_microbatch < self.work.seq_len:
            raise ConfigError(
                "a pass must hold the longest sequence",
                field="--max-tokens-per-microbatch",
                got=self.work.max_tokens_per_microbatch,
                wanted=f"at least {self.work.seq_len}, --prompt-len and --completion-len together",
            )
        return self
