"""Whether the HTTP server's end was asked for, with an engine and an HTTP server that end when the test says so."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvicorn

from vllm_server import compat
from vllm_server.errors import EngineEndedError
from vllm_server.worker import lifeline


class Engine:
    def shutdown(self, timeout: float | None = None) -> None:
        pass


@pytest.mark.parametrize("told", [False, True], ids=["by itself", "after a signal"])
def test_only_an_end_that_nobody_asked_for_is_a_failure(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """vLLM's watchdog ends the HTTP server when it finds the engine ended, also when a signal ended the engine."""

    async def serve_until_the_watchdog_ends_it(self: uvicorn.Server, sockets: object = None) -> None:
        if told:
            Engine().shutdown(timeout=0)

    # Both are set so that what is replaced here comes back.
    monkeypatch.setattr(uvicorn.Server, "serve", serve_until_the_watchdog_ends_it)
    monkeypatch.setattr(Engine, "shutdown", Engine.shutdown)
    monkeypatch.setattr(compat, "found", lambda module, owner: Engine)

    def serve() -> None:
        with compat._told_to_stop():
            asyncio.run(uvicorn.Server(uvicorn.Config("app")).serve())

    if told:
        serve()
    else:
        with pytest.raises(EngineEndedError):
            serve()


def find_process_using_port(port: int) -> object:
    """vLLM's look-up, as it fails for an engine that has just ended."""
    raise psutil.ZombieProcess(port)


def serve_http() -> object:
    return find_process_using_port(1)


def test_vllm_does_not_look_up_who_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    # All are set so that what is replaced here comes back.
    monkeypatch.setattr(sys.modules[__name__], "find_process_using_port", find_process_using_port)
    monkeypatch.setattr(lifeline, "replaced", None)
    monkeypatch.setattr(compat, "_engine_process", lambda: SimpleNamespace(run_engine_core=None))
    launcher: Any = SimpleNamespace(serve_http=serve_http, run_server_worker=None)
    compat._end_promptly(launcher)
    assert serve_http() is None
