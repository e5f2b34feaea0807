"""How generation is held before the weights may be written, with an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server.shared_engine import SharedEngine


@dataclass
class Core:
    """Confirms a pause at once if it has no batch, and otherwise after the device was waited for."""

    batches: int
    events: list[str] = field(default_factory=list)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.events.append(f"pause, {mode}, {clear_cache}")
        if self.batches:
            await self.drained.wait()
        self.events.append("paused")

    async def collective_rpc(self, method: str) -> None:
        await asyncio.sleep(0)
        self.events.append(method)
        self.batches = max(0, self.batches - 1)
        if not self.batches:
            self.drained.set()


@pytest.mark.parametrize(
    ("batches", "after"),
    [
        (0, ["paused", "grpo_synchronize"]),
        (1, ["grpo_synchronize", "paused", "grpo_synchronize"]),
    ],
)
def test_the_device_is_waited_for_after_the_pause_is_confirmed(batches: int, after: list[str]) -> None:
    core = Core(batches)
    engine: Any = SimpleNamespace(engine_core=core, collective_rpc=core.collective_rpc)
    asyncio.run(SharedEngine(engine).hold(abort=False))
    assert core.events == ["pause, keep, False", *after]
