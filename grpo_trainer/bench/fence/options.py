"""Options of `grpo bench fence`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from grpo_trainer.bench.shapes import ModelChoice
from grpo_trainer.bench.sync.options import BridgeChoice, ServerChoice, SyncOptions
from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError


class FenceOptions(Section):
    """What is measured."""

    bridge: Literal["shared_vllm", "broadcast"] = option(
        "shared_vllm",
        help="How weights are written: in the server's memory (shared_vllm), or by sending them (broadcast).",
    )
    writes: int = option(
        10_000, help="Writes of all weights. Two sets of weights (patterns) are written in turn.", ge=2
    )
    max_seconds: float | None = option(
        None, help="Stop writing after this many seconds, even before --writes is reached (default: no limit).", gt=0
    )
    concurrency: int = option(
        256, help="Sequences in flight, in addition to the answers that are judged; a multiple of 8.", ge=8
    )
    judges: int = option(16, help="Requests in flight whose answers are compared with both patterns.", ge=1)
    completion_len: int = option(256, help="Tokens of a completion of the requests that make the load.", ge=1)
    quiet_seconds: float = option(5.0, help="Seconds of load without writes, before and after the writes.", gt=0)
    reference_seconds: float = option(
        4.0, help="Seconds for which each pattern is served alone, to collect its answers.", gt=0
    )
    in_flight: Literal["keep", "recompute"] = option(
        "keep", help="Requests in flight during a write, as the trainer's --in-flight."
    )
    fenced: bool = option(
        True, help="--no-fenced: write without pausing generation. The benchmark must then find half-written weights."
    )
    log_dir: Path | None = option(None, help="Folder of the server's log (default: a temporary one).")
    model: ModelChoice = ModelChoice()
    server: ServerChoice = ServerChoice()

    @model_validator(mode="after")
    def _sent_weights_are_fenced(self) -> FenceOptions:
        if self.bridge == "broadcast" and not self.fenced:
            why = "the server writes weights that are sent only within a fence"
            raise ConfigError(why, field="--no-fenced", got="--bridge broadcast", wanted="--bridge shared_vllm")
        return self

    def sync(self) -> SyncOptions:
        """Return the options of the same server and trainer for `grpo bench sync`."""
        choice = BridgeChoice(bridge=self.bridge)
        return SyncOptions(choice=choice, model=self.model, server=self.server, log_dir=self.log_dir)
