"""Options of checkpoints: where, how often, how many are kept, which to resume from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import field_validator

from grpo_trainer.config.options import Section, option
from grpo_trainer.config.values import at_home
from grpo_trainer.errors import ConfigError

TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
NEVER = "never"
"""The interval of a run without checkpoints, for trials and benchmarks."""


class CheckpointConfig(Section):
    """Checkpoints."""

    save_path: Path = option(Path("trained_model_checkpoints"), help="Folder of the checkpoints.")
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
