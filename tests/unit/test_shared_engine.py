"""How generation is held before the weights may be written, with an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server.engine import SharedEngine
from vllm_server.errors import ServeError


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


class Door:
    """Stands in for the fence, for vLLM's table of requests and for its engine."""

    def __init__(self) -> None:
        self.salt, self.passed, self.fault = "old", asyncio.Event(), False
        self.begun: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        core = SimpleNamespace(add_request_async=self.add)
        self.engine: Any = SimpleNamespace(engine_core=core, output_processor=self)
        SharedEngine(self.engine).salt_caches(self.passage, lambda: self.salt)

    async def passage(self) -> None:
        await self.passed.wait()
        if self.fault:
            raise ServeError(503, "weights", got="torn", wanted="whole ones", fix="write them again")

    async def add(self, request: Any) -> None:
        self.begun.append((request.request_id, request.cache_salt))

    def abort_requests(self, names: list[str], *, internal: bool) -> None:
        assert internal
        self.forgotten += names

    def arrives(self, name: str) -> asyncio.Task[None]:
        request = SimpleNamespace(request_id=name, cache_salt=None)
        return asyncio.create_task(self.engine.engine_core.add_request_async(request))


def test_a_completion_that_arrives_during_an_update_gets_the_new_cache_key() -> None:
    async def scene() -> None:
        door = Door()
        arriving = door.arrives("a")
        await asyncio.sleep(0.01)
        assert door.begun == []
        door.salt = "new"
        door.passed.set()
        await arriving
        assert door.begun == [("a", "new ")]

    asyncio.run(scene())


@pytest.mark.parametrize("torn", [True, False])
def test_a_completion_that_may_not_begin_leaves_nothing_in_vllms_tables(torn: bool) -> None:
    async def scene() -> None:
        door = Door()
        arriving = door.arrives("a")
        await asyncio.sleep(0)
        door.fault = torn
        if torn:
            door.passed.set()
        else:
            arriving.cancel()
        with pytest.raises(ServeError if torn else asyncio.CancelledError):
            await arriving
        assert (door.forgotten, door.begun) == (["a"], [])

    asyncio.run(scene())
