"""Shared weights with tensor parallel: one server, and a trainer process for the shard of each of its workers.

All processes make the same calls of the same `SharedBridge`, in step. Only rank 0 talks to the server
(`CommonClient`): it sends what all ask for, and gives its answer to all. So one proof compares the server with what all
shards together compute, and changes every shard; and one fence holds the server while every rank writes its shard:

    rank 0   begin ─▶ paused ─┬─▶ write ─┐                ┌─▶ end
                              │          ├─ all have written ┤
    rank 1                    └─▶ write ─┘                └─▶

If a rank ends within the fence, rank 0 reports torn weights. If rank 0 ends, the server detects it by its timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from grpo_common.errors import Problem
from grpo_trainer.config.server import Server
from grpo_trainer.engine.tensor_shards import shard_of
from grpo_trainer.errors import BridgeError, CommonBridgeError, CommonError, ServerError
from grpo_trainer.optim.steps import sampled
from grpo_trainer.parallel.world import World
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.bridge import Published
from grpo_trainer.weights.common import CommonBridge
from vllm_server import protocol

T = TypeVar("T")


class CommonClient(ServerClient):
    """A server that all processes ask for the same things at the same time; rank 0 sends each request.

    Each method raises a `CommonBridgeError` on all ranks if the request fails.
    """

    def __init__(self, config: Server, world: World, check_stop: Callable[[], None] = lambda: None) -> None:
        super().__init__(config, check_stop)
        self._world = world

    def wait_until_there(self) -> protocol.BridgeInfo:
        return self._common(super().wait_until_there)

    def wait_until_settled(self) -> protocol.BridgeDebug:
        return self._common(super().wait_until_settled)

    def begin_update(self, request: protocol.UpdateBeginRequest) -> protocol.UpdateBeginResponse:
        self._world.gather(None)  # the server does not pause before all ranks are there
        begin = super().begin_update
        return self._common(lambda: begin(request))

    def end_update(self, request: protocol.UpdateEndRequest) -> protocol.UpdateEndResponse:
        end = super().end_update
        if not request.torn:
            return self._common(lambda: end(request))
        if self._world.leads:  # the other ranks may be gone
            return end(request)
        return protocol.UpdateEndResponse(policy_version=request.version, stall_seconds=0.0)

    def generate(
        self, prompt_token_ids: Sequence[int], *, model: str | None = None, **sampling: Any
    ) -> protocol.GenerateResponse:
        ask = super().generate
        return self._common(lambda: ask(prompt_token_ids, model=model, **sampling))

    def _common(self, ask: Callable[[], T]) -> T:
        """Call `ask` on rank 0, and return its result on all ranks.

        Raises:
            CommonBridgeError: it failed; on all ranks.
        """
        value, problems = None, ()
        if self._world.leads:
            try:
                value = ask()
            except (BridgeError, ServerError) as error:
                problems = error.problems
        said: list[tuple[T, tuple[Problem, ...]]] = self._world.gather((value, problems))  # type: ignore[arg-type]
        value, problems = said[0]
        if problems:
            raise CommonBridgeError.of(problems)
        return value


class ShardedBridge(CommonBridge):
    """The `shared_vllm` bridge of a process with a shard of each weight.

    Args:
        own: a bridge that uses a `CommonClient`, and waits until all ranks have written.
    """

    def _connect(self, policy_version: int) -> int:
        version = _in_common(lambda: self._own.connect(policy_version))
        self._check_agreement("in its worker's memory")
        return version

    def _prove(self) -> float | None:
        noise = _in_common(self._own.prove)
        self._check_agreement("after the proof")
        return noise

    def _check_agreement(self, when: str) -> None:
        """Check the parameters that every worker has whole."""
        model = self._policy.model
        shard = shard_of(model)
        assert shard is not None
        everywhere = [parameter for name, parameter in model.named_parameters() if name not in shard.cuts]
        self._world.check_agreement(sampled(everywhere), when)

    def _hold(self) -> AbstractContextManager[None]:
        return self._own.updating()

    def publish(self, version: int) -> Published:
        return self._own.publish(version)


def _in_common(work: Callable[[], T]) -> T:
    """Return the result of work that all ranks do in step, and in which all meet the same errors.

    Raises:
        CommonBridgeError: the server can't be used.
    """
    try:
        return work()
    except CommonError:
        raise
    except BridgeError as error:
        raise CommonBridgeError.of(error.problems) from None
