"""Whether the HTTP server's end was asked for, with an engine and an HTTP server that end when the test says so."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

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


def test_vllm_does_not_look_up_who_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up fails if the holder is an engine that has just ended."""
    http = ModuleType("tests.launcher_of_vllm")
    monkeypatch.setitem(sys.modules, http.__name__, http)
    exec("def serve_http(): return find_process_using_port(1)\ndef find_process_using_port(port): 1 / 0", vars(http))
    launcher = ModuleType("tests.entry_of_vllm")
    vars(launcher).update(serve_http=vars(http)["serve_http"], run_server_worker=None)
    monkeypatch.setattr(uvicorn.Server, "capture_signals", uvicorn.Server.capture_signals)  # so that it comes back
    monkeypatch.setattr(lifeline, "replaced", None)
    monkeypatch.setattr(compat, "_engine_process", lambda: type("EngineCoreProc", (), {"run_engine_core": None}))
    compat._end_promptly(launcher)
    assert vars(http)["serve_http"]() is None
