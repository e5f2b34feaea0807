"""What a signal does to `grpo run` before it has started any process, and to a trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from grpo_trainer import cli, follower, run, signals
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, StoppedError
from grpo_trainer.parallel.world import World
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


def test_a_trainer_process_that_follows_leaves_signals_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a closed terminal: the first needs the others to save."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    found: list[object] = []

    def trainer(*_: object, **__: object) -> None:
        found.extend(map(signal.getsignal, numbers))
        raise ConfigError(field="the test's end")

    monkeypatch.setattr(follower, "build_policy", lambda *_: SimpleNamespace(model=None))
    monkeypatch.setattr(follower, "Trainer", trainer)
    try:
        with pytest.raises(ConfigError):
            follower.follow(TrainConfig(model_name="m"), World())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == [signal.SIG_IGN] * 3


def test_a_trainer_process_that_follows_does_not_wait_for_its_server_after_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build_policy(_: object, check_stop: Callable[[], None], __: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        check_stop()

    monkeypatch.setattr(follower, "build_policy", build_policy)
    with pytest.raises(StoppedError):
        follower.follow(TrainConfig(model_name="m"), World())
