"""Training processes for tests that kill them: `grpo train` without a server, forked where everything is imported.

Each line of standard input is a JSON object of options; the answers are the child's process id, and its exit code when
it has ended. Nothing is computed before a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from contextlib import AbstractContextManager
from typing import Any

import torch

from grpo_trainer import loop
from grpo_trainer.config.bridge import CheckpointRestart
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
    if isinstance(config.bridge, CheckpointRestart):
        return AllWeights(load_all_weights(config.model), None, torch.bfloat16)
    return build_policy(config)


def child(options: dict[str, Any]) -> int:
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
                code = child(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    main()
