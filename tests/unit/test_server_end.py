"""Whether the HTTP server's end was asked for, with an engine and an HTTP server that end when the test says so."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
import uvicorn

from vllm_server import compat
from vllm_server.errors import EngineEndedError


class Engine:
    def shutdown(self, timeout: float | None = None) -> None:
        pass


class ShutdownError(Exception):
    """An error of vLLM's own shutdown."""


@pytest.fixture(params=[False, True], ids=["by itself", "after a signal"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the engine was asked to end before the HTTP server ended."""

    async def serve(self: uvicorn.Server, sockets: object = None) -> None:
        if request.param:
            Engine().shutdown(timeout=0)

    # Both are set so that what is replaced here comes back.
    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    monkeypatch.setattr(Engine, "shutdown", Engine.shutdown)
    monkeypatch.setattr(compat, "found", lambda module, owner: Engine)
    return request.param


def serve(*, fails: bool) -> None:
    async def serving() -> None:
        await uvicorn.Server(uvicorn.Config("app")).serve()
        Engine().shutdown()  # vLLM does so once more
        if fails:
            raise ShutdownError

    with compat._told_to_stop():
        asyncio.run(serving())


def test_only_an_end_that_nobody_asked_for_is_a_failure(told: bool) -> None:
    """vLLM's watchdog ends the HTTP server when it finds the engine ended, also when a signal ended the engine."""
    with nullcontext() if told else pytest.raises(EngineEndedError):
        serve(fails=False)


def test_a_failure_after_a_signal_is_only_logged(told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with nullcontext() if told else pytest.raises(ShutdownError):
        serve(fails=True)
    assert ["ShutdownError" in caplog.text, len(caplog.records)] == [told, int(told)]
