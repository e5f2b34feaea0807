"""What a signal does to `grpo run` before it has started any process, and to a trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from grpo_trainer import cli, run, signals
from grpo_trainer.errors import StoppedError
from grpo_trainer.signals import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_call_that_blocks_even_where_the_shell_had_it_ignored(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def asks_vllm(*_: object) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(120)"], check=False)

    monkeypatch.setattr(run, "run", asks_vllm)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        done = CliRunner().invoke(
            cli.app, ["run", "--model-name", "demo", "--weight-bridge-mode", "lora_only", "--training-steps", "1"]
        )
        assert signal.getsignal(number) == signal.SIG_IGN, "the handler is put back"
    finally:
        signal.signal(number, before)
    assert isinstance(done.exception, StoppedError) and done.exception.exit_code == 128 + number


def test_what_is_sent_for_each_thread_of_a_killed_parent_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignal() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError):
            stop.check()
        monkeypatch.setattr(signals, "ONCE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
