"""Several servers for one trainer: each has its own bridge and its own proof, and receives every published version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Self, TypeVar

from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import Sum, reduce
from grpo_trainer.weights.bridge import Published, WeightBridge

T = TypeVar("T")


class SeveralServers(WeightBridge):
    """The bridges of several servers as one.

    A version counts as published when all servers generate with it. Until then, a server with the new version or one
    with the old version may answer a request; each answer names its version.

    Args:
        bridges: address of each server -> its bridge. `shared_vllm` supports a single server only.
        threads: number of servers that are asked at the same time; None: all.
    """

    def __init__(self, bridges: Mapping[str, WeightBridge], threads: int | None = None) -> None:
        self._bridges = dict(bridges)
        self._senders = ThreadPoolExecutor(threads or len(bridges), thread_name_prefix="publish")

    def __enter__(self) -> Self:
        with ExitStack() as entering:
            entering.callback(self._senders.shutdown)
            for bridge in self._bridges.values():
                entering.enter_context(bridge)
            entering.pop_all()
        return self

    def close(self) -> None:
        with ExitStack() as leaving:
            leaving.callback(self._senders.shutdown)
            for bridge in self._bridges.values():
                leaving.push(bridge)

    def connect(self, policy_version: int) -> int:
        """Connect to all servers at the same time; return the highest version that any of them requires to begin with.

        Raises:
            BridgeError: names each server that could not be connected to, and why.
        """
        return max(self._at_once(lambda bridge: bridge.connect(policy_version)))

    def prove(self) -> float | None:
        """Prove one server after the other, because a proof changes the trainer's adapter for a moment."""
        gaps = self._answers({url: bridge.prove for url, bridge in self._bridges.items()})
        return None if None in gaps else max(gap for gap in gaps if gap is not None)

    def _answers(self, asked: Mapping[str, Callable[[], T]]) -> list[T]:
        """Return the answers of servers, one after the other."""
        return [named(url, ask) for url, ask in asked.items()]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return the contexts of all bridges as one."""
        with ExitStack() as held:
            for bridge in self._bridges.values():
                held.enter_context(bridge.updating())
            yield

    def publish(self, version: int) -> Published:
        """Publish to all servers at the same time; each metric is the largest of any server.

        Raises:
            BridgeError: servers refused, or they now serve different versions; the message names them.
        """
        published = self._at_once(lambda bridge: bridge.publish(version))
        return as_one(dict(zip(self._bridges, published, strict=True)), version)

    def _at_once(self, ask: Callable[[WeightBridge], T]) -> list[T]:
        """Return the answers of all bridges, which are asked at the same time.

        Raises:
            BridgeError, ServerError: of all that failed.
        """
        answers: list[T] = []
        failed: list[BridgeError | ServerError] = []
        for url, future in at_once(self._senders, self._bridges, ask).items():
            try:
                answers.append(named(url, future.result))
            except (BridgeError, ServerError) as error:
                failed.append(error)
        if len(failed) == 1:
            raise failed[0]
        if failed:
            raise BridgeError.of([problem for error in failed for problem in error.problems])
        return answers


def at_once(
    threads: ThreadPoolExecutor, bridges: Mapping[str, WeightBridge], ask: Callable[[WeightBridge], T]
) -> Mapping[str, Future[T]]:
    """Ask all bridges in threads, each with its own time limits; return what came of each when none runs any more."""
    asked = {url: threads.submit(ask, bridge) for url, bridge in bridges.items()}
    wait(asked.values())  # even if one fails
    return asked


def as_one(published: Mapping[str, Published], version: int) -> Published:
    """Return the publishes of one version to several servers as one; each metric is the largest of any server.

    Raises:
        BridgeError: the servers serve different versions; the message names them.
    """
    if len({one.version for one in published.values()}) > 1:
        served = [f"{one.version} at {url}" for url, one in published.items()]
        raise BridgeError("the servers differ", field="version", got=", ".join(served), wanted=str(version))
    rows = [reduce(one.metrics) for one in published.values()]
    slowest = {name: Sum(max(row[name] for row in rows if name in row)) for row in rows for name in row}
    first = next(iter(published.values()))
    return Published(first.version, first.name, slowest)


def named(url: str, ask: Callable[[], T]) -> T:
    """Return what a function returns; a `BridgeError` that it raises gets the server's URL."""
    try:
        return ask()
    except BridgeError as error:
        problems = [replace(one, field=": ".join(filter(None, [f"server {url}", one.field]))) for one in error.problems]
        raise BridgeError.of(problems) from error
