"""Several servers behind one trainer: each has its own bridge, is proved by itself, and gets all that is published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import Sum, reduce
from grpo_trainer.weights.bridge import Published, WeightBridge

T = TypeVar("T")


class SeveralServers:
    """The bridges of several servers as one.

    A version counts as published when all servers generate with it; until then requests may be answered by one that has
    it and by one that has not, and each answer says which version made it.

    Args:
        bridges: one for each server, by its address; those of the trainer's own memory (`shared_vllm`) can't be among
            several.
    """

    def __init__(self, bridges: Mapping[str, WeightBridge]) -> None:
        self._bridges = dict(bridges)
        self._senders = ThreadPoolExecutor(len(self._bridges), thread_name_prefix="publish")
        self._entered = ExitStack()

    def __enter__(self) -> SeveralServers:
        with ExitStack() as entering:
            entering.callback(self._senders.shutdown)
            for bridge in self._bridges.values():
                entering.enter_context(bridge)
            self._entered = entering.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def connect(self, policy_version: int) -> int:
        """As a bridge's: the highest version that one of the servers makes it begin with, for all of them."""
        return max(self._of_each(lambda bridge: bridge.connect(policy_version)))

    def prove(self) -> float | None:
        """As a bridge's, server by server: what the proof does to the adapter for a moment is seen by one at a time."""
        gaps = self._of_each(lambda bridge: bridge.prove())
        return None if None in gaps else max(gap for gap in gaps if gap is not None)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """As a bridge's, of all of them together."""
        with ExitStack() as held:
            for bridge in self._bridges.values():
                held.enter_context(bridge.updating())
            yield

    def publish(self, version: int) -> Published:
        """As a bridge's, to all at the same time; the metrics are those of the slowest.

        Raises:
            BridgeError: a server did not take it, or they differ in what they serve; the message names them.
        """
        sending = {url: self._senders.submit(bridge.publish, version) for url, bridge in self._bridges.items()}
        wait(sending.values())  # also if one fails: nothing of it goes on afterwards
        published = [self._named(url, future.result) for url, future in sending.items()]
        if len({one.version for one in published}) > 1:
            served = [f"{one.version} at {url}" for url, one in zip(self._bridges, published, strict=True)]
            raise BridgeError("the servers differ", field="version", got=", ".join(served), wanted=str(version))
        rows = [reduce(one.metrics) for one in published]
        slowest = {name: Sum(max(row[name] for row in rows if name in row)) for row in rows for name in row}
        return Published(published[0].version, published[0].name, slowest)

    def _of_each(self, ask: Callable[[WeightBridge], T]) -> Sequence[T]:
        return [self._named(url, lambda bridge=bridge: ask(bridge)) for url, bridge in self._bridges.items()]

    @staticmethod
    def _named(url: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except BridgeError as error:
            named = [
                replace(one, field=": ".join(filter(None, [f"server {url}", one.field]))) for one in error.problems
            ]
            raise BridgeError.of(named) from error
