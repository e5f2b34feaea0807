"""Training processes for tests that kill them: `grpo train` without a server, forked where everything is imported.

Each line of standard input is a JSON list: options, and the moment at which the child kills itself, or null. The answer
is the child's exit code. A child that watches itself is never too late, however slow the test is. Nothing is computed
before a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from grpo_trainer import loop
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.load import load_all_weights
from grpo_trainer.policy import AllWeights, Policy, build_policy
from grpo_trainer.weights.bridge import Published


class NoBridge(contextlib.nullcontext[Any]):
    """A server that takes every version and is never asked."""

    def connect(self, version: int) -> int:
        return version

    def prove(self) -> None:
        return None

    def updating(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def publish(self, version: int) -> Published:
        return Published(version, "nobody", {})

    def welcome(self) -> None:
        pass

    def __enter__(self) -> NoBridge:
        return self


def policy_of(config: TrainConfig, *_: Any) -> Policy:
    """All weights come without a tokenizer here, and are saved rounded."""
    if config.weight_bridge_mode == "none":
        return AllWeights(load_all_weights(config), None, torch.bfloat16)
    return build_policy(config)


def kill(metrics: Path, lines: int, seconds: float) -> None:
    """Wait until the file of metrics has `lines` lines, then for `seconds`, and kill this process."""
    while lines and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def child(options: dict[str, Any], moment: tuple[int, float] | None) -> int:
    if moment:
        metrics = Path(options["save_path"]) / "metrics.jsonl"
        threading.Thread(target=kill, args=(metrics, *moment), daemon=True).start()
    torch.set_num_threads(1)
    loop.build_policy = policy_of
    loop.build_bridge = lambda *_: NoBridge()  # type: ignore[assignment, return-value]
    loop.train(build(TrainConfig, options))
    return 0


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)  # the answers are the parent's
                code = child(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    main()
