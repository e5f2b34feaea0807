"""How the measurement of each bridge is started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from grpo_trainer.bench.sync import lora_only, restart, shared_vllm
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.subject import Place, Subject

OPENERS: dict[str, Callable[[SyncOptions, Place], AbstractContextManager[Subject]]] = {
    "lora_only": lora_only.opened,
    "shared_vllm": shared_vllm.opened,
    "none": restart.opened,
}
