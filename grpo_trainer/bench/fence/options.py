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
        "shared_vllm", help="How weights are written: in the server's memory, or by sending them."
    )
    writes: int = option(10_000, help="Writes of all weights, one pattern after the other.", ge=2)
    max_seconds: float | None = option(
        None, help="Stop writing after this many seconds, even before --writes is reached (default: no limit).", gt=0
    )
    concurrency: int = option(
        256, help="Sequences in flight, in addition to the answers that are judged; a multiple of 8.", ge=8
    )
    judges: int = option(16, help="Answers asked for at any time that are held against both patterns.", ge=1)
    completion_len: int = option(256, help="Tokens of a completion of those in flight.", ge=1)
    quiet_seconds: float = option(5.0, help="Seconds of the same load without writes, before and after.", gt=0)
    reference_seconds: float = option(4.0, help="Seconds of each pattern alone under load, to know its answers.", gt=0)
    in_flight: Literal["keep", "recompute"] = option("keep", help="What becomes of requests that run.")
    fenced: bool = option(True, help="--no-fenced writes without a fence: the fault that is looked for must be found.")
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
