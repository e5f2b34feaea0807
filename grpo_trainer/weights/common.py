"""Shared weights in several trainer processes: what their bridges do between steps, all processes together.

Rank 0 calls the methods of `WeightBridge`; the other ranks call `tend` for each order, and `updating` in each step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from grpo_trainer.parallel.world import Tend, World
from grpo_trainer.policy import SharedWeights
from grpo_trainer.weights.bridge import WeightBridge
from grpo_trainer.weights.shared_weights import SharedBridge

T = TypeVar("T")


class CommonBridge(WeightBridge):
    """The `shared_vllm` bridge of one of several trainer processes.

    Args:
        own: the bridge to the server whose memory this process's model is in.
        policy: the policy of that model.
    """

    def __init__(self, own: SharedBridge, policy: SharedWeights, world: World) -> None:
        self._own = own
        self._policy = policy
        self._world = world

    def close(self) -> None:
        self._own.close()

    def connect(self, policy_version: int) -> int:
        """Connect every rank to its server, and agree on one first version.

        Raises:
            CommonBridgeError: a server can't be used, or servers hold weights of different versions.
            CommonWeightsError: weights that must be the same on all ranks differ.
        """
        return self._with_all(Tend("connect", policy_version), lambda: self._connect(policy_version))

    def prove(self) -> float | None:
        """Prove every rank's weights, all ranks at the same time.

        Raises:
            CommonBridgeError: a server generates with other weights.
            CommonWeightsError: weights that must be the same on all ranks differ afterwards.
        """
        return self._with_all(Tend("prove"), self._prove)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold the fences of all servers within the block. All ranks enter it, and each writes its own weights.

        Raises:
            CommonBridgeError: a fence could not be held or released.
        """
        # A fence waits for this rank's device, which never finishes an operation with a rank that has ended. NCCL does
        # not report that; this call does.
        self._world.gather(None)
        with self._hold():
            yield

    def tend(self, order: Tend) -> None:
        """On the other ranks: do between steps what rank 0 has ordered."""
        with self._world.working():
            if order.what == "connect":
                self._connect(order.version)
            else:
                self._prove()

    def _with_all(self, order: Tend, work: Callable[[], T]) -> T:
        self._world.give_all(order)
        with self._world.working():
            return work()

    @abstractmethod
    def _connect(self, policy_version: int) -> int: ...

    @abstractmethod
    def _prove(self) -> float | None: ...

    @abstractmethod
    def _hold(self) -> AbstractContextManager[None]:
        """Return the context in which this rank's server, or the only one, reads no weights."""
